// Preloaded into a program: the time that CLOCK_BOOTTIME is ahead, as after a suspension, is in the file that
// POSTERN_ASLEEP names, in seconds.
#include <cstdio>
#include <cstdlib>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern "C" int clock_gettime(clockid_t clock, struct timespec *time) noexcept {
    if (syscall(SYS_clock_gettime, clock, time) != 0) return -1;
    const char *path = clock == CLOCK_BOOTTIME ? getenv("POSTERN_ASLEEP") : nullptr;
    FILE *file = path ? fopen(path, "r") : nullptr;
    if (file) {
        long seconds = 0;
        if (fscanf(file, "%ld", &seconds) == 1) time->tv_sec += seconds;
        fclose(file);
    }
    return 0;
}

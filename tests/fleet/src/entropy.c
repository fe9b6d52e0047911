/*
 * getrandom(2) of a simulation: its bytes follow from the seed. std asks here for the keys of its hash maps, by whose order
 * programs do things, and tokio for the branch with which `select!` begins; neither can be seeded otherwise: std has no hook, and
 * tokio's `rng_seed` needs `--cfg tokio_unstable` for everything. The crate getrandom ends up here too. aws-lc makes system
 * calls: keys and signatures differ from run to run, and nothing that happens depends on them.
 *
 * In C, because a symbol that replaces another is `unsafe` in Rust; what compiles aws-lc compiles this.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

ssize_t getrandom(void *buffer, size_t length, unsigned int flags)
{
    static uint64_t state;
    static int seeded;

    if (!seeded) {
        const char *seed = getenv("POSTERN_FLEET_SEED");
        if (!seed)
            return syscall(SYS_getrandom, buffer, length, flags);
        state = strtoull(seed, NULL, 10);
        seeded = 1;
    }
    /* splitmix64 */
    for (size_t at = 0; at < length; at++) {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        ((unsigned char *)buffer)[at] = (unsigned char)(z ^ (z >> 31));
    }
    return (ssize_t)length;
}

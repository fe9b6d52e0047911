//! How much memory this process may use.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// What the process's bound on stalled receivers is at least, in bytes: a few windows.
const MIN_BUDGET: u64 = 8 << 20;

/// Bytes that may be held for receivers that do not read: a sixth of the cgroup's memory limit, or of the machine's
/// memory. A quarter more is allowed for a while, and the rest is for everything else: 2,000 connections with their sockets
/// take half of an agent's 64 MiB.
pub(crate) fn stall_budget() -> usize {
    usize::try_from((limit() / 6).max(MIN_BUDGET)).unwrap_or(usize::MAX)
}

/// Bytes that may wait in front of one link.
pub(crate) fn link_queue() -> usize {
    stall_budget() / 2
}

/// Bytes that this process may use: the cgroup's memory limit, or the machine's memory.
pub fn limit() -> u64 {
    static LIMIT: LazyLock<u64> = LazyLock::new(read_limit);
    *LIMIT
}

fn read_limit() -> u64 {
    let memory =
        memory_of_machine(&fs::read_to_string("/proc/meminfo").unwrap_or_default()).unwrap_or(1 << 30);
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = limit_of_cgroup(Path::new("/sys/fs/cgroup"), &cgroups).filter(|limit| *limit < memory);
    limit.unwrap_or(memory)
}

fn memory_of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The least limit of the cgroup and those above it. In a container `mounted` may be the container's own cgroup, whatever
/// path `/proc/self/cgroup` names: then that path does not exist, and the mount itself has the limit.
fn limit_of_cgroup(mounted: &Path, cgroups: &str) -> Option<u64> {
    let limits = cgroups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, file) = if controllers.is_empty() {
            // Next to version 1 the unified hierarchy is mounted below.
            (vec![mounted.to_owned(), mounted.join("unified")], "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (vec![mounted.join("memory")], "memory.limit_in_bytes")
        } else {
            return None;
        };
        let limits = root.iter().flat_map(|root| {
            // The path begins with a slash, and ancestors end with it.
            Path::new(path).ancestors().map(move |path| root.join(path.strip_prefix("/").unwrap_or(path)))
        });
        // The root of the hierarchy has no such file, and no limit is the word `max`.
        limits.filter_map(|dir| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()).min()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(files: &[(&str, &str)], cgroups: &str) -> Option<u64> {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        limit_of_cgroup(dir.path(), cgroups)
    }

    #[test]
    fn the_least_limit_above_counts() {
        let files =
            [("a/b/memory.max", "max\n"), ("a/memory.max", "2147483648\n"), ("memory.max", "4294967296\n")];
        assert_eq!(with(&files, "0::/a/b\n"), Some(2 << 30));
        assert_eq!(with(&[("a/memory.max", "max\n")], "0::/a\n"), None);
        assert_eq!(with(&[], "0::/\n"), None);
    }

    #[test]
    fn a_container_sees_its_own_limit_at_the_mount() {
        assert_eq!(with(&[("memory.max", "67108864\n")], "0::/\n"), Some(64 << 20));
        let files = [("memory/memory.limit_in_bytes", "67108864\n")];
        let cgroups = "12:cpu,cpuacct:/kubepods/pod1/c\n5:memory:/kubepods/pod1/c\n0::/system.slice\n";
        assert_eq!(with(&files, cgroups), Some(64 << 20));
    }

    #[test]
    fn the_memory_of_this_machine_is_read() {
        assert_eq!(memory_of_machine("MemTotal:       2048 kB\nMemFree: 1 kB\n"), Some(2 << 20));
        assert!(limit() >= 8 << 20 && stall_budget() >= 8 << 20);
    }
}

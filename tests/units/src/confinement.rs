//! Rights of a unit's process as the kernel has them: the effect of the unit's settings.
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF by their numbers (capabilities(7)).
pub(crate) const OF_REDIRECT: u64 = 1 << 12 | PERFMON | 1 << 39;
/// Given up where the kernel takes the programs without it.
const PERFMON: u64 = 1 << 38;

/// Paths that no unit may write.
const READ_ONLY: [&str; 8] = [
    "/",
    "/etc/postern",
    "/root",
    "/usr/local/bin",
    "/var/lib/postern",
    "/sys/kernel",
    "/sys/fs/cgroup",
    "/proc/sys",
];

/// Fails unless the process has exactly these capabilities, but for CAP_PERFMON, no way to more, and may write exactly what it has to.
pub(crate) fn expect(pid: u32, capabilities: u64, writable: &[&str], read_only: &[&str]) -> Result<()> {
    let read = |file: &str| {
        let path = format!("/proc/{pid}/{file}");
        fs::read_to_string(&path).with_context(|| format!("reading {path}"))
    };
    let status = read("status")?;
    for field in ["CapEff", "CapPrm", "CapBnd"] {
        let text = value(&status, field)?;
        let has = u64::from_str_radix(text, 16).with_context(|| format!("{field} {text:?}"))?;
        let given_up = field != "CapBnd" && has == capabilities & !PERFMON;
        ensure!(has == capabilities || given_up, "{field} is {has:#x}, expected {capabilities:#x}");
    }
    // 2: system calls are filtered.
    for (field, expected) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
        let has = value(&status, field)?;
        ensure!(has == expected, "{field} is {has}, expected {expected}");
    }
    let mounts = read("mountinfo")?;
    for path in writable {
        ensure!(is_writable(&mounts, path), "{path} is not writable:\n{mounts}");
    }
    for path in READ_ONLY.iter().chain(read_only) {
        ensure!(!is_writable(&mounts, path), "{path} is writable:\n{mounts}");
    }
    Ok(())
}

/// The value of a field of /proc/PID/status.
fn value<'a>(status: &'a str, field: &str) -> Result<&'a str> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.map(str::trim).with_context(|| format!("no {field} in the status of a process"))
}

/// True if the mount that covers `path` is writable: of several at one point that is the last one.
fn is_writable(mountinfo: &str, path: &str) -> bool {
    let mounts = mountinfo.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(4);
        Some((fields.next()?, fields.next()?))
    });
    let covers = mounts.filter(|(point, _)| Path::new(path).starts_with(point));
    let covering = covers.max_by_key(|(point, _)| point.len());
    covering.is_some_and(|(_, options)| options.split(',').any(|option| option == "rw"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_decides() {
        let mounts = "\
100 90 0:2 / / ro,relatime master:1 - rootfs rootfs rw
101 100 0:2 /var/lib/postern/server /var/lib/postern/server rw,relatime master:1 - rootfs rootfs rw
102 100 0:20 / /sys rw,nosuid - sysfs sysfs rw
103 100 0:20 / /sys ro,nosuid - sysfs sysfs rw
104 103 0:21 / /sys/fs/bpf rw,nosuid master:9 - bpf bpf rw,mode=700
";
        for path in ["/var/lib/postern/server", "/sys/fs/bpf", "/var/lib/postern/server/ca"] {
            assert!(is_writable(mounts, path), "{path}");
        }
        for path in ["/", "/etc/postern", "/var/lib/postern", "/var/lib/postern/server2", "/sys/fs/cgroup"] {
            assert!(!is_writable(mounts, path), "{path}");
        }
    }

    #[test]
    fn fields_are_read() {
        let status = "Name:\ttunnel-server\nCapEff:\t000000c000001000\nSeccomp:\t2\nSeccomp_filters:\t9\n";
        let caps = u64::from_str_radix(value(status, "CapEff").unwrap(), 16).unwrap();
        assert_eq!((caps, value(status, "Seccomp").unwrap()), (OF_REDIRECT, "2"));
        assert!(value(status, "CapBnd").is_err());
    }
}

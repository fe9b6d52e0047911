//! Memory and CPU time that this process may use: the lowest of its cgroups' limits, their ancestors' limits, and the
//! machine's resources.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use prometheus_client::registry::{Registry, Unit};

use crate::cgroup::{Own, own_dirs, parse_mounts};
use crate::gauges::register_gauges;

/// Source of the memory amount if no limit was found.
pub const MACHINE: &str = "/proc/meminfo";

/// An amount, and the file that it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub amount: u64,
    pub from: PathBuf,
}

/// The memory and CPU time that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In bytes.
    pub memory: Limit,
    /// In thousandths of a CPU.
    pub cpu: Limit,
}

impl Limits {
    /// Returns the limits as of the first call: a program divides its resources only once.
    pub fn of_process() -> &'static Self {
        static LIMITS: LazyLock<Limits> = LazyLock::new(|| {
            let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
            let text = read(MACHINE);
            let machine = Limits {
                memory: Limit { amount: memory_of_machine(&text).unwrap_or(1 << 30), from: MACHINE.into() },
                cpu: Limit { amount: 1000 * usable_cpus(), from: "sched_getaffinity".into() },
            };
            let pid = std::process::id();
            machine.within(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"), pid, Path::new("/"))
        });
        &LIMITS
    }

    /// Returns these limits, lowered to those of the cgroups. The files are below `tree`.
    fn within(self, mountinfo: &str, cgroups: &str, pid: u32, tree: &Path) -> Self {
        let mounts = parse_mounts(mountinfo);
        let least = |controller: &str, of: fn(&Path, bool) -> Option<Limit>, machine: Limit| {
            let own = own_dirs(&mounts, cgroups, controller, pid, tree);
            let limits = own.iter().flat_map(|own| ancestors(own).filter_map(|dir| of(dir, own.is_v2)));
            // Of equal limits, the first wins.
            std::iter::once(machine).chain(limits).min_by_key(|limit| limit.amount)
        };
        Self {
            memory: least("memory", memory_of, self.memory.clone()).unwrap_or(self.memory),
            cpu: least("cpu", cpu_of, self.cpu.clone()).unwrap_or(self.cpu),
        }
    }

    /// Returns the number of threads needed to use the available CPU time.
    pub fn threads(&self) -> usize {
        usize::try_from(self.cpu.amount.div_ceil(1000)).unwrap_or(usize::MAX).max(1)
    }

    #[expect(clippy::cast_precision_loss, reason = "a machine has few CPUs")]
    fn cpus(&self) -> f64 {
        self.cpu.amount as f64 / 1000.0
    }

    /// Logs the limits and where they were found; in a pod, also warns if there is none for memory.
    pub fn log(&self, open_files: u32) {
        tracing::info!(
            memory = self.memory.amount,
            memory_from = %self.memory.from.display(),
            cpus = self.cpus(),
            cpus_from = %self.cpu.from.display(),
            open_files,
            "process limits"
        );
        if self.memory.from == Path::new(MACHINE) && in_pod() {
            tracing::warn!(
                memory = self.memory.amount,
                "no memory limit found for this pod, using the machine's memory"
            );
        }
    }
}

/// Iterates over the cgroup's directory and its ancestors.
fn ancestors(own: &Own) -> impl Iterator<Item = &Path> {
    own.dir.ancestors().take_while(|dir| dir.starts_with(&own.point))
}

/// Reads a memory limit. Above `memory.high` the kernel slows the process down so much that it counts as a limit too.
/// The word `max`, or in version 1 more than any machine has, means no limit.
fn memory_of(dir: &Path, is_v2: bool) -> Option<Limit> {
    let files: &[&str] = if is_v2 { &["memory.max", "memory.high"] } else { &["memory.limit_in_bytes"] };
    let limits = files.iter().filter_map(|file| {
        let from = dir.join(file);
        Some(Limit { amount: fs::read_to_string(&from).ok()?.trim().parse().ok()?, from })
    });
    limits.min_by_key(|limit| limit.amount)
}

/// Reads a CPU quota. The word `max`, or in version 1 a negative number, means no quota.
fn cpu_of(dir: &Path, is_v2: bool) -> Option<Limit> {
    let from = dir.join(if is_v2 { "cpu.max" } else { "cpu.cfs_quota_us" });
    let mut text = fs::read_to_string(&from).ok()?;
    if !is_v2 {
        text += &fs::read_to_string(dir.join("cpu.cfs_period_us")).ok()?;
    }
    let (quota, period) = text.trim().split_once(char::is_whitespace)?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    Some(Limit { amount: quota.checked_mul(1000)?.checked_div(period)?, from })
}

fn memory_of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the number of CPUs that this process may run on. std's number would include quotas, rounded down.
fn usable_cpus() -> u64 {
    let count = |set: CpuSet| (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu) == Ok(true)).count();
    let affinity = sched_getaffinity(Pid::from_raw(0)).map(count).ok();
    // The kernel refuses the call on machines with more CPUs than fit into the set.
    let cpus = affinity.or_else(|| Some(std::thread::available_parallelism().ok()?.get()));
    cpus.map_or(1, |cpus| cpus as u64)
}

/// True if this process is in a pod: every container of a kubelet has a termination-log file, and most pods have the
/// API server's address.
pub fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
        || fs::read_to_string("/proc/self/mountinfo")
            .is_ok_and(|text| text.contains(" /dev/termination-log "))
        || fs::read_to_string("/proc/self/cgroup").is_ok_and(|text| text.contains("kubepods"))
}

/// Registers `memory_limit_bytes` and `cpu_limit` of this process. `registry` has the prefix `postern`.
pub fn register_limits(registry: &mut Registry) {
    let limits = Limits::of_process();
    register_gauges(registry, move |gauges| {
        let help = "Bytes that the process may use, and the file that says so";
        let bytes = i64::try_from(limits.memory.amount).unwrap_or(i64::MAX);
        let from = limits.memory.from.to_string_lossy();
        gauges.by_label(("memory_limit", help, Some(&Unit::Bytes)), "from", [(&*from, bytes)])?;
        let help = "CPUs that the process may use at a time, and the file that says so";
        let from = limits.cpu.from.to_string_lossy();
        gauges.by_label(("cpu_limit", help, None), "from", [(&*from, limits.cpus())])
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 4711;
    /// Resources of the machine.
    const MEMORY: u64 = 16 << 30;
    const CPUS: u64 = 8;
    const AFFINITY: &str = "affinity";
    /// Version 1's value for no limit.
    const HIGH: &str = "9223372036854771712\n";

    /// Returns the limits found with these texts in /proc/self and these files in the cgroups: bytes, thousandths of a
    /// CPU, and their files. The process is in the directories `own`.
    fn found(
        mountinfo: &str,
        cgroups: &str,
        files: &[(&str, &str)],
        own: &[&str],
    ) -> (u64, u64, String, String) {
        let tree = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = tree.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (path, text) in files {
            write(path, text);
            let (folder, _) = path.rsplit_once('/').unwrap();
            write(&format!("{folder}/cgroup.procs"), "1\n471\n47110\n");
        }
        for folder in own {
            write(&format!("{folder}/cgroup.procs"), &format!("12\n{PID}\n"));
        }
        let machine = Limits {
            memory: Limit { amount: MEMORY, from: MACHINE.into() },
            cpu: Limit { amount: 1000 * CPUS, from: AFFINITY.into() },
        };
        let Limits { memory, cpu } = machine.within(mountinfo, cgroups, PID, tree.path());
        let shown = |limit: &Limit| {
            let below = limit.from.strip_prefix(tree.path());
            below.map_or_else(|_| limit.from.display().to_string(), |below| format!("/{}", below.display()))
        };
        (memory.amount, cpu.amount, shown(&memory), shown(&cpu))
    }

    fn machines() -> (u64, u64, String, String) {
        (MEMORY, 1000 * CPUS, MACHINE.to_owned(), AFFINITY.to_owned())
    }

    const V2: &str = "26 25 0:24 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
";

    #[test]
    fn a_systemd_unit_has_the_least_of_its_own_and_its_slices_limits() {
        const UNIT: &str = "/sys/fs/cgroup/system.slice/postern-server@a.service";
        let slice = "/sys/fs/cgroup/system.slice/memory.max";
        let [max, high, cpu] = ["memory.max", "memory.high", "cpu.max"].map(|file| format!("{UNIT}/{file}"));
        let of = |files: [&str; 4]| {
            let files: Vec<_> = [slice, &max, &high, &cpu].into_iter().zip(files).collect();
            found(V2, "0::/system.slice/postern-server@a.service\n", &files, &[UNIT])
        };
        let own = of(["max\n", "2147483648\n", "max\n", "150000 100000\n"]);
        assert_eq!(own, (2 << 30, 1500, max.clone(), cpu.clone()));
        let all = of(["1073741824\n", "2147483648\n", "max\n", "max 100000\n"]);
        assert_eq!(all, (1 << 30, 1000 * CPUS, slice.to_owned(), AFFINITY.to_owned()));
        assert_eq!(of(["max\n", "2147483648\n", "1048576\n", "max 100000\n"]).2, high);
        assert_eq!(of(["max\n", "max\n", "max\n", "max 100000\n"]), machines());
        // More than the machine has, and nonsense.
        assert_eq!(of(["max\n", "99999999999999\n", "\n", "900000000 100000\n"]), machines());
        assert_eq!(of(["-1\n", "many\n", "max\n", "1 0\n"]), machines());
        assert_eq!(found(V2, "0::/\n", &[], &[]), machines());
    }

    #[test]
    fn a_host_with_version_1_has_them_in_each_hierarchy() {
        let memory = "/sys/fs/cgroup/memory/system.slice/postern.service/memory.limit_in_bytes";
        let [quota, period] =
            ["quota", "period"].map(|file| format!("/sys/fs/cgroup/cpu,cpuacct/postern/cpu.cfs_{file}_us"));
        let cgroups = "\
12:cpu,cpuacct:/postern
5:memory:/system.slice/postern.service
1:name=systemd:/x
0::/x
";
        let own =
            ["/sys/fs/cgroup/memory/system.slice/postern.service", "/sys/fs/cgroup/cpu,cpuacct/postern"];
        // A hybrid host also has version 2, with neither controller.
        let hybrid = format!("{V1}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        for mounts in [V1, &hybrid] {
            let of = |limit: &str, cpu: &str| {
                found(mounts, cgroups, &[(memory, limit), (&quota, cpu), (&period, "50000\n")], &own)
            };
            assert_eq!(of("268435456\n", "125000\n"), (256 << 20, 2500, memory.to_owned(), quota.clone()));
            assert_eq!(of(HIGH, "-1\n"), machines());
        }
    }

    /// The pod is in its own cgroup namespace, as containerd creates it on hosts with version 2. The host's hierarchy
    /// is mounted too, as in the shipped manifests.
    #[test]
    fn a_pod_has_its_own_limit_and_those_above_it() {
        const MOUNTS: &str = "\
640 630 0:24 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw
650 620 0:24 /../../.. /host/cgroup ro,nosuid - cgroup2 cgroup2 rw
";
        let own = ["/sys/fs/cgroup", "/host/cgroup/kubepods.slice/pod1.slice/own.scope"];
        let of = |pod: &str| {
            let files = [
                ("/sys/fs/cgroup/memory.max", "2147483648\n"),
                ("/sys/fs/cgroup/cpu.max", "50000 100000\n"),
                ("/host/cgroup/kubepods.slice/pod1.slice/own.scope/memory.max", "2147483648\n"),
                ("/host/cgroup/kubepods.slice/pod1.slice/memory.max", pod),
                ("/host/cgroup/kubepods.slice/pod1.slice/other.scope/memory.max", "1048576\n"),
                ("/host/cgroup/kubepods.slice/pod2.slice/memory.max", "1048576\n"),
            ];
            found(MOUNTS, "0::/\n", &files, &own)
        };
        let cpu = "/sys/fs/cgroup/cpu.max".to_owned();
        assert_eq!(of("max\n"), (2 << 30, 500, "/sys/fs/cgroup/memory.max".to_owned(), cpu.clone()));
        let of_pod = "/host/cgroup/kubepods.slice/pod1.slice/memory.max".to_owned();
        assert_eq!(of("1073741824\n"), (1 << 30, 500, of_pod, cpu));
    }

    /// The host's hierarchy is mounted over the pod's own: its cgroup is the one there that contains the process.
    #[test]
    fn a_pod_finds_its_limit_below_the_hosts_hierarchy() {
        const MOUNTS: &str = "\
640 630 0:24 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw
650 640 0:24 /../.. /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw
";
        const OWN: &str = "/sys/fs/cgroup/kubepods/pod1";
        let limit = format!("{OWN}/memory.max");
        let files = [(limit.as_str(), "536870912\n"), ("/sys/fs/cgroup/kubepods/pod2/memory.max", "4096\n")];
        assert_eq!(found(MOUNTS, "0::/\n", &files, &[OWN]).2, limit);
        // No visible cgroup contains the process.
        assert_eq!(found(MOUNTS, "0::/\n", &files, &[]), machines());
        // The process was moved to another cgroup, or to one below the namespace's root.
        let other = "/sys/fs/cgroup/kubepods/pod2";
        assert_eq!(found(MOUNTS, "0::/../pod2\n", &files, &[other]).0, 4096);
        let below = format!("{OWN}/below");
        assert_eq!(found(MOUNTS, "0::/below\n", &files, &[&below]).0, 512 << 20);
    }

    /// The container is in the host's cgroup namespace, as with containerd on hosts with version 1 and `docker run
    /// --cgroupns=host`.
    #[test]
    fn a_container_in_the_hosts_namespace_has_the_limit_at_its_mount() {
        const V2: &str = "640 630 0:24 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        const V1: &str = "640 630 0:32 /docker/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let [v2, v1] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        for (mounts, cgroups, file) in [(V2, "0::/docker/c1\n", v2), (V1, "5:memory:/docker/c1\n0::/x\n", v1)]
        {
            // Another cgroup is mounted over it.
            assert_eq!(found(mounts, cgroups, &[(file, "67108864\n")], &[]), machines());
            let folder = file.rsplit_once('/').unwrap().0;
            let of = found(mounts, cgroups, &[(file, "67108864\n")], &[folder]);
            assert_eq!((of.0, of.2.as_str()), (64 << 20, file));
        }
        // The host's hierarchy is mounted over it.
        let hosts = format!("{V1}650 640 0:32 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
        let own = "/sys/fs/cgroup/memory/docker/c1";
        let limit = format!("{own}/memory.limit_in_bytes");
        assert_eq!(found(&hosts, "5:memory:/docker/c1\n", &[(&limit, "67108864\n")], &[own]).2, limit);
    }

    #[test]
    fn threads_keep_a_quota_busy() {
        let threads = |amount| {
            let of = |amount| Limit { amount, from: AFFINITY.into() };
            Limits { memory: of(0), cpu: of(amount) }.threads()
        };
        for (cpu, expected) in [(0, 1), (1, 1), (500, 1), (1000, 1), (1001, 2), (2500, 3), (8000, 8)] {
            assert_eq!(threads(cpu), expected, "{cpu}");
        }
    }

    #[test]
    fn this_machine_has_memory_and_cpus() {
        assert_eq!(memory_of_machine("MemTotal:       2048 kB\nMemFree: 1 kB\n"), Some(2 << 20));
        let limits = Limits::of_process();
        assert!(limits.memory.amount >= 8 << 20 && limits.cpu.amount > 0, "{limits:?}");
    }
}

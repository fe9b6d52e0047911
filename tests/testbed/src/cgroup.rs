//! Child cgroups of the cgroup v2 hierarchy. The redirect is attached to these, never to the machine's root.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::id::Id;

/// A cgroup that keeps its processes in a child: in cgroup v2 only a cgroup without processes of its own can have
/// children with a memory limit.
#[derive(Debug, Clone)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub fn create(path: PathBuf) -> Result<Self> {
        let cgroup = Self { path };
        let leaf = cgroup.leaf();
        fs::create_dir_all(&leaf)
            .with_context(|| format!("creating cgroup {} (needs root)", leaf.display()))?;
        Ok(cgroup)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file to which a process ID is written to move the process here.
    pub fn procs(&self) -> PathBuf {
        self.leaf().join(PROCS)
    }

    /// Moves a process into it.
    pub fn add(&self, pid: u32) -> Result<()> {
        move_to(&self.leaf(), pid)
    }

    fn leaf(&self) -> PathBuf {
        self.path.join("rest")
    }
}

const PROCS: &str = "cgroup.procs";

/// Returns the processor time that a run's programs have used, while it runs.
pub fn used(id: &Id) -> Option<Duration> {
    let text = fs::read_to_string(unified_mount().ok()?.join(id.to_string()).join("cpu.stat")).ok()?;
    let microseconds = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()?;
    Some(Duration::from_micros(microseconds))
}

/// A memory limit for one program, as a container has it: a cgroup of its own. The run's sweep removes it.
#[derive(Debug, Clone)]
pub struct MemoryLimit {
    path: PathBuf,
    bytes: u64,
    version: MemoryVersion,
    cpus: Option<f64>,
    /// Its cgroup of the CPU controller, if that is a separate one.
    cpu: Option<PathBuf>,
    /// Mount point of the host's cgroups if the program has namespaces of its own.
    pub(crate) pod: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryVersion {
    V1,
    V2,
}

impl MemoryLimit {
    /// Makes a cgroup `name` with a limit of `bytes`, for a program that would otherwise be in `parent`.
    pub(crate) fn create(id: &Id, parent: &Cgroup, name: &str, bytes: u64) -> Result<Self> {
        let (path, version) = match v1_mounts()?.into_iter().find(|mount| mount.ends_with("memory")) {
            Some(mount) => (mount.join(id.to_string()).join(name), MemoryVersion::V1),
            None => {
                delegate(parent.path(), "memory")?;
                (parent.path().join(name), MemoryVersion::V2)
            }
        };
        fs::create_dir_all(&path).with_context(|| format!("creating cgroup {}", path.display()))?;
        let limit = Self { path, bytes, version, cpus: None, cpu: None, pod: None };
        limit.write(limit.of_version("memory.limit_in_bytes", "memory.max"), &bytes.to_string())?;
        Ok(limit)
    }

    /// Returns the limit in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of CPUs that it may use at a time, if they are limited.
    pub fn cpus(&self) -> Option<f64> {
        self.cpus
    }

    /// Adds a CPU limit: this share of each 100 ms, in microseconds.
    pub(crate) fn with_cpu(mut self, id: &Id, name: &str, microseconds: u32) -> Result<Self> {
        self.cpus = Some(f64::from(microseconds) / 100_000.0);
        let Some(mount) = v1_mounts()?.into_iter().find(|mount| has_cpu(mount)) else {
            delegate(self.path.parent().context("no parent")?, "cpu")?;
            self.write("cpu.max", &format!("{microseconds} 100000"))?;
            return Ok(self);
        };
        let path = mount.join(id.to_string()).join(name);
        fs::create_dir_all(&path).with_context(|| format!("creating cgroup {}", path.display()))?;
        for (file, value) in [("cpu.cfs_period_us", 100_000), ("cpu.cfs_quota_us", microseconds)] {
            let file = path.join(file);
            fs::write(&file, value.to_string()).with_context(|| format!("writing {}", file.display()))?;
        }
        Ok(Self { cpu: Some(path), ..self })
    }

    /// Returns the same limit for a program in a pod: in a cgroup namespace of its own, mounted at /sys/fs/cgroup, with
    /// the host's hierarchies at `hosts`, which may be the same place.
    pub fn in_pod(&self, hosts: &Path) -> Self {
        Self { pod: Some(hosts.to_owned()), ..self.clone() }
    }

    /// Returns the files to which a process ID is written to move the process here. This must happen before the program
    /// starts: it reads its limit, and the memory that it already has is not counted.
    pub(crate) fn procs(&self) -> impl Iterator<Item = PathBuf> {
        [Some(&self.path), self.cpu.as_ref()].into_iter().flatten().map(|path| path.join(PROCS))
    }

    /// Fails if `pid` is not below this limit, or if the kernel has OOM-killed a process there.
    pub fn expect_kept(&self, pid: u32) -> Result<()> {
        let inside = members(&self.path).with_context(|| format!("reading {}", self.path.display()))?;
        ensure!(inside == [pid], "the processes below the limit are {inside:?}, expected {pid}");
        let text = self.read(self.of_version("memory.oom_control", "memory.events"))?;
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        let kills: u64 = kills
            .context("no oom_kill among the cgroup's events (Linux 4.13)")?
            .parse()
            .context("the count oom_kill")?;
        ensure!(kills == 0, "the kernel killed {kills} processes at the limit of {} bytes", self.bytes);
        Ok(())
    }

    /// Returns the memory charged to it now, in bytes, page cache included.
    pub fn charged(&self) -> Result<u64> {
        let file = self.of_version("memory.usage_in_bytes", "memory.current");
        self.read(file)?.trim().parse().with_context(|| format!("reading {file}"))
    }

    /// Returns the most memory ever charged to it, in bytes, page cache included.
    pub fn peak(&self) -> Result<u64> {
        let file = self.of_version("memory.max_usage_in_bytes", "memory.peak");
        self.read(file)?.trim().parse().with_context(|| format!("reading {file}"))
    }

    fn of_version(&self, v1: &'static str, v2: &'static str) -> &'static str {
        if self.version == MemoryVersion::V1 { v1 } else { v2 }
    }

    fn read(&self, file: &str) -> Result<String> {
        let file = self.path.join(file);
        fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, text).with_context(|| format!("writing {text} to {}", file.display()))
    }
}

/// True if a v1 mount has the CPU controller: its name lists its controllers.
fn has_cpu(mount: &Path) -> bool {
    let name = mount.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.split(',').any(|controller| controller == "cpu")
}

/// Lets the children of a cgroup v2 have limits of this controller.
fn delegate(parent: &Path, controller: &str) -> Result<()> {
    let mount = unified_mount()?;
    let controllers = fs::read_to_string(mount.join("cgroup.controllers"))
        .with_context(|| format!("reading {}/cgroup.controllers", mount.display()))?;
    ensure!(
        controllers.split_whitespace().any(|one| one == controller),
        "this host has no {controller} controller, neither in cgroup v1 nor in v2 ({} has {:?}): mount one with \
         `mount -t cgroup -o {controller} none /sys/fs/cgroup/{controller}`, or boot without `cgroup_disable={controller}`",
        mount.display(),
        controllers.trim()
    );
    let mut path = mount.clone();
    let below = parent.strip_prefix(&mount).context("a cgroup outside of the v2 hierarchy")?;
    for step in std::iter::once(Path::new("")).chain(below.iter().map(Path::new)) {
        path.push(step);
        let file = path.join("cgroup.subtree_control");
        let value = format!("+{controller}");
        fs::write(&file, &value).with_context(|| format!("writing {value} to {}", file.display()))?;
    }
    Ok(())
}

/// Returns the mount point of the cgroup v2 hierarchy; on hybrid hosts that is not /sys/fs/cgroup.
pub fn unified_mount() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
    for line in mounts.lines() {
        let mut fields = line.split_whitespace();
        if let (Some(_), Some(at), Some("cgroup2")) = (fields.next(), fields.next(), fields.next()) {
            return Ok(PathBuf::from(at));
        }
    }
    bail!("no cgroup2 mount in /proc/mounts: mount one with `mount -t cgroup2 none /sys/fs/cgroup/unified`")
}

/// Returns the mounted cgroup v1 hierarchies; none on a host with cgroup v2 only.
pub fn v1_mounts() -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace();
        let (_, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup").then(|| PathBuf::from(at))
    };
    Ok(mounts.lines().filter_map(of_line).collect())
}

/// Makes `parent`/`name` in every v1 hierarchy and returns the path, for a kubelet to put its pods in. On hybrid hosts
/// a pod's processes are moved in both versions.
pub fn create_for_kubelet(parent: &Cgroup, name: &str) -> Result<String> {
    let mounts = v1_mounts()?;
    // With v2 only, a kubelet delegates controllers from a cgroup that must then have no processes of its own.
    ensure!(
        !mounts.is_empty(),
        "this host has cgroup v2 alone; the test cluster needs v1 controllers too (a hybrid host)"
    );
    let group = parent.path().join(name);
    let path = group.strip_prefix(unified_mount()?).context("a cgroup outside of the v2 hierarchy")?;
    for mount in mounts {
        let folder = mount.join(path);
        fs::create_dir_all(&folder).with_context(|| format!("creating cgroup {}", folder.display()))?;
    }
    Ok(format!("/{}", path.display()))
}

/// Returns the cgroup v2 folder of this process.
pub fn of_this_process(mount: &Path) -> Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").context("reading /proc/self/cgroup")?;
    let path = text
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .context("no cgroup v2 line in /proc/self/cgroup")?;
    Ok(mount.join(path.trim_start_matches('/')))
}

/// Moves a process into the cgroup at `path`.
pub fn move_to(path: &Path, pid: u32) -> Result<()> {
    let file = path.join(PROCS);
    fs::write(&file, pid.to_string()).with_context(|| format!("writing {pid} to {}", file.display()))
}

fn members(path: &Path) -> io::Result<Vec<u32>> {
    let text = fs::read_to_string(path.join(PROCS))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Kills all processes in the cgroup and its children, then removes them; it may be gone already.
pub fn destroy(path: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    for entry in entries {
        let entry = entry.with_context(|| format!("reading {}", path.display()))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            destroy(&entry.path())?;
        }
    }
    loop {
        for pid in members(path).unwrap_or_default() {
            let pid = Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX));
            if pid != nix::unistd::getpid() {
                // The process may be dead already.
                kill(pid, Signal::SIGKILL).ok();
            }
        }
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            // Killed processes stay members until the kernel has reaped them.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error).with_context(|| format!("removing cgroup {}", path.display())),
        }
    }
}

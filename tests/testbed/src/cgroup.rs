//! Child cgroups of the cgroup v2 hierarchy. The redirect is attached to these, never to the machine's root.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[derive(Debug, Clone)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub fn create(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("creating cgroup {} (needs root)", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process into it.
    pub fn add(&self, pid: u32) -> Result<()> {
        move_to(&self.path, pid)
    }

    pub fn members(&self) -> Result<Vec<u32>> {
        members(&self.path).with_context(|| format!("reading {}", self.path.display()))
    }
}

/// Where the cgroup v2 hierarchy is mounted; on hybrid hosts that is not /sys/fs/cgroup.
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

/// The mounted cgroup v1 hierarchies; none on a host with cgroup v2 alone.
pub fn v1_mounts() -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/mounts").context("reading /proc/mounts")?;
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace();
        let (_, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup").then(|| PathBuf::from(at))
    };
    Ok(mounts.lines().filter_map(of_line).collect())
}

/// Makes `parent`/`name` in every v1 hierarchy and returns the path, for a kubelet to put its pods in. On hybrid hosts a
/// pod's processes are moved in both.
pub fn create_for_kubelet(parent: &Cgroup, name: &str) -> Result<String> {
    let mounts = v1_mounts()?;
    // With v2 alone a kubelet delegates controllers from a cgroup that must then have no processes of its own.
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

/// The cgroup v2 folder that this process is in.
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
    let file = path.join("cgroup.procs");
    fs::write(&file, pid.to_string()).with_context(|| format!("writing {pid} to {}", file.display()))
}

fn members(path: &Path) -> io::Result<Vec<u32>> {
    let text = fs::read_to_string(path.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Kills everything in the cgroup and its children, then removes them; it may be gone already.
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
                // It may be dead already.
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

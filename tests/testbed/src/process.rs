//! Processes of a run: in a namespace and cgroup, each in its own process group, with their output in a file.
use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::cgroup::{Cgroup, MemoryLimit};
use crate::netns::Namespace;
use crate::wait::wait_for;

/// Time limit for a process to end, or to stop, once it has been told to by a signal that it cannot catch.
const ENDS: Duration = Duration::from_secs(60);

/// The host that a process runs on.
#[derive(Debug, Clone, Copy)]
pub struct Placement<'a> {
    pub ns: &'a Namespace,
    pub cgroup: &'a Cgroup,
}

impl Placement<'_> {
    pub fn command(&self, program: &Path) -> Command {
        // POSIX shells have no slices of "$@", so `shift` is used. Most hosts start programs with a limit of 1,024 open
        // files, and so does this, regardless of the scenario's own limit.
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                r#"echo $$ > "$1" || exit 125; ulimit -S -n 1024; net="$2"; shift 2; exec nsenter --net="$net" -- "$@""#,
                "sh",
            ])
            .arg(self.cgroup.procs())
            .arg(self.ns.path())
            .arg(program);
        command
    }

    /// As [`Self::command`], below a memory limit if there is one.
    pub fn command_below(&self, limit: Option<&MemoryLimit>, program: &Path) -> Command {
        let Some(limit) = limit else { return self.command(program) };
        let mut command = self.command(Path::new("sh"));
        let enter = r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@""#;
        command.args(["-c", enter, "sh"]).args(limit.procs()).arg("--");
        if let Some(hosts) = &limit.pod {
            command.args(["unshare", "--cgroup", "--mount", "sh", "-c", POD, "sh"]).arg(hosts);
        }
        command.arg(program);
        command
    }
}

/// Mounts the cgroup namespace's view at the path where programs look for it, as containerd does, and the host's
/// cgroups at `$1`.
const POD: &str = r#"set -e
mkdir -p "$1"
mount -t tmpfs none /mnt
mkdir /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
cat /proc/mounts > /mnt/mounts
own() { umount -l "$3"; mount -t "$1" -o "$2" none "$3"; }
while read -r _ point type options _; do
    case "$point,$type,$options," in
    /mnt/*) ;;
    *,cgroup2,*) own cgroup2 rw "$point" ;;
    *,cgroup,*,memory,*) own cgroup memory "$point" ;;
    *,cgroup,*,cpu,cpuacct,*) own cgroup cpu,cpuacct "$point" ;;
    *,cgroup,*,cpu,*) own cgroup cpu "$point" ;;
    esac
done < /mnt/mounts
mount --rbind /mnt/cgroup "$1"
umount -l /mnt
shift
exec "$@"
"#;

/// A place in a log.
#[derive(Debug, Clone, Copy)]
pub struct Mark(usize);

/// A running program. Dropping it kills its whole process group.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    /// None: the output goes to this program's own output.
    log: Option<PathBuf>,
    /// Offset of this process's part of the log: a restarted program appends.
    begins: usize,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `command`; its output is appended to `logs/NAME.log` below the run's folder.
    pub fn spawn(dir: &Path, name: &str, mut command: Command) -> Result<Self> {
        let log = log_file(dir, name);
        let out = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        let err = out.try_clone().context("duplicating the log's descriptor")?;
        command.stdout(out).stderr(err);
        Self::start(name, command, Some(log))
    }

    /// Starts `command` with `stderr`, such as a pipe, as its standard error.
    pub fn spawn_with_stderr(name: &str, mut command: Command, stderr: &OwnedFd) -> Result<Self> {
        let stderr = stderr.try_clone().context("duplicating the descriptor")?;
        command.stdout(Stdio::null()).stderr(stderr);
        Self::start(name, command, None)
    }

    /// Starts `command` with this program's own output.
    pub fn spawn_inheriting(name: &str, command: Command) -> Result<Self> {
        Self::start(name, command, None)
    }

    fn start(name: &str, mut command: Command, log: Option<PathBuf>) -> Result<Self> {
        let written = log.as_ref().and_then(|log| fs::metadata(log).ok()).map_or(0, |log| log.len());
        let begins = usize::try_from(written).context("the length of a log")?;
        let child = command.stdin(Stdio::null()).process_group(0).spawn();
        let child = child.with_context(|| format!("starting {command:?}"))?;
        Ok(Self { name: name.to_owned(), child, log, begins, ended: None })
    }

    /// Returns its name in messages and of its log.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its process ID (sh and nsenter exec the program, so this is the program's own).
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output of this process. That of earlier ones of this name is in the same file, and does not count.
    pub fn output(&self) -> Result<String> {
        self.output_since(Mark(self.begins))
    }

    /// Returns the output of this process and of all earlier ones of this name, for what none may have written.
    pub fn output_of_all(&self) -> Result<String> {
        self.output_since(Mark(0))
    }

    /// Returns the end of the log so far, after which a phase of a test begins.
    pub fn mark(&self) -> Result<Mark> {
        let log = self.log()?;
        let written = fs::metadata(log).with_context(|| format!("reading {}", log.display()))?.len();
        usize::try_from(written).context("the length of a log").map(Mark)
    }

    pub fn output_since(&self, mark: Mark) -> Result<String> {
        let log = self.log()?;
        let bytes = fs::read(log).with_context(|| format!("reading {}", log.display()))?;
        Ok(String::from_utf8_lossy(bytes.get(mark.0..).unwrap_or_default()).into_owned())
    }

    fn log(&self) -> Result<&Path> {
        self.log.as_deref().with_context(|| format!("{} has no log", self.name))
    }

    /// Returns the program that it runs.
    pub fn program(&self) -> Result<PathBuf> {
        let link = format!("/proc/{}/exe", self.pid());
        fs::read_link(&link).with_context(|| format!("reading {link}"))
    }

    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().with_context(|| format!("waiting for {}", self.name))?;
        }
        Ok(self.ended)
    }

    /// Returns true if [`Self::ended`] or a wait has seen its end.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Sends a signal to the program itself.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        ensure!(self.ended()?.is_none(), "{} has ended already: {:?}", self.name, self.ended);
        kill(self.raw_pid(), signal).with_context(|| format!("sending {signal} to {}", self.name))
    }

    /// Sends SIGSTOP, and waits until each thread has stopped: one of them takes the signal, and the others run until it
    /// has had a processor.
    pub async fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        let threads = format!("/proc/{}/task", self.raw_pid());
        let stopped = async || {
            for thread in std::fs::read_dir(&threads)? {
                // One that has ended meanwhile has no status: the next look is without it.
                let status = std::fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
                if !status.contains("\nState:\tT (stopped)") {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        };
        wait_for(&format!("{} to stop", self.name), ENDS, stopped).await
    }

    /// Sends SIGKILL, as in a crash.
    pub async fn crash(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        self.wait_exit(ENDS).await.map(drop)
    }

    /// Sends SIGTERM and returns the exit status.
    pub async fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait_exit(Duration::from_secs(45)).await
    }

    pub async fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let name = self.name.clone();
        wait_for(&format!("{name} to exit"), limit, async || self.ended()).await
    }

    /// Sends SIGKILL to its process group and waits for its end.
    pub fn kill_group(&mut self) {
        if self.ended.is_none() {
            // It may be gone already.
            killpg(self.raw_pid(), Signal::SIGKILL).ok();
            self.ended = self.child.wait().ok();
        }
    }

    /// Returns resident memory in bytes (VmRSS).
    pub fn resident_bytes(&self) -> Result<u64> {
        resident_bytes_of(self.pid())
    }

    /// Returns resident anonymous memory in bytes, counted page by page: VmRSS may be wrong by some hundred KiB.
    pub fn anonymous_bytes(&self) -> Result<u64> {
        field(self.pid(), "smaps_rollup", "Anonymous:").map(|kib| kib * 1024)
    }

    /// Returns the peak resident memory (VmHWM) in bytes.
    pub fn peak_resident_bytes(&self) -> Result<u64> {
        status_field(self.pid(), "VmHWM:").map(|kib| kib * 1024)
    }

    /// Returns the number of its page faults so far that needed no disk: a page that it got from the kernel costs one.
    pub fn minor_faults(&self) -> Result<u64> {
        stat_field(self.pid(), StatField::MinorFaults)
    }

    fn raw_pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(i32::MAX))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
    }
}

/// Returns the log file of a process of a run.
pub fn log_file(dir: &Path, name: &str) -> PathBuf {
    dir.join("logs").join(format!("{name}.log"))
}

pub fn thread_count() -> Result<u64> {
    status_field(std::process::id(), "Threads:")
}

/// Returns the resident memory of a process in bytes.
pub fn resident_bytes_of(pid: u32) -> Result<u64> {
    status_field(pid, "VmRSS:").map(|kib| kib * 1024)
}

fn status_field(pid: u32, name: &str) -> Result<u64> {
    field(pid, "status", name)
}

/// Returns the number in a line of /proc/PID/FILE.
fn field(pid: u32, file: &str, name: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/{file}");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.with_context(|| format!("no {name} in {path}"))?;
    let number = line.split_whitespace().next().unwrap_or_default();
    number.parse().with_context(|| format!("{name} {line:?}"))
}

/// Fields of /proc/PID/stat, numbered as in proc_pid_stat(5). They are sums over all threads.
#[derive(Clone, Copy, Debug)]
pub enum StatField {
    MinorFaults = 10,
    UserTicks = 14,
    SystemTicks = 15,
}

pub fn stat_field(pid: u32, field: StatField) -> Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    field_of_stat(&text, field).with_context(|| format!("no {field:?} in {path}: {text:?}"))
}

fn field_of_stat(stat: &str, field: StatField) -> Option<u64> {
    // The name, the second field, may contain anything.
    let (_, after) = stat.rsplit_once(')')?;
    after.split_whitespace().nth(field as usize - 3)?.parse().ok()
}

/// Environment variable that names a folder with other builds of the two programs, such as those of a release.
const PROGRAMS: &str = "POSTERN_PROGRAMS";
/// Environment variable that names the folder of the previous version's two programs.
const PREVIOUS: &str = "POSTERN_PREVIOUS";

/// A version of Postern's two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    This,
    Previous,
}

impl Version {
    /// Returns the path of one of the two programs, as [`program`] for this version.
    pub fn program(self, name: &str) -> Result<PathBuf> {
        match self {
            Self::This => program(name),
            Self::Previous => {
                let folder = std::env::var_os(PREVIOUS);
                let folder =
                    folder.with_context(|| format!("{PREVIOUS} is not set: use `cargo xtask test`"))?;
                Ok(Path::new(&folder).join(name))
            }
        }
    }
}

/// Sets a flag `--NAME=VALUE`, in the place of the one with its name.
pub(crate) fn replace_flag(flags: &mut Vec<String>, flag: &str) {
    let name = flag.split('=').next();
    flags.retain(|other| other.split('=').next() != name);
    flags.push(flag.to_owned());
}

/// Returns the path of a program built into the same folder as this one, or of one of Postern's two in the folder [`PROGRAMS`].
pub fn program(name: &str) -> Result<PathBuf> {
    if let Some(others) = std::env::var_os(PROGRAMS).filter(|_| name.starts_with("tunnel-")) {
        let path = Path::new(&others).join(name);
        ensure!(
            path.exists(),
            "{} is missing, and {PROGRAMS} says that the programs are there",
            path.display()
        );
        return Ok(path);
    }
    let this = std::env::current_exe().context("where this program is")?;
    let dir = this.parent().context("this program has no folder")?;
    let path = dir.join(name);
    ensure!(
        path.exists(),
        "{} is missing: build it first (`cargo build --workspace`), or use `cargo xtask test`",
        path.display()
    );
    Ok(path)
}

/// Returns the arm64 build of a program as a command line: on other machines qemu runs it. `cargo xtask test` builds
/// it.
pub fn arm64_program(name: &str) -> Result<Vec<PathBuf>> {
    let this = std::env::current_exe().context("where this program is")?;
    let target = this.parent().and_then(Path::parent).context("this program is in no target folder")?;
    let path = target.join("aarch64-unknown-linux-musl/debug").join(name);
    ensure!(path.exists(), "{} is missing: `cargo xtask test arm64` builds it", path.display());
    let emulator = (!cfg!(target_arch = "aarch64")).then(|| PathBuf::from("qemu-aarch64-static"));
    Ok(emulator.into_iter().chain([path]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_are_parsed() {
        let line = "42 (a) b (c) S 1 42 42 0 -1 4194304 100 0 0 0 7 5 0 0 20 0 3 0 100 1000 50 1844";
        for (field, value) in
            [(StatField::MinorFaults, 100), (StatField::UserTicks, 7), (StatField::SystemTicks, 5)]
        {
            assert_eq!(field_of_stat(line, field), Some(value), "{field:?}");
        }
        assert_eq!(field_of_stat("42 (x) S 1", StatField::MinorFaults), None);
    }
}

//! Runs each case in a child process, and cleans up after it.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser as _;
use libtest_mimic::{Arguments, Failed, Trial};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Case;

/// Environment variable that names the case that a child process runs.
pub(crate) const CASE: &str = "POSTERN_KERNEL_CASE";
/// Environment variable that names the role of a helper process.
pub(crate) const ROLE: &str = "POSTERN_KERNEL_ROLE";
/// Environment variable with the child cgroup of a case.
pub(crate) const CGROUP: &str = "POSTERN_KERNEL_CGROUP";
/// Variable that is set where the machine is the test's own: programs may be attached to the root of its cgroups.
pub(crate) const WHOLE_MACHINE: &str = "POSTERN_KERNEL_WHOLE_MACHINE";

const PREFIX: &str = "postern-redirect-test-";
const DEADLINE: Duration = Duration::from_secs(180);

/// libtest's command line, with more than one name.
#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    arguments: Arguments,
    more: Vec<String>,
}

/// The parent: libtest's command line over the cases.
pub(crate) fn run_all(cases: Vec<Case>) -> ExitCode {
    let Line { mut arguments, more } = Line::parse();
    let names: Vec<String> = arguments.filter.take().into_iter().chain(more).collect();
    let chosen = |case: &str| {
        let exact = arguments.exact;
        names.iter().any(|name| if exact { case == name } else { case.contains(name.as_str()) })
    };
    if !arguments.list {
        if !nix::unistd::geteuid().is_root() {
            eprintln!(
                "redirect_kernel needs root: it loads BPF programs and makes cgroups and network namespaces of its own"
            );
            return ExitCode::FAILURE;
        }
        sweep();
    }
    let cases = cases.into_iter().filter(|(name, _)| names.is_empty() || chosen(name));
    let trials = cases.map(|(name, _)| Trial::test(name, move || run_child(name))).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The cgroup v2 hierarchy's mount point.
pub(crate) fn cgroup_mount() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("/proc/self/mounts");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
    PathBuf::from(line.expect("a cgroup2 mount").split(' ').nth(1).expect("a mount point"))
}

/// A cgroup that is removed, with everything in it, on drop.
struct CgroupGuard(PathBuf);

impl Drop for CgroupGuard {
    fn drop(&mut self) {
        destroy(&self.0);
    }
}

fn destroy(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while path.exists() {
        kill_in(path);
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                destroy(&entry.path());
            }
        }
        if fs::remove_dir(path).is_ok() || Instant::now() > deadline {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    if path.exists() {
        eprintln!("cannot remove {}", path.display());
    }
}

/// Kills the cgroup's processes one by one: `cgroup.kill` came with Linux 5.14.
fn kill_in(cgroup: &Path) {
    let processes = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    // 0 stands for a process that is not visible here.
    for pid in processes.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0) {
        // It may have ended meanwhile.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// Removes cgroups of runs that were killed.
fn sweep() {
    for entry in fs::read_dir(cgroup_mount()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        let pid = rest.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(pid).exists() {
            destroy(&entry.path());
        }
    }
}

fn run_child(case: &'static str) -> Result<(), Failed> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let cgroup = cgroup_mount().join(name);
    fs::create_dir(&cgroup).map_err(|error| format!("{}: {error}", cgroup.display()))?;
    let guard = CgroupGuard(cgroup);
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new(exe)
        .env(CASE, case)
        .env(CGROUP, &guard.0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let output = Output::collect(&mut child);
    let deadline = Instant::now() + DEADLINE;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                drop(child.kill());
                drop(child.wait());
                break None;
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    // Ends the helpers first: they hold the pipes open.
    drop(guard);
    let (stdout, stderr) = output.join();
    for line in stdout.lines().filter(|line| line.starts_with("report ")) {
        println!("{case}: {}", &line["report ".len()..]);
    }
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(format!("{status}\n{stdout}{stderr}").into()),
        None => Err(format!("still running after {DEADLINE:?}\n{stdout}{stderr}").into()),
    }
}

struct Output(thread::JoinHandle<String>, thread::JoinHandle<String>);

impl Output {
    fn collect(child: &mut Child) -> Self {
        fn read(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                drop(from.read_to_end(&mut bytes));
                String::from_utf8_lossy(&bytes).into_owned()
            })
        }
        Self(read(child.stdout.take().expect("piped")), read(child.stderr.take().expect("piped")))
    }

    fn join(self) -> (String, String) {
        (self.0.join().unwrap_or_default(), self.1.join().unwrap_or_default())
    }
}

/// The child: isolates itself, then runs the case. A panic ends the process with an error.
pub(crate) fn run_case(name: &str, cases: &[Case]) -> ExitCode {
    let (_, case) = cases.iter().find(|(case, _)| *case == name).expect("a known case");
    set_pdeathsig(Signal::SIGKILL).expect("prctl");
    fs::write(own_cgroup().join("cgroup.procs"), std::process::id().to_string()).expect("enter the cgroup");
    isolate();
    case();
    // Not by return: threads of the case may still hold things.
    std::process::exit(0);
}

/// The cgroup of the running case.
pub(crate) fn own_cgroup() -> PathBuf {
    PathBuf::from(std::env::var_os(CGROUP).expect("the parent sets it"))
}

/// A network namespace with loopback, and private mounts. Must run before any thread starts.
pub(crate) fn isolate() {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("unshare");
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .expect("private mounts");
    crate::support::ip("link set lo up");
}

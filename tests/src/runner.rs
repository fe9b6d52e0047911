//! Runs scenarios, each as a process of its own, and removes everything that a run made, however it ended.
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, Uid};

use crate::scenarios::{self, Scenario};
use crate::testbed::id::{Id, Kind};
use crate::testbed::process::log_file;
use crate::testbed::{Shape, Testbed, sweep};

/// Lines of a scenario's output that begin so are shown even when it passes.
const FIGURE: &str = "figure: ";
/// Lines of a scenario's output that begin so are shown while it runs.
const PROGRESS: &str = "progress: ";
/// How much of each log a failure shows.
const LINES_SHOWN: usize = 60;
/// Open files that a scenario may have, and every program that it starts.
const OPEN_FILES: u64 = 20_000;
/// Scenarios that run side by side: most of their time is waiting.
const SIDE_BY_SIDE: usize = 2;

static LIVE: Mutex<Vec<Id>> = Mutex::new(Vec::new());

/// Prints a measured value so that the runner shows it.
pub fn figure(text: &str) {
    println!("{FIGURE}{text}");
}

/// Says how far a long scenario is; the runner shows it at once.
pub fn progress(text: &str) {
    println!("{PROGRESS}{text}");
}

/// The `scenarios` program: `[--quick] [FILTER] [--list]` and what libtest takes besides, or `--run NAME --id ID`
/// for the process of one scenario.
pub fn main(args: Vec<OsString>) -> ExitCode {
    match dispatch(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("scenarios: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(mut args: Vec<OsString>) -> Result<ExitCode> {
    if args.get(1).is_some_and(|arg| arg == "--run") {
        let text = |at: usize| args.get(at).and_then(|arg| arg.to_str()).context("--run NAME --id ID");
        run_here(text(2)?, text(4)?.parse()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let all = args.len();
    args.retain(|arg| arg != "--quick");
    let quick = args.len() < all;
    let mut arguments = Arguments::from_iter(args);
    arguments.test_threads.get_or_insert(SIDE_BY_SIDE);
    if !arguments.list {
        prepare()?;
    }
    let chosen = scenarios::all().filter(|scenario| scenario.quick || !quick);
    let trials =
        chosen.map(|scenario| Trial::test(scenario.name, move || in_own_process(scenario))).collect();
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn prepare() -> Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "scenarios need root: they make network namespaces and cgroups, attach eBPF programs to those, and set iptables rules in those. Run them with sudo."
    );
    for tool in ["ip", "iptables", "nsenter", "sh"] {
        let found = Command::new("sh").args(["-c", &format!("command -v {tool} >/dev/null")]).status();
        ensure!(
            found.is_ok_and(|status| status.success()),
            "`{tool}` is missing: apt-get install iproute2 iptables util-linux"
        );
    }
    for id in sweep::dead_runs(Kind::Test)? {
        println!("removing what the dead run {id} left behind");
        sweep::remove(&id)?;
    }
    remove_everything_on_signals()
}

/// The process of one scenario.
fn run_here(name: &str, id: Id) -> Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).context("asking to die with the runner")?;
    let scenario = scenarios::all()
        .find(|scenario| scenario.name == name)
        .with_context(|| format!("no scenario {name}"))?;
    // Thousands of connections have two ends in this process.
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES).context("raising the limit of open files")?;
    let testbed = Testbed::new(id, Shape { edges: scenario.edges, twin: scenario.twin })?;
    testbed.enter_cloud()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("runtime")?;
    let result = runtime.block_on((scenario.run)(&testbed));
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

fn in_own_process(scenario: &Scenario) -> Result<(), Failed> {
    let id = Id::new(Kind::Test);
    lock().push(id.clone());
    let result = supervise(scenario, &id);
    let removed = sweep::remove(&id);
    lock().retain(|live| *live != id);
    result.and(removed).map_err(|error| Failed::from(format!("{error:#}")))
}

fn supervise(scenario: &Scenario, id: &Id) -> Result<()> {
    let dir = id.dir();
    fs::create_dir_all(dir.join("logs")).with_context(|| format!("creating {}", dir.display()))?;
    let log = log_file(&dir, "scenario");
    let out = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    let mut child = Command::new(std::env::current_exe().context("where this program is")?)
        .args(["--run", scenario.name, "--id", &id.to_string()])
        .stdin(Stdio::null())
        .stderr(out.try_clone().context("duplicating the log's descriptor")?)
        .stdout(out)
        .env("RUST_BACKTRACE", "0")
        .process_group(0)
        .spawn()
        .context("starting the scenario's process")?;
    let start = Instant::now();
    let mut shown = Shown { scenario: scenario.name, log: &log, at: 0, start };
    let status = wait_limited(&mut child, scenario.limit, &mut shown)?;
    shown.follow();
    let left = sweep::leftovers(id)?;
    match status {
        Some(status) if status.success() && left.is_empty() => {}
        Some(status) if status.success() => bail!("passed, but left behind: {}", left.join(", ")),
        Some(status) => bail!("ended with {status} after {:.1?}\n{}", start.elapsed(), logs(&dir)),
        None => bail!("not finished after {:?}, killed\n{}", scenario.limit, logs(&dir)),
    }
    for line in fs::read_to_string(&log).unwrap_or_default().lines() {
        if let Some(figure) = line.strip_prefix(FIGURE) {
            println!("  {}: {figure}", scenario.name);
        }
    }
    Ok(())
}

/// Waits for the end; None: the limit came first and the process group was killed.
fn wait_limited(child: &mut Child, limit: Duration, shown: &mut Shown<'_>) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("waiting for the scenario")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            killpg(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGKILL)
                .context("killing the scenario")?;
            child.wait().context("waiting for the killed scenario")?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
        shown.follow();
    }
}

/// What has been shown of a running scenario's progress.
struct Shown<'a> {
    scenario: &'a str,
    log: &'a Path,
    at: u64,
    start: Instant,
}

impl Shown<'_> {
    /// Shows the lines that have come since. A log that cannot be read just now is read the next time.
    fn follow(&mut self) {
        let Ok(mut log) = File::open(self.log) else { return };
        let mut new = Vec::new();
        if log.seek(SeekFrom::Start(self.at)).is_err() || log.read_to_end(&mut new).is_err() {
            return;
        }
        // Half a line is shown when it is whole.
        let Some(end) = new.iter().rposition(|byte| *byte == b'\n') else { return };
        self.at += end as u64 + 1;
        for line in String::from_utf8_lossy(&new[..end]).lines() {
            if let Some(text) = line.strip_prefix(PROGRESS) {
                println!("  [{:>5.1} s] {}: {text}", self.start.elapsed().as_secs_f32(), self.scenario);
            }
        }
    }
}

/// The end of every log of a run, the scenario's own last.
pub(crate) fn logs(dir: &Path) -> String {
    let Ok(entries) = fs::read_dir(dir.join("logs")) else { return String::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort_by_key(|path| (path.ends_with("scenario.log"), path.clone()));
    let mut text = String::new();
    for path in paths {
        let bytes = fs::read(&path).unwrap_or_default();
        let whole = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = whole.lines().collect();
        let from = lines.len().saturating_sub(LINES_SHOWN);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        text.push_str(&format!("--- {name}: last {} of {} lines\n", lines.len() - from, lines.len()));
        for line in &lines[from..] {
            text.extend(line.chars().take(500));
            text.push('\n');
        }
    }
    text
}

fn remove_everything_on_signals() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime for signals")?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut interrupt), Ok(mut terminate)) =
                (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
            else {
                eprintln!("scenarios: cannot listen for signals");
                return;
            };
            tokio::select! { _ = interrupt.recv() => {} _ = terminate.recv() => {} }
        });
        eprintln!("scenarios: interrupted, removing what runs");
        // The scenario's own process stands in the run's cgroup, so this ends it too.
        for id in lock().iter() {
            if let Err(error) = sweep::remove(id) {
                eprintln!("scenarios: {error:#}");
            }
        }
        std::process::exit(130);
    });
    Ok(())
}

fn lock() -> std::sync::MutexGuard<'static, Vec<Id>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

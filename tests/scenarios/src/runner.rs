//! Runs scenarios, each in a process of its own, and removes everything that a run made, however it ended.
use std::cmp::Reverse;
use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Parser as _;
use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::resource::{Resource, setrlimit};
use postern_testbed::id::{Id, Kind};
use postern_testbed::process::{Process, log_file};
use postern_testbed::report::{FIGURE, PROGRESS, progress};
use postern_testbed::{Shape, cgroup, load_target, logs, snapshot, supervisor, sweep, visitors};
use tokio::runtime::{Builder, Runtime};

use crate::args::Args;
use crate::doctor::faults;
use crate::durations::{self, Kept, Took};
use crate::scenario::Scenario;
use crate::slots::{Places, Slots};
use crate::{chaos, needs, soak};

/// Limit of open files of a scenario and of the programs that it starts.
const OPEN_FILES: u64 = 20_000;

/// Time at which the scenario of this process is killed.
static KILLED_AT: OnceLock<Instant> = OnceLock::new();

static LIVE: Mutex<Vec<Id>> = Mutex::new(Vec::new());
static TOOK: Mutex<Vec<Took>> = Mutex::new(Vec::new());
static SLOTS: OnceLock<Slots> = OnceLock::new();

/// The `scenarios` program; `--run NAME --id ID`, `--target` and `--visit` are for the processes that it starts itself.
pub(crate) fn main(args: Vec<OsString>, scenarios: Vec<&'static Scenario>) -> ExitCode {
    match dispatch(args, scenarios) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("scenarios: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: Vec<OsString>, scenarios: Vec<&'static Scenario>) -> Result<ExitCode> {
    if args.get(1).is_some_and(|arg| arg == load_target::ARGUMENT) {
        return load_target::run().map(|()| ExitCode::SUCCESS);
    }
    if args.get(1).is_some_and(|arg| arg == visitors::ARGUMENT) {
        return visitors::run(&args[2..]).map(|()| ExitCode::SUCCESS);
    }
    if args.get(1).is_some_and(|arg| arg == "--run") {
        let text = |at: usize| args.get(at).and_then(|arg| arg.to_str()).context("--run NAME --id ID");
        let name = text(2)?;
        let scenario = scenarios.into_iter().find(|scenario| scenario.name() == name);
        work(scenario.with_context(|| format!("no scenario {name}"))?, text(4)?.parse()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    run(&Args::parse_from(args), scenarios)
}

fn run(args: &Args, mut scenarios: Vec<&'static Scenario>) -> Result<ExitCode> {
    scenarios.retain(|scenario| args.selects(scenario));
    let kept = target()?.map(|target| Kept::read(&target));
    if !args.list {
        let expected = |scenario: &&Scenario| kept.as_ref().map(|kept| kept.expected(scenario));
        scenarios.sort_by_key(|scenario| Reverse(expected(scenario)));
        prepare()?;
    }
    let scenarios: Vec<_> = std::iter::repeat_n(scenarios, args.repeat).flatten().collect();
    let places = args.test_threads.map_or_else(Places::here, Places::new);
    let slots: &'static Slots = SLOTS.get_or_init(|| Slots::new(places));
    // One thread per scenario; the slots limit how many run.
    let threads = Some(scenarios.len().max(1));
    let arguments = Arguments { list: args.list, test_threads: threads, ..Arguments::default() };
    let keep = args.keep;
    let trial = |(place, scenario): (usize, &'static Scenario)| {
        Trial::test(scenario.name(), move || in_own_process(slots, place, scenario, keep))
            .with_kind(scenario.kind)
    };
    let start = Instant::now();
    let conclusion = libtest_mimic::run(&arguments, scenarios.into_iter().enumerate().map(trial).collect());
    let took = std::mem::take(&mut *lock(&TOOK));
    if let Some(kept) = kept.filter(|_| !took.is_empty() && !args.other_programs) {
        kept.update(&took).context("keeping the times of the scenarios")?;
    }
    if took.len() > 1 {
        print!("{}", durations::summary(start, took));
    }
    Ok(conclusion.exit_code())
}

fn prepare() -> Result<()> {
    supervisor::ensure_root("`scenarios`")?;
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

/// Factor between a scenario's own limit and the time at which it is killed: on a busy machine it may take several times as
/// long, and only one that hangs is to be killed.
const BUSY: u32 = 3;

/// Returns a scenario's time limit, plus the requested duration of a soak or chaos run.
fn limit(scenario: &Scenario) -> Duration {
    BUSY * scenario.limit + [soak::asked(), chaos::asked()].into_iter().flatten().sum::<Duration>()
}

/// Returns the remaining time of this process's scenario.
pub(crate) fn time_left() -> Duration {
    KILLED_AT.get().map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
}

/// Runs one scenario in this process.
fn work(scenario: &Scenario, id: Id) -> Result<()> {
    KILLED_AT.get_or_init(|| Instant::now() + limit(scenario));
    // Both ends of thousands of connections are in this process.
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES).context("raising the limit of open files")?;
    let testbed = supervisor::enter_run(id, Shape { edges: scenario.edges, twin: scenario.twin })?;
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().context("runtime")?;
    let result = runtime.block_on((scenario.run)(&testbed)).and_then(|()| faults::all_found(scenario.name()));
    runtime.shutdown_timeout(Duration::from_secs(2));
    let result = result.and_then(|()| testbed.judge_logs());
    result.inspect_err(|error| progress(&format!("FAILED  {}", in_one_line(error))))
}

/// Returns the reason without the logs and tables that explain it, for the end of a long run.
fn in_one_line(error: &anyhow::Error) -> String {
    let reasons: Vec<_> = error.chain().map(ToString::to_string).collect();
    let single: Vec<_> = reasons.iter().map(String::as_str).filter(|text| !text.contains('\n')).collect();
    match reasons.last().and_then(|last| last.split_once('\n')) {
        Some((first, _)) => [single, vec![first]].concat().join(": "),
        None => single.join(": "),
    }
}

fn in_own_process(slots: &Slots, place: usize, scenario: &Scenario, keep: bool) -> Result<(), Failed> {
    let variables = match scenario.kind {
        "" => Vec::new(),
        kind => needs::wait(kind, || !lock(&LIVE).is_empty())
            .map_err(|error| Failed::from(format!("{error:#}")))?,
    };
    let _slot = slots.enter(place, scenario.load());
    let (id, from) = (Id::new(Kind::Test), Instant::now());
    lock(&LIVE).push(id.clone());
    let mut used = Duration::ZERO;
    let mut result = supervise(scenario, &id, variables, &mut used);
    if keep || result.is_err() {
        let place = kept(scenario, &id, if result.is_ok() { "kept" } else { "failed" });
        match &mut result {
            Ok(()) => println!("  {}: {place}", scenario.name()),
            Err(error) => result = Err(anyhow!("{error:#}\n{place}")),
        }
    }
    let removed = sweep::remove(&id);
    lock(&LIVE).retain(|live| *live != id);
    let (name, cluster, passed) = (scenario.name(), scenario.has_cluster(), result.is_ok());
    lock(&TOOK).push(Took { name, cluster, from, to: Instant::now(), used, passed });
    result.and(removed).map_err(|error| Failed::from(format!("{error:#}")))
}

fn supervise(
    scenario: &Scenario,
    id: &Id,
    variables: Vec<(String, String)>,
    used: &mut Duration,
) -> Result<()> {
    let (dir, name) = (id.dir(), scenario.name());
    fs::create_dir_all(dir.join("logs")).with_context(|| format!("creating {}", dir.display()))?;
    let mut command = supervisor::this_program(["--run", name, "--id", &id.to_string()])?;
    command.env("RUST_BACKTRACE", "0").envs(variables);
    let mut worker = Process::spawn(&dir, "scenario", command)?;
    let log = log_file(&dir, "scenario");
    let start = Instant::now();
    let mut shown = Shown { scenario: name, log: &log, at: 0, start, id, used };
    runtime()?.block_on(async {
        tokio::select! {
            // The code below determines whether it ended or the limit came first.
            _ = worker.wait_exit(limit(scenario)) => {}
            never = shown.follow() => match never {},
        }
    });
    shown.show_new();
    let status = worker.ended()?;
    if status.is_none() {
        // A wait that ends in vain takes one itself.
        snapshot::take(id);
    }
    worker.kill_group();
    let left = sweep::leftovers(id)?;
    match status {
        Some(status) if status.success() => {
            ensure!(left.is_empty(), "passed, but left behind: {}", left.join(", "));
        }
        Some(status) => {
            bail!("ended with {status} after {:.1?}\n{}", start.elapsed(), logs::ends(&dir))
        }
        None => {
            let reason = format!("not finished after {:?}, killed", limit(scenario));
            shown.print(&format!("FAILED  {reason}"));
            bail!("{reason}\n{}", logs::ends(&dir))
        }
    }
    for line in fs::read_to_string(&log).unwrap_or_default().lines() {
        if let Some(figure) = line.strip_prefix(FIGURE) {
            println!("  {name}: {figure}");
        }
    }
    Ok(())
}

/// Cargo's target folder, if this program is in one.
fn target() -> Result<Option<PathBuf>> {
    let program = std::env::current_exe().context("where this program is")?;
    Ok(program.parent().and_then(Path::parent).map(Path::to_owned))
}

/// Keeps the logs of a run in a folder of the target folder; returns a text with the path.
fn kept(scenario: &Scenario, id: &Id, folder: &str) -> String {
    let keep = || {
        let target = target()?.context("this program is in no target folder")?;
        let to = target.join(folder).join(scenario.name().replace("::", "/"));
        logs::keep(&id.dir(), &to)?;
        anyhow::Ok(to)
    };
    match keep() {
        Ok(to) => format!("its folder is {}", to.display()),
        Err(error) => format!("the logs are lost: {error:#}"),
    }
}

fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("runtime")
}

/// Position in a running scenario's progress output.
struct Shown<'a> {
    scenario: &'a str,
    log: &'a Path,
    at: u64,
    start: Instant,
    id: &'a Id,
    /// Processor time that its programs have used. They take their cgroup along when they end.
    used: &'a mut Duration,
}

impl Shown<'_> {
    async fn follow(&mut self) -> Infallible {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.show_new();
            *self.used = cgroup::used(self.id).unwrap_or(*self.used);
        }
    }

    /// Prints the lines that were written since the last call. If the log cannot be read now, the next call reads them.
    fn show_new(&mut self) {
        let Ok(mut log) = File::open(self.log) else { return };
        let mut new = Vec::new();
        if log.seek(SeekFrom::Start(self.at)).is_err() || log.read_to_end(&mut new).is_err() {
            return;
        }
        // An incomplete line is left for the next call.
        let Some(end) = new.iter().rposition(|byte| *byte == b'\n') else { return };
        self.at += end as u64 + 1;
        for line in String::from_utf8_lossy(&new[..end]).lines() {
            if let Some(text) = line.strip_prefix(PROGRESS) {
                self.print(text);
            }
        }
    }

    fn print(&self, text: &str) {
        println!("  [{:>5.1} s] {}: {text}", self.start.elapsed().as_secs_f32(), self.scenario);
    }
}

fn remove_everything_on_signals() -> Result<()> {
    let runtime = runtime()?;
    std::thread::spawn(move || {
        if let Err(error) = runtime.block_on(supervisor::interrupted()) {
            eprintln!("scenarios: cannot listen for signals: {error:#}");
            return;
        }
        eprintln!("scenarios: interrupted, removing what runs");
        // The scenario's own process is in the run's cgroup, so this ends it too.
        for id in lock(&LIVE).iter() {
            if let Err(error) = sweep::remove(id) {
                eprintln!("scenarios: {error:#}");
            }
        }
        std::process::exit(130);
    });
    Ok(())
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line() {
        let error = anyhow!("reset").context("visiting 10.0.0.1:9102").context("NAME READY\ntalker 1/1");
        assert_eq!(in_one_line(&error), "visiting 10.0.0.1:9102: reset");
        let error = anyhow!("kubectl: exit 1\nmore").context("rollout");
        assert_eq!(in_one_line(&error), "rollout: kubectl: exit 1");
    }
}

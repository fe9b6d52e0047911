//! Each seed runs in a process of its own, whose random bytes follow from it (`entropy.c`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use tracing_subscriber::EnvFilter;

use crate::{Cli, fleet};

/// Read by `entropy.c` too.
const SEED: &str = "POSTERN_FLEET_SEED";

/// True if this process has the random bytes of the seed.
pub(crate) fn is_seeded(seed: u64) -> bool {
    std::env::var(SEED).is_ok_and(|given| given == seed.to_string())
}

/// The first of many seeds that no other run has.
pub(crate) fn of_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() << 20
}

/// No seed takes a second, unless programs do things for ever at one time.
const LIMIT: Duration = Duration::from_secs(120);
/// Failures after which no further seeds are begun.
const ENOUGH: usize = 5;
/// Minimum number of seeds a minute in a run for a time: with fewer it would have looked at hardly anything.
const LEAST: f64 = 100.0;

/// The folder of a run, in memory if there is such a place: programs sync what they write.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let dir = parent.join(format!("postern-fleet-{}", std::process::id()));
        // Of a process that was killed.
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        Ok(Self(dir))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // Nothing depends on it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Set by a task of the fleet that panics.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Runs the seed in this process. Prints the hash of what happened, or what went wrong.
pub(crate) fn run(seed: u64, without: &[usize], log: &str) -> Result<bool> {
    let filter = EnvFilter::try_new(log)?;
    tracing_subscriber::fmt().with_env_filter(filter).without_time().with_writer(std::io::stderr).init();
    let said = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICKED.store(true, Ordering::Relaxed);
        said(panic);
    }));
    let dir = Dir::new()?;
    let path = dir.0.clone();
    std::thread::spawn(move || {
        std::thread::sleep(LIMIT);
        println!("seed {seed}: FAILED: not over after {LIMIT:?}");
        // Nothing depends on it.
        let _ = std::fs::remove_dir_all(path);
        std::process::exit(1);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let done = runtime.block_on(fleet::run(seed, without, &dir.0));
    let panicked = PANICKED.load(Ordering::Relaxed);
    match &done {
        Ok(model) if !panicked => println!("seed {seed}: {:016x}", model.trace()),
        Ok(_) => println!("seed {seed}: FAILED: a task has panicked"),
        Err(error) => println!("seed {seed}: FAILED: {error:#}"),
    }
    Ok(done.is_ok() && !panicked)
}

fn command(seed: u64, without: &[usize]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(SEED, seed.to_string()).arg(format!("--seed={seed}"));
    if !without.is_empty() {
        let list: Vec<_> = without.iter().map(ToString::to_string).collect();
        command.arg(format!("--without={}", list.join(",")));
    }
    Ok(command)
}

/// Runs the seed in a process that begins with its random bytes.
pub(crate) fn again(seed: u64, cli: &Cli) -> Result<bool> {
    Ok(command(seed, &cli.without)?.arg(format!("--log={}", cli.log)).status()?.success())
}

fn quietly(seed: u64, without: &[usize]) -> Result<Output> {
    Ok(command(seed, without)?.arg("--log=off").output()?)
}

/// Runs seeds on all processors. Returns those that failed.
pub(crate) fn many(first: u64, count: u64, limit: Option<Duration>) -> Result<Vec<u64>> {
    let (next, failed, begin) = (AtomicU64::new(0), Mutex::new(Vec::new()), Instant::now());
    let work = || -> Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let over = number >= count || limit.is_some_and(|limit| begin.elapsed() > limit);
            if over || failed.lock().len() >= ENOUGH {
                return Ok(());
            }
            let seed = first.wrapping_add(number);
            let output = quietly(seed, &[]).with_context(|| format!("seed {seed}"))?;
            if !output.status.success() {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let text = if text.is_empty() { format!("seed {seed}: {}", output.status) } else { text };
                println!("{}\n{}", text.trim_end(), String::from_utf8_lossy(&output.stderr).trim_end());
                failed.lock().push(seed);
            }
        }
    };
    let threads = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a worker panicked")))
    })?;
    let (seconds, run) = (begin.elapsed().as_secs_f64(), next.into_inner().saturating_sub(threads as u64));
    let (failed, rate) = (failed.into_inner(), run as f64 / seconds * 60.0);
    println!("{run} seeds from {first} in {seconds:.1} s, {rate:.0} a minute; {} failed", failed.len());
    ensure!(
        limit.is_none() || !failed.is_empty() || rate >= LEAST,
        "{rate:.0} seeds a minute, of at least {LEAST}"
    );
    Ok(failed)
}

/// Leaves out every step without which the seed fails as well, and prints what is left.
pub(crate) fn shrink(seed: u64) -> Result<()> {
    let steps = crate::plan::Plan::of(seed).steps;
    let begin = Instant::now();
    if quietly(seed, &[])?.status.success() {
        println!("seed {seed} did not fail again: something does not follow from it");
        return Ok(());
    }
    if begin.elapsed() >= LIMIT {
        return Ok(());
    }
    let mut without = Vec::new();
    for step in 0..steps.len() {
        without.push(step);
        if quietly(seed, &without)?.status.success() {
            without.pop();
        }
    }
    let output = quietly(seed, &without)?;
    println!("\nseed {seed}, shrunk: --seed={seed} --without={without:?}");
    for (index, step) in steps.iter().enumerate().filter(|(index, _)| !without.contains(index)) {
        println!("  {index}: {step:?}");
    }
    println!("  {}", String::from_utf8_lossy(&output.stdout).trim_end());
    Ok(())
}

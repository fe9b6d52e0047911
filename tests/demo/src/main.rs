//! `cargo xtask demo`: a real Prometheus on a cloud host scrapes real node exporters on two edges behind NAT, by
//! their own addresses. With `--kubernetes`: a real cluster with a node behind NAT, and what kubectl does with it.
//!
//! As with scenarios, a worker process runs the demo; its supervisor removes everything afterwards.
#![forbid(unsafe_code)]

mod kubernetes;
mod prometheus;

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use postern_testbed::id::{Id, Kind};
use postern_testbed::{Shape, Testbed, supervisor, sweep};

/// The longest run; the demos take about a minute.
const LIMIT: Duration = Duration::from_secs(300);
/// Variable with the factor by which Prometheus may be slower than usual: set where the processor is emulated.
const PACE: &str = "POSTERN_DEMO_PACE";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Demo {
    Prometheus,
    Kubernetes,
}

/// Flag that selects the second.
const KUBERNETES: &str = "--kubernetes";

/// `--kubernetes`, `--keep`, or `--remove`; `--run ID` and `--run-and-keep ID` are for the worker.
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    let all = args.len();
    args.retain(|arg| *arg != KUBERNETES);
    let demo = if args.len() < all { Demo::Kubernetes } else { Demo::Prometheus };
    let result = match args.as_slice() {
        [] => supervise(demo, false),
        ["--keep"] => supervise(demo, true),
        ["--remove"] => remove().map(|()| ExitCode::SUCCESS),
        [run @ ("--run" | "--run-and-keep"), id] => {
            work(demo, id, *run == "--run-and-keep").map(|()| ExitCode::SUCCESS)
        }
        other => {
            Err(anyhow::anyhow!("unknown arguments {other:?}: there are --kubernetes, --keep and --remove"))
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        ExitCode::FAILURE
    })
}

fn pace() -> Result<u32> {
    let Ok(set) = std::env::var(PACE) else { return Ok(1) };
    let pace = set.parse().ok().filter(|pace| (1..=100).contains(pace));
    pace.with_context(|| format!("{PACE}={set}: give a number from 1 to 100"))
}

fn prepare() -> Result<()> {
    supervisor::ensure_root("the demo")?;
    for id in sweep::dead_runs(Kind::Demo)? {
        if sweep::is_kept(&id) {
            println!("note: {id} is still up (`cargo xtask demo --remove` removes it)");
        } else {
            println!("removing what the dead demo {id} left behind");
            sweep::remove(&id)?;
        }
    }
    Ok(())
}

fn remove() -> Result<()> {
    let runs = sweep::dead_runs(Kind::Demo)?;
    if runs.is_empty() {
        println!("no demo is up");
    }
    for id in runs {
        sweep::remove(&id)?;
        println!("removed {id}");
    }
    Ok(())
}

fn supervise(demo: Demo, keep: bool) -> Result<ExitCode> {
    prepare()?;
    let id = Id::new(Kind::Demo);
    let run = if keep { "--run-and-keep" } else { "--run" };
    let mut command = supervisor::this_program([run, &id.to_string()])?;
    command.args((demo == Demo::Kubernetes).then_some(KUBERNETES));
    let code = supervisor::supervise("the demo", &id, command, LIMIT * pace()?, keep)?;
    if code == ExitCode::SUCCESS && !keep {
        println!("everything is removed");
    }
    Ok(code)
}

fn work(demo: Demo, id: &str, keep: bool) -> Result<()> {
    let edges = if demo == Demo::Kubernetes { 1 } else { 2 };
    let testbed = supervisor::enter_run(id.parse()?, Shape { edges, twin: false })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("runtime")?;
    runtime.block_on(async {
        match demo {
            Demo::Prometheus => finish(&testbed, prometheus::run(&testbed, pace()?).await?, keep).await?,
            Demo::Kubernetes => finish(&testbed, kubernetes::run(&testbed).await?, keep).await?,
        }
        if keep {
            fs::write(testbed.dir().join(sweep::KEPT), "").context("marking the demo as kept")?;
        }
        anyhow::Ok(())
    })?;
    if keep {
        // Dropping it would remove the namespaces.
        std::mem::forget(testbed);
    }
    Ok(())
}

/// Programs that a demo leaves running.
trait Running {
    /// Introduces the shell that is printed after `--keep`.
    const SHELL: &'static str;

    /// Prints what to type in that shell; `bin` is the folder of our programs.
    fn print_examples(&self, bin: &str);

    /// Stops gracefully: both programs exit with 0 on SIGTERM.
    async fn stop(self) -> Result<()>;
}

async fn finish<R: Running>(testbed: &Testbed, running: R, keep: bool) -> Result<()> {
    if keep {
        // A shell must be in the cloud's cgroup to be redirected.
        let (procs, ns) = (testbed.cloud_cgroup.procs(), testbed.cloud.path());
        let (procs, ns) = (procs.display(), ns.display());
        println!("\nEverything stays up. {}", R::SHELL);
        println!("  sudo sh -c 'echo $$ > {procs}; exec nsenter --net={ns} bash'");
        println!("in which for example:");
        let bin = std::env::current_exe().unwrap_or_default();
        running.print_examples(&bin.parent().unwrap_or(&bin).to_string_lossy());
        println!("Logs: {}/logs", testbed.dir().display());
        println!("To remove it: cargo xtask demo --remove");
        // Dropping a process kills it.
        std::mem::forget(running);
        return Ok(());
    }
    println!("\nremoving everything");
    running.stop().await
}

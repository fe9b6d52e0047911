//! `cargo xtask demo`: a real Prometheus on a cloud host scrapes real node exporters on two edges behind NAT, by
//! their own addresses. With `--kubernetes`: a real cluster with a node behind NAT, and what kubectl does with it.
//!
//! As with scenarios, the work is done by a process of its own; this one only waits for it, and removes everything
//! when it has ended or when somebody presses Ctrl-C.
mod kubernetes;
mod steps;

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::Uid;
use tokio::signal::unix::{SignalKind, signal};

use crate::runner;
use crate::testbed::id::{Id, Kind};
use crate::testbed::{Shape, Testbed, sweep};

/// The demos take about a minute; whatever hangs must not hang for ever.
const LIMIT: Duration = Duration::from_secs(300);

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Demo {
    Prometheus,
    Kubernetes,
}

/// Its flag.
const KUBERNETES: &str = "--kubernetes";

/// The `demo` program: `--kubernetes`, `--keep`, or `--remove`; `--run ID` and `--run-and-keep ID` are for itself.
pub fn main() -> ExitCode {
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

fn prepare() -> Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "the demo needs root: it makes network namespaces and attaches eBPF programs"
    );
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

/// Removes every demo that was left up.
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
    // xtask holds SIGINT back while it waits for this program, and a signal mask is inherited.
    SigSet::all().thread_swap_mask(SigmaskHow::SIG_UNBLOCK).context("taking signals")?;
    prepare()?;
    let id = Id::new(Kind::Demo);
    fs::create_dir_all(id.dir()).with_context(|| format!("creating {}", id.dir().display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let end = runtime.block_on(wait_for_work(demo, &id, keep));
    let logs = runner::logs(&id.dir());
    match end {
        Ok(End::Exited(status)) if status.success() && keep => Ok(ExitCode::SUCCESS),
        Ok(End::Exited(status)) if status.success() => {
            let left = sweep::leftovers(&id)?;
            sweep::remove(&id)?;
            ensure!(left.is_empty(), "the demo left behind: {}", left.join(", "));
            println!("everything is removed");
            Ok(ExitCode::SUCCESS)
        }
        Ok(End::Exited(status)) => {
            sweep::remove(&id)?;
            bail!("the demo ended with {status}; everything is removed. The logs were:\n{logs}")
        }
        Ok(End::TooLong) => {
            sweep::remove(&id)?;
            bail!("the demo was not finished after {LIMIT:?}; everything is removed. The logs were:\n{logs}")
        }
        Ok(End::Signal(signal)) => {
            println!("\n{signal}: removing everything");
            sweep::remove(&id)?;
            let code = 128_u8.saturating_add(u8::try_from(signal as i32).unwrap_or(127));
            Ok(ExitCode::from(code))
        }
        Err(error) => {
            sweep::remove(&id)?;
            Err(error)
        }
    }
}

enum End {
    Exited(ExitStatus),
    Signal(Signal),
    TooLong,
}

async fn wait_for_work(demo: Demo, id: &Id, keep: bool) -> Result<End> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut command = Command::new(std::env::current_exe().context("where this program is")?);
    // A group of its own: Ctrl-C reaches this process only, which then removes everything in order.
    command.args([if keep { "--run-and-keep" } else { "--run" }, &id.to_string()]).process_group(0);
    command.args((demo == Demo::Kubernetes).then_some(KUBERNETES));
    let mut work = tokio::process::Command::from(command).spawn().context("starting the demo's process")?;
    Ok(tokio::select! {
        status = work.wait() => End::Exited(status.context("waiting for the demo's process")?),
        _ = interrupt.recv() => End::Signal(Signal::SIGINT),
        _ = terminate.recv() => End::Signal(Signal::SIGTERM),
        _ = hang_up.recv() => End::Signal(Signal::SIGHUP),
        () = tokio::time::sleep(LIMIT) => End::TooLong,
    })
}

/// The demo itself, in a process of its own.
fn work(demo: Demo, id: &str, keep: bool) -> Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).context("asking to die with the parent")?;
    let edges = if demo == Demo::Kubernetes { 1 } else { 2 };
    let testbed = Testbed::new(id.parse()?, Shape { edges, twin: false })?;
    testbed.enter_cloud()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("runtime")?;
    runtime.block_on(async {
        match demo {
            Demo::Prometheus => {
                let running = steps::run(&testbed).await?;
                if keep {
                    steps::how_to_look_around(&testbed);
                    running.leave();
                } else {
                    println!("\nremoving everything");
                    running.stop().await?;
                }
            }
            Demo::Kubernetes => {
                let running = kubernetes::run(&testbed).await?;
                if keep {
                    running.how_to_look_around();
                    running.leave();
                } else {
                    println!("\nremoving everything");
                    running.stop().await?;
                }
            }
        }
        if keep {
            fs::write(testbed.dir().join(sweep::KEPT), "").context("marking the demo as kept")?;
        }
        anyhow::Ok(())
    })?;
    if keep {
        // Dropping it would remove what is to stay.
        std::mem::forget(testbed);
    }
    Ok(())
}

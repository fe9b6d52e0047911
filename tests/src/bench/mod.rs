//! `cargo xtask bench`: Postern beside everything that a user would pick instead, on one testbed in one run.
//!
//! As with scenarios, the work is done by a process of its own that stands on the cloud host; this one waits for it,
//! and removes everything when it has ended or when somebody presses Ctrl-C.
pub mod beside;
pub mod by_tonic;
pub mod connect;
pub mod counts;
pub mod dial;
pub mod fleet;
pub mod grpc;
pub mod line;
pub mod load;
pub mod machine;
pub mod options;
pub mod peers;
pub mod record;
pub mod report;
pub mod run;
pub mod scale;
pub mod target;
pub mod usage;

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::Uid;
use tokio::signal::unix::{SignalKind, signal};

use crate::runner;
use crate::testbed::id::{Id, Kind};
use crate::testbed::{Shape, Testbed, sweep};
use options::Options;

/// Edge 1 behind NAT, edge 2 where it can be dialled.
const EDGES: u8 = 2;
/// The longest run; whatever hangs must not hang for ever.
const LIMIT: Duration = Duration::from_secs(4 * 3600);
/// A run's owner is known by the name of its program (`Id::owner_is_alive`), so that nobody else sweeps it away.
const OWNER: &str = "bench-scenarios";

/// The program `bench`: see [`Options`]; `--run ID …`, `--target`, `--fleet …` and `--tonic-… …` are for itself.
pub fn main(args: &[OsString]) -> ExitCode {
    let rest = args.get(2..).unwrap_or_default();
    let result = match args.get(1).and_then(|arg| arg.to_str()) {
        Some("--target") => target::run().map(|()| ExitCode::SUCCESS),
        Some("--fleet") => fleet::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--tonic-cloud") => by_tonic::cloud::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--tonic-edge") => by_tonic::edge::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--run") => work(args.get(2), args.get(3..).unwrap_or_default()),
        _ if args.first().is_some_and(|name| name == OWNER) => supervise(&args[1..]),
        _ => own(&args[1..]),
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::FAILURE
    })
}

/// Becomes the owner of a run.
fn own(args: &[OsString]) -> Result<ExitCode> {
    let this = std::env::current_exe().context("where this program is")?;
    let error = Command::new(this).arg0(OWNER).args(args).exec();
    Err(error).context("starting this program again")
}

fn supervise(args: &[OsString]) -> Result<ExitCode> {
    // xtask holds SIGINT back while it waits for this program, and a signal mask is inherited.
    SigSet::all().thread_swap_mask(SigmaskHow::SIG_UNBLOCK).context("taking signals")?;
    ensure!(Uid::effective().is_root(), "the benchmark needs root: namespaces, cgroups and eBPF programs");
    let options = Options::parse(args.iter().cloned())?;
    let id = Id::new(Kind::Test);
    fs::create_dir_all(id.dir()).with_context(|| format!("creating {}", id.dir().display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    // The seed is drawn here, so that it is told even when the run fails.
    println!("seed {}, {} rounds", options.seed, options.rounds);
    let mut args = args.to_vec();
    args.extend(["--seed".into(), options.seed.to_string().into()]);
    let end = runtime.block_on(wait_for_work(&id, &args));
    let logs = match &end {
        Ok(End::Exited(status)) if status.success() => String::new(),
        _ => runner::logs(&id.dir()),
    };
    sweep::remove(&id)?;
    match end? {
        End::Exited(status) if status.success() => Ok(ExitCode::SUCCESS),
        End::Exited(status) => bail!("the run ended with {status}. The logs were:\n{logs}"),
        End::TooLong => bail!("the run was not finished after {LIMIT:?}. The logs were:\n{logs}"),
        End::Signal(signal) => {
            println!("\n{signal}: everything is removed");
            Ok(ExitCode::from(130))
        }
    }
}

enum End {
    Exited(ExitStatus),
    Signal(Signal),
    TooLong,
}

async fn wait_for_work(id: &Id, args: &[OsString]) -> Result<End> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut command = Command::new(std::env::current_exe().context("where this program is")?);
    // A group of its own: Ctrl-C reaches this process only, which then removes everything in order.
    command.arg("--run").arg(id.to_string()).args(args).process_group(0);
    let mut work = tokio::process::Command::from(command).spawn().context("starting the run's process")?;
    Ok(tokio::select! {
        status = work.wait() => End::Exited(status.context("waiting for the run's process")?),
        _ = interrupt.recv() => End::Signal(Signal::SIGINT),
        _ = terminate.recv() => End::Signal(Signal::SIGTERM),
        () = tokio::time::sleep(LIMIT) => End::TooLong,
    })
}

/// The run itself, in a process of its own on the cloud host.
fn work(id: Option<&OsString>, args: &[OsString]) -> Result<ExitCode> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).context("asking to die with the parent")?;
    let options = Options::parse(args.iter().cloned())?;
    let id = id.and_then(|id| id.to_str()).context("--run ID")?.parse()?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("reading the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raising the limit of open files")?;
    let testbed = Testbed::new(id, Shape { edges: EDGES, twin: false })?;
    testbed.enter_cloud()?;
    let machine = machine::Machine::look(&testbed, &options)?;
    // One thread: the load generator shares the machine with what it measures.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let record = runtime.block_on(async {
        let mut bench = run::Bench::new(&testbed, &options).await?;
        bench.run().await?;
        anyhow::Ok(bench.record)
    })?;
    report::write(&options, machine, &record)?;
    Ok(ExitCode::SUCCESS)
}

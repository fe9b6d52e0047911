//! Supervises a run, which works in a process of its own: this program, started again as a worker. The supervisor waits
//! for it, enforces its time limit, and removes everything it made, however it ended.
use std::ffi::OsStr;
use std::fs;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::Uid;
use tokio::signal::unix::{SignalKind, signal};

use crate::id::Id;
use crate::logs;
use crate::process::Process;
use crate::topology::{Shape, Testbed};
use crate::{snapshot, sweep};

/// Fails unless this process runs as root.
pub fn ensure_root(who: &str) -> Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "{who} needs root: it makes network namespaces and cgroups, attaches eBPF programs to those, and sets iptables rules in those. Run it with sudo."
    );
    Ok(())
}

/// Returns a command that runs this program again with these arguments.
pub fn this_program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("where this program is")?);
    command.args(args);
    Ok(command)
}

/// Sets up a worker: ties its life to its supervisor's, builds the testbed and moves onto the cloud host. No thread may
/// run yet.
pub fn enter_run(id: Id, shape: Shape) -> Result<Testbed> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).context("asking to die with the supervisor")?;
    snapshot::of_this_process(&id);
    let testbed = Testbed::new(id, shape)?;
    testbed.enter_cloud()?;
    Ok(testbed)
}

/// Waits for SIGINT, SIGTERM or SIGHUP.
pub async fn interrupted() -> Result<Signal> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hang_up = signal(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => Signal::SIGINT,
        _ = terminate.recv() => Signal::SIGTERM,
        _ = hang_up.recv() => Signal::SIGHUP,
    })
}

enum End {
    Exited(ExitStatus),
    Interrupted(Signal),
    TooLong,
}

/// Runs `command` as the worker of run `id`, with this program's own output, and removes everything afterwards; with
/// `keep`, a run that succeeds stays up.
pub fn supervise(what: &str, id: &Id, command: Command, limit: Duration, keep: bool) -> Result<ExitCode> {
    // xtask blocks SIGINT while it waits for this program, and a signal mask is inherited.
    SigSet::all().thread_swap_mask(SigmaskHow::SIG_UNBLOCK).context("unblocking signals")?;
    fs::create_dir_all(id.dir()).with_context(|| format!("creating {}", id.dir().display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let end = runtime.block_on(wait(what, command, limit));
    let succeeded = matches!(&end, Ok(End::Exited(status)) if status.success());
    if succeeded && keep {
        return Ok(ExitCode::SUCCESS);
    }
    let (logs, left) = (logs::ends(&id.dir()), sweep::leftovers(id));
    sweep::remove(id)?;
    match end? {
        End::Exited(_) if succeeded => {
            let left = left?;
            ensure!(left.is_empty(), "{what} left behind: {}", left.join(", "));
            Ok(ExitCode::SUCCESS)
        }
        End::Exited(status) => {
            bail!("{what} ended with {status}; everything is removed. The logs were:\n{logs}")
        }
        End::TooLong => {
            bail!("{what} was not finished after {limit:?}; everything is removed. The logs were:\n{logs}")
        }
        End::Interrupted(signal) => {
            println!("\n{signal}: everything is removed");
            Ok(ExitCode::from(128_u8.saturating_add(u8::try_from(signal as i32).unwrap_or(127))))
        }
    }
}

async fn wait(what: &str, command: Command, limit: Duration) -> Result<End> {
    // In a process group of its own: Ctrl-C reaches only this process, which then cleans up in order.
    let mut worker = Process::spawn_inheriting(what, command)?;
    tokio::select! {
        exit = worker.wait_exit(limit) => match worker.ended()? {
            Some(_) => Ok(End::Exited(exit?)),
            None => Ok(End::TooLong),
        },
        signal = interrupted() => Ok(End::Interrupted(signal?)),
    }
}

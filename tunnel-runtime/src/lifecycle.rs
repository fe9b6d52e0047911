//! Starting, draining and stopping.
//!
//! [`Shutdown`] tells when to stop (first signal: drain; second: immediately), [`Drain`] tracks the work in flight,
//! and [`Readiness`] tracks what the start is still waiting for.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Maximum time for which the end of a runtime waits for threads blocked in something else, such as a name lookup.
pub const THREADS_END: Duration = Duration::from_secs(1);
/// The first field of the line of ignored signals in /proc/self/status, and SIGHUP's bit in the second (proc_pid_status(5)).
const IGNORED: &str = "SigIgn:";
const HANG_UP: u64 = 1;
/// Usual soft limit of open files.
const USUAL_OPEN_FILES: u32 = 1024;

/// Runs a program on this thread. When it has ended, the process can end too, even if a thread for blocking calls is
/// still waiting.
///
/// # Errors
/// Returns the program's error, or fails if the runtime cannot be created.
pub fn block_on<T, E: From<io::Error>>(program: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(program);
    runtime.shutdown_timeout(THREADS_END);
    result
}

/// True if this process ignores SIGHUP, as nohup(1) sets it up.
fn ignores_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix(IGNORED));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & HANG_UP != 0)
}

/// Stop state. `draining`: take nothing new and finish the work in flight. `forced`: end immediately; this implies
/// draining. By default only [`Shutdown::begin`] and [`Shutdown::force`] trigger it. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    draining: CancellationToken,
    forced: CancellationToken,
}

impl Shutdown {
    /// Creates a shutdown triggered by SIGTERM, SIGINT and, unless nohup(1) has it ignored, SIGHUP, which a terminal sends when it
    /// closes: the first signal starts the drain, the second forces the end.
    ///
    /// # Errors
    /// Fails if the signal handlers cannot be installed.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with its IO driver enabled.
    pub fn on_signals() -> io::Result<Self> {
        let mut term = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hang_up = (!ignores_hang_up()).then(|| signal(SignalKind::hangup())).transpose()?;
        let shutdown = Self::default();
        let trigger = shutdown.clone();
        tokio::spawn(async move {
            loop {
                let name = tokio::select! {
                    Some(()) = term.recv() => "SIGTERM",
                    Some(()) = interrupt.recv() => "SIGINT",
                    Some(()) = async { hang_up.as_mut()?.recv().await } => "SIGHUP",
                    else => return,
                };
                if trigger.is_draining() {
                    tracing::warn!(signal = name, "second signal: ending immediately");
                    trigger.force();
                    return;
                }
                tracing::info!(signal = name, "draining; a second signal ends immediately");
                trigger.begin();
            }
        });
        Ok(shutdown)
    }

    /// Starts the drain.
    pub fn begin(&self) {
        self.draining.cancel();
    }

    /// Ends everything immediately.
    pub fn force(&self) {
        self.draining.cancel();
        self.forced.cancel();
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    pub fn is_forced(&self) -> bool {
        self.forced.is_cancelled()
    }

    /// Resolves when the drain has started.
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Resolves when everything must end.
    pub fn forced(&self) -> WaitForCancellationFuture<'_> {
        self.forced.cancelled()
    }

    /// Returns the token, for example to create a child token per session.
    pub fn draining_token(&self) -> &CancellationToken {
        &self.draining
    }

    pub fn forced_token(&self) -> &CancellationToken {
        &self.forced
    }
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Everything finished.
    Complete,
    /// The timeout passed; this many pieces of work were forced to end.
    TimedOut { left: usize },
    /// A second signal came; this many pieces of work were forced to end.
    Forced { left: usize },
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("complete"),
            Self::TimedOut { left } => write!(f, "the drain timeout passed with {left} in flight"),
            Self::Forced { left } => write!(f, "ended immediately with {left} in flight"),
        }
    }
}

/// Work in flight. Each piece holds a [`DrainGuard`]; [`Drain::finish`] waits until the last one is dropped.
#[derive(Clone, Debug)]
pub struct Drain {
    tracker: TaskTracker,
    shutdown: Shutdown,
}

impl Drain {
    pub fn new(shutdown: Shutdown) -> Self {
        Self::of(TaskTracker::new(), shutdown)
    }

    /// Creates a drain for tasks that are tracked already.
    pub fn of(tracker: TaskTracker, shutdown: Shutdown) -> Self {
        Self { tracker, shutdown }
    }

    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Counts a piece of work as in flight until the guard is dropped.
    pub fn guard(&self) -> DrainGuard {
        DrainGuard { shutdown: self.shutdown.clone(), _token: self.tracker.token() }
    }

    /// Spawns a piece of work that [`Drain::finish`] waits for.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tracker.spawn(work)
    }

    /// The same on another runtime.
    pub fn spawn_on<F>(&self, work: F, runtime: &Handle) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tracker.spawn_on(work, runtime)
    }

    /// Starts the drain if needed, and waits up to `timeout` for the work in flight. After that it runs `ending`,
    /// which ends what it can without harm, and then forces the rest to end.
    pub async fn finish(&self, timeout: Duration, ending: impl Future<Output = ()>) -> Drained {
        self.shutdown.begin();
        self.tracker.close();
        let drained = tokio::select! {
            // If several are ready, completion wins.
            biased;
            () = self.tracker.wait() => Drained::Complete,
            () = self.shutdown.forced() => Drained::Forced { left: self.tracker.len() },
            () = tokio::time::sleep(timeout) => Drained::TimedOut { left: self.tracker.len() },
        };
        if let Drained::TimedOut { .. } = drained {
            tokio::select! {
                () = ending => {}
                () = self.tracker.wait() => {}
                () = self.shutdown.forced() => {}
            }
        }
        if drained != Drained::Complete {
            self.shutdown.force();
        }
        drained
    }

    /// Waits for the end of the work that [`Self::finish`] has forced to end.
    pub async fn ended(&self) {
        self.tracker.wait().await;
    }
}

/// Held by a piece of work while it runs.
#[derive(Debug)]
pub struct DrainGuard {
    shutdown: Shutdown,
    _token: TaskTrackerToken,
}

impl DrainGuard {
    /// Tells the work when it should, or must, end.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }
}

/// Raises the soft limit of open files to the hard limit and returns that: each tunnelled connection takes a file, and
/// the soft limit of most hosts is 1,024.
pub fn raise_open_files() -> u32 {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard {
            setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        }
        Ok(hard)
    });
    match raised {
        Ok(limit) => u32::try_from(limit).unwrap_or(u32::MAX),
        Err(error) => {
            tracing::warn!(%error, "failed to raise the limit of open files");
            USUAL_OPEN_FILES
        }
    }
}

/// Disables core dumps of this process, because they would contain its keys. Does not use PR_SET_DUMPABLE, which would
/// also deny /proc/self to a process without root's rights.
pub fn forbid_core_dumps() -> io::Result<()> {
    Ok(setrlimit(Resource::RLIMIT_CORE, 0, 0)?)
}

/// Parts that the start is still waiting for. Ready when no [`ReadyGuard`] is left.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<Pending>>);

#[derive(Debug, Default)]
struct Pending {
    next: u64,
    names: BTreeMap<u64, String>,
}

impl Readiness {
    /// Makes the program not ready until the returned guard is dropped. `/readyz` shows `name` until then.
    #[must_use = "dropping the guard means ready"]
    pub fn pending(&self, name: impl Into<String>) -> ReadyGuard {
        let mut pending = self.0.lock();
        let id = pending.next;
        pending.next += 1;
        pending.names.insert(id, name.into());
        ReadyGuard { readiness: self.clone(), id }
    }

    pub fn is_ready(&self) -> bool {
        self.0.lock().names.is_empty()
    }

    /// Returns the names of the pending parts, oldest first.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().names.values().cloned().collect()
    }
}

/// See [`Readiness::pending`].
#[derive(Debug)]
pub struct ReadyGuard {
    readiness: Readiness,
    id: u64,
}

impl ReadyGuard {
    /// Marks the part as ready, like dropping the guard.
    pub fn ready(self) {}
}

impl Drop for ReadyGuard {
    fn drop(&mut self) {
        self.readiness.0.lock().names.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_the_last_guard() {
        let drain = Drain::new(Shutdown::default());
        let guard = drain.guard();
        drain.spawn(async move {
            guard.shutdown().draining().await;
            tokio::time::sleep(Duration::from_secs(3)).await;
        });
        assert_eq!(drain.tracker.len(), 2, "the task and its guard");
        let started = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(30), pending()).await, Drained::Complete);
        assert_eq!(started.elapsed(), Duration::from_secs(3));
        assert!(!drain.shutdown().is_forced());
    }

    #[tokio::test(start_paused = true)]
    async fn drain_forces_the_rest_after_its_timeout() {
        let drain = Drain::new(Shutdown::default());
        let guard = drain.guard();
        let work = tokio::spawn(async move { guard.shutdown().forced().await });
        let started = tokio::time::Instant::now();
        let ending = async { tokio::time::sleep(Duration::from_secs(1)).await };
        assert_eq!(drain.finish(Duration::from_secs(30), ending).await, Drained::TimedOut { left: 1 });
        assert_eq!(started.elapsed(), Duration::from_secs(31));
        work.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_ends_the_drain() {
        let drain = Drain::new(Shutdown::default());
        let _guard = drain.guard();
        let shutdown = drain.shutdown().clone();
        tokio::spawn(async move {
            shutdown.draining().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            shutdown.force();
        });
        let started = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(30), pending()).await, Drained::Forced { left: 1 });
        assert_eq!(started.elapsed(), Duration::from_secs(1));
    }

    #[test]
    fn a_call_that_never_returns_does_not_keep_the_program() {
        let (held, _open) = std::io::pipe().unwrap();
        let started = std::time::Instant::now();
        let ended = block_on(async {
            tokio::task::spawn_blocking(move || io::Read::read(&mut { held }, &mut [0]));
            io::Result::Ok("ended")
        });
        assert_eq!(ended.unwrap(), "ended");
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[tokio::test]
    async fn signals_drain_then_force() {
        // Install the handlers before raising the signals, so that they do not end the test process. SIGINT is used
        // for the second, since another test of this process must not see a stray SIGTERM.
        let shutdown = Shutdown::on_signals().unwrap();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
        if ignores_hang_up() {
            // By nohup(1), also for this test.
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGINT).unwrap();
        }
        tokio::time::timeout(Duration::from_secs(10), shutdown.draining()).await.unwrap();
        assert!(!shutdown.is_forced());
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGINT).unwrap();
        tokio::time::timeout(Duration::from_secs(10), shutdown.forced()).await.unwrap();
    }

    #[test]
    fn ready_when_the_last_guard_is_dropped() {
        let readiness = Readiness::default();
        assert!(readiness.is_ready());
        let redirect = readiness.pending("redirect");
        let inventory = readiness.pending("inventory");
        let again = readiness.pending("redirect");
        assert_eq!(readiness.names(), ["redirect", "inventory", "redirect"]);
        redirect.ready();
        assert_eq!(readiness.names(), ["inventory", "redirect"]);
        drop(inventory);
        assert!(!readiness.is_ready());
        drop(again);
        assert!(readiness.is_ready());
    }
}

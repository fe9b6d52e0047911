//! Starting, draining and stopping.
//!
//! Three small pieces that everything else is built with: [`Shutdown`] says *when* to stop (first signal: drain,
//! second: at once), [`Drain`] knows *who* is still at work, and [`Readiness`] knows what a start still waits for.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The soft limit where nobody has changed it.
const USUAL_OPEN_FILES: u32 = 1024;

/// When to stop: `draining` means take nothing new and finish what is in flight, `forced` means end at once.
///
/// Clones share the state. Forcing implies draining.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    draining: CancellationToken,
    forced: CancellationToken,
}

impl Shutdown {
    /// A shutdown that only [`Shutdown::begin`] and [`Shutdown::force`] trigger.
    pub fn new() -> Self {
        Self::default()
    }

    /// A shutdown that SIGTERM and SIGINT trigger: the first starts the drain, the second ends it at once.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    ///
    /// # Panics
    /// Outside a tokio runtime with its IO driver on.
    pub fn on_signals() -> io::Result<Self> {
        let mut term = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = Self::new();
        let trigger = shutdown.clone();
        tokio::spawn(async move {
            loop {
                let name = tokio::select! {
                    Some(()) = term.recv() => "SIGTERM",
                    Some(()) = interrupt.recv() => "SIGINT",
                    else => return,
                };
                if trigger.is_draining() {
                    tracing::warn!(signal = name, "second signal: ending at once");
                    trigger.force();
                    return;
                }
                tracing::info!(signal = name, "draining; a second signal ends at once");
                trigger.begin();
            }
        });
        Ok(shutdown)
    }

    /// Starts the drain.
    pub fn begin(&self) {
        self.draining.cancel();
    }

    /// Ends everything at once.
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

    /// Resolves when the drain starts; at once if it has.
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Resolves when everything has to end; at once if that is now.
    pub fn forced(&self) -> WaitForCancellationFuture<'_> {
        self.forced.cancelled()
    }

    /// For code that wants the token itself, such as a child token per session.
    pub fn draining_token(&self) -> &CancellationToken {
        &self.draining
    }

    pub fn forced_token(&self) -> &CancellationToken {
        &self.forced
    }
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Everything finished by itself.
    Complete,
    /// The time was up; this many pieces of work were told to end at once.
    TimedOut { left: usize },
    /// A second signal came; this many pieces of work were told to end at once.
    Forced { left: usize },
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("complete"),
            Self::TimedOut { left } => write!(f, "the drain timeout was up with {left} in flight"),
            Self::Forced { left } => write!(f, "ended at once with {left} in flight"),
        }
    }
}

/// The work in flight. Each piece holds a [`DrainGuard`]; [`Drain::finish`] waits until the last is dropped.
#[derive(Clone, Debug)]
pub struct Drain {
    tracker: TaskTracker,
    shutdown: Shutdown,
}

impl Drain {
    pub fn new(shutdown: Shutdown) -> Self {
        Self { tracker: TaskTracker::new(), shutdown }
    }

    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Marks a piece of work; dropping the guard marks its end.
    pub fn guard(&self) -> DrainGuard {
        DrainGuard { shutdown: self.shutdown.clone(), _token: self.tracker.token() }
    }

    /// Spawns a piece of work that is waited for.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tracker.spawn(work)
    }

    /// Pieces of work in flight.
    pub fn in_flight(&self) -> usize {
        self.tracker.len()
    }

    /// Starts the drain if nobody has, waits for the work in flight for at most `timeout`, then tells what is left to end at once.
    pub async fn finish(&self, timeout: Duration) -> Drained {
        self.shutdown.begin();
        self.tracker.close();
        let drained = tokio::select! {
            // Complete wins when both are true at once.
            biased;
            () = self.tracker.wait() => Drained::Complete,
            () = self.shutdown.forced() => Drained::Forced { left: self.tracker.len() },
            () = tokio::time::sleep(timeout) => Drained::TimedOut { left: self.tracker.len() },
        };
        if drained != Drained::Complete {
            self.shutdown.force();
        }
        drained
    }
}

/// Held by a piece of work for as long as it takes.
#[derive(Debug)]
pub struct DrainGuard {
    shutdown: Shutdown,
    _token: TaskTrackerToken,
}

impl DrainGuard {
    /// Where the work learns that it should, or must, end.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }
}

/// Raises the limit of open files to what the process may have, and returns it: each carried connection takes one, and
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
            tracing::warn!(%error, "the limit of open files stays as it is; it bounds the connections");
            USUAL_OPEN_FILES
        }
    }
}

/// What the start still waits for. Ready when no [`ReadyGuard`] is left.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<Pending>>);

#[derive(Debug, Default)]
struct Pending {
    next: u64,
    names: BTreeMap<u64, String>,
}

impl Readiness {
    pub fn new() -> Self {
        Self::default()
    }

    /// Not ready until the returned guard is dropped; `/readyz` shows `name` meanwhile.
    #[must_use = "dropping the guard means ready"]
    pub fn pending(&self, name: impl Into<String>) -> ReadyGuard {
        let mut pending = lock(&self.0);
        let id = pending.next;
        pending.next += 1;
        pending.names.insert(id, name.into());
        ReadyGuard { readiness: self.clone(), id }
    }

    pub fn is_ready(&self) -> bool {
        lock(&self.0).names.is_empty()
    }

    /// What is pending, oldest first.
    pub fn names(&self) -> Vec<String> {
        lock(&self.0).names.values().cloned().collect()
    }
}

/// See [`Readiness::pending`].
#[derive(Debug)]
pub struct ReadyGuard {
    readiness: Readiness,
    id: u64,
}

impl ReadyGuard {
    /// The same as dropping it, for code that reads better with a verb.
    pub fn ready(self) {}
}

impl Drop for ReadyGuard {
    fn drop(&mut self) {
        lock(&self.readiness.0).names.remove(&self.id);
    }
}

// The map is whole after every statement, so a panic of another holder leaves nothing half-done.
fn lock(pending: &Mutex<Pending>) -> MutexGuard<'_, Pending> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_the_last_guard() {
        let drain = Drain::new(Shutdown::new());
        let guard = drain.guard();
        drain.spawn(async move {
            guard.shutdown().draining().await;
            tokio::time::sleep(Duration::from_secs(3)).await;
        });
        assert_eq!(drain.in_flight(), 2, "the task and its guard");
        let started = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(30)).await, Drained::Complete);
        assert_eq!(started.elapsed(), Duration::from_secs(3));
        assert!(!drain.shutdown().is_forced());
    }

    #[tokio::test(start_paused = true)]
    async fn drain_forces_what_is_left_when_the_time_is_up() {
        let drain = Drain::new(Shutdown::new());
        let guard = drain.guard();
        let work = tokio::spawn(async move { guard.shutdown().forced().await });
        let started = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(30)).await, Drained::TimedOut { left: 1 });
        assert_eq!(started.elapsed(), Duration::from_secs(30));
        work.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_ends_the_drain() {
        let drain = Drain::new(Shutdown::new());
        let _guard = drain.guard();
        let shutdown = drain.shutdown().clone();
        tokio::spawn(async move {
            shutdown.draining().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            shutdown.force();
        });
        let started = tokio::time::Instant::now();
        assert_eq!(drain.finish(Duration::from_secs(30)).await, Drained::Forced { left: 1 });
        assert_eq!(started.elapsed(), Duration::from_secs(1));
    }

    #[tokio::test]
    async fn signals_drain_then_force() {
        // Installed before the signals are raised, so they do not end the test process. SIGINT is used for both,
        // since another test of this process must not see a stray SIGTERM.
        let shutdown = Shutdown::on_signals().unwrap();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGINT).unwrap();
        tokio::time::timeout(Duration::from_secs(10), shutdown.draining()).await.unwrap();
        assert!(!shutdown.is_forced());
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGINT).unwrap();
        tokio::time::timeout(Duration::from_secs(10), shutdown.forced()).await.unwrap();
    }

    #[test]
    fn ready_when_the_last_guard_is_gone() {
        let readiness = Readiness::new();
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

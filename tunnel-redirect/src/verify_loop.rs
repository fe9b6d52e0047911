//! Maintains the running redirect: verifies it every 30 s, checks every second for programs that others have detached,
//! and restores lost parts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;
use tunnel_runtime::log_once::LogOnce;

use super::by_route::ByRoute;
use super::config::Pods;
use super::error::RedirectError;
use super::running::Redirect;
use super::self_test::SelfTest;
use super::start::has_cilium;

/// Interval between verifications.
const PERIOD: Duration = Duration::from_secs(30);
/// Interval between heartbeats; `--orphan-timeout` is at least [`LEAST_ORPHAN_TIMEOUT`](super::LEAST_ORPHAN_TIMEOUT).
const BEAT: Duration = Duration::from_secs(1);

impl Redirect {
    /// Verifies every 30 s, restores lost parts (programs within a second), follows this host's addresses, and forwards
    /// the programs' log, until `cancel`.
    pub async fn watch(self: Arc<Self>, cancel: CancellationToken) {
        let program_log = self.lock().program_log.take();
        let log = async {
            if let Some(log) = program_log {
                log.run().await;
            }
            // The end of the log must not end the rest.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.verify_periodically() => {}
            () = self.follow_addresses() => {}
            () = self.follow_routes() => {}
            () = self.beat() => {}
            () = log => {}
        }
    }

    /// Writes the heartbeat, without which the programs treat this process as dead, and has missing programs
    /// reattached.
    async fn beat(self: &Arc<Self>) {
        let mut ticks = tokio::time::interval(BEAT);
        let mut failing = LogOnce::default();
        loop {
            ticks.tick().await;
            // Offloaded, as it asks the kernel for every program.
            match self.offload(Self::beat_now).await {
                Ok(lost) => {
                    failing.clear();
                    if lost {
                        self.lost.notify_one();
                    }
                }
                Err(error) if failing.is_new(&error) => {
                    tracing::error!(%error, "failed to write the heartbeat to the BPF map");
                }
                Err(_) => {}
            }
        }
    }

    /// Writes the heartbeat. Returns true if a program is missing, or rules of a dead server are there.
    fn beat_now(&self) -> Result<bool, RedirectError> {
        // Before the lock, which a large change may hold for longer than --orphan-timeout.
        self.heartbeat.lock().beat()?;
        // A later beat finds what is missing by then.
        let Some(inner) = self.inner.try_lock() else { return Ok(false) };
        inner.claim.answer();
        if inner.released || inner.stopped {
            return Ok(false);
        }
        if inner.by_route.as_ref().is_some_and(ByRoute::another_died) {
            return Ok(true);
        }
        // If the kernel cannot be queried, the verification reports it.
        Ok(inner.programs.lost(&self.cgroup, &self.netns).is_ok_and(|lost| !lost.is_empty()))
    }

    async fn verify_periodically(self: &Arc<Self>) {
        let mut ticks = interval_at(tokio::time::Instant::now() + PERIOD, PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.note(|health| health.verified = Some(Instant::now()));
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.lost.notified() => {}
            }
            self.verify_and_restore().await;
        }
    }

    /// One round of [`watch`](Self::watch): restores missing parts, then verifies. The outcome is in
    /// [`health`](Self::health) and in the log.
    pub async fn verify_and_restore(self: &Arc<Self>) {
        // Restores first: listing attached programs costs less than a self-test that must time out.
        let result = match self.offload(Self::restore_now).await {
            Ok(lost) => {
                self.note_restored(&lost);
                self.verify().await
            }
            Err(error) => Err(error),
        };
        let before = self.health().problem;
        match result {
            Ok(()) => {
                if before.is_some() {
                    tracing::info!("redirect works again");
                }
                self.note(|health| {
                    health.problem = None;
                    health.verified = Some(Instant::now());
                });
            }
            Err(RedirectError::Stopped) => {}
            Err(error) => {
                let problem = error.to_string();
                if before.as_ref() != Some(&problem) {
                    tracing::error!(error = problem, "redirect verification failed");
                }
                self.note(|health| health.problem = Some(problem));
            }
        }
    }

    /// Connects to itself through every hook, on the next tunnelled port; [`watch`](Self::watch) does so every 30 s.
    ///
    /// # Errors
    /// [`RedirectError::SelfTest`] describes the failure.
    pub async fn verify(self: &Arc<Self>) -> Result<(), RedirectError> {
        self.offload(Self::verify_now).await
    }

    pub(super) fn verify_now(&self) -> Result<(), RedirectError> {
        let test = {
            let inner = self.lock();
            if inner.stopped {
                return Err(RedirectError::Stopped);
            }
            if inner.released {
                return Ok(());
            }
            let cgroup = self.cgroup.path.display().to_string();
            SelfTest::new(&inner, self.ipv6, self.features.set_retval, cgroup)
        };
        if self.routed && self.config.pods == Pods::Auto && has_cilium() {
            return Err(RedirectError::Cilium);
        }
        test.run(|index| self.counters.get(index))?;
        let mut inner = self.lock();
        if let Some(by_route) = &mut inner.by_route {
            by_route.probe(test.port)?;
        }
        inner.verified_port = Some(test.port);
        Ok(())
    }

    fn note_restored(&self, lost: &[&str]) {
        if !lost.is_empty() {
            tracing::warn!(lost = lost.join(", "), "restored lost parts of the redirect");
            self.note(|health| health.restored += 1);
        }
    }

    /// Adds lost redirect routes and reattaches lost programs, once this server has the claim; returns the names of those that
    /// were missing.
    fn restore_now(&self) -> Result<Vec<&'static str>, RedirectError> {
        let mut inner = self.lock();
        if !inner.released && !inner.stopped {
            inner.claim.retake()?;
        }
        drop(inner);
        let routes = self.ensure_routes();
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        let mut restored = Vec::new();
        if !inner.released {
            // Whatever becomes of the routes: an IPv6 range without one must not leave IPv4 without programs.
            restored.extend(inner.programs.lost(&self.cgroup, &self.netns)?);
            inner.programs.attach(&self.cgroup, &self.netns)?;
            // After a `resume` that failed half-way.
            if inner.by_route.as_mut().is_some_and(ByRoute::unpause) {
                drop(inner);
                restored.extend(self.ensure_routes()?);
            }
        }
        match routes {
            Ok(routes) => restored.extend(routes),
            Err(error) => {
                self.note_restored(&restored);
                return Err(error);
            }
        }
        Ok(restored)
    }
}

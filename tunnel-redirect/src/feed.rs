//! Writes changes of the routes to the kernel's maps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_routing::Desired;
use tunnel_runtime::lifecycle::{Readiness, ReadyGuard};
use tunnel_runtime::log_once::LogOnce;

use super::Redirect;

/// Changes of routes within this time are applied together.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Pause after the kernel rejected a change of its maps.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps a [`Redirect`] at the desired routes of a source.
pub struct Feeder {
    redirect: Arc<Redirect>,
    changed: watch::Receiver<u64>,
    /// The change that the kernel has.
    applied: watch::Sender<u64>,
    desired: Arc<dyn Fn() -> Desired + Send + Sync>,
    failures: LogOnce,
    readiness: Readiness,
    /// Held while the kernel's routes are out of date.
    stale: Option<ReadyGuard>,
}

impl Feeder {
    /// The server is not ready while the routes cannot be applied, as clients may be sent to a node that has left.
    /// `changed` must wake whenever `desired` may return another value.
    pub fn new(
        redirect: Arc<Redirect>,
        readiness: Readiness,
        changed: watch::Receiver<u64>,
        desired: impl Fn() -> Desired + Send + Sync + 'static,
    ) -> Self {
        let (desired, failures) = (Arc::new(desired), LogOnce::default());
        Self {
            redirect,
            changed,
            applied: watch::Sender::default(),
            desired,
            failures,
            readiness,
            stale: None,
        }
    }

    /// The value of `changed` up to which changes are in the kernel's maps.
    pub fn applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// Applies the desired routes; returns false on failure, and [`run`](Self::run) then retries.
    pub async fn feed(&mut self) -> bool {
        let version = *self.changed.borrow_and_update();
        let (redirect, desired) = (self.redirect.clone(), self.desired.clone());
        match tokio::task::spawn_blocking(move || redirect.apply(|| desired())).await {
            Ok(Ok(applied)) => {
                self.failures.clear();
                self.stale = None;
                self.applied.send_replace(version);
                tracing::debug!(writes = applied.writes, deletes = applied.deletes, "routes applied");
                return true;
            }
            Ok(Err(error)) if self.failures.is_new(&error) => {
                tracing::error!(%error, "failed to write the routes to the kernel");
            }
            Ok(Err(_)) => {}
            Err(error) => tracing::error!(%error, "failed to write the routes to the kernel"),
        }
        self.stale.get_or_insert_with(|| self.readiness.pending("the kernel's routes are not current"));
        self.changed.mark_changed();
        false
    }

    /// Applies every change until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                changed = self.changed.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
            if !self.feed().await {
                tokio::time::sleep(RETRY).await;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

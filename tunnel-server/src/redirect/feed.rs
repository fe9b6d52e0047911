//! Feeds changes of the routes into the kernel's maps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_core::lifecycle::{Readiness, ReadyGuard};
use tunnel_core::log_once::LogOnce;

use super::Redirect;
use crate::route::Desired;

/// Changes of routes within this time are applied as one.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Pause after the kernel refused a change of its maps.
const RETRY: Duration = Duration::from_secs(1);

/// Brings a [`Redirect`] to what a source of routes wants.
pub struct Feeder {
    redirect: Arc<Redirect>,
    changed: watch::Receiver<u64>,
    desired: Arc<dyn Fn() -> Desired + Send + Sync>,
    failures: LogOnce,
    readiness: Readiness,
    /// While the kernel's routes are not the current ones.
    stale: Option<ReadyGuard>,
}

impl Feeder {
    /// While the routes cannot be applied, the server is not ready: its clients may be led to where nobody is any more.
    /// `changed` wakes whenever `desired` may return something else.
    pub fn new(
        redirect: Arc<Redirect>,
        readiness: Readiness,
        changed: watch::Receiver<u64>,
        desired: impl Fn() -> Desired + Send + Sync + 'static,
    ) -> Self {
        let (desired, failures) = (Arc::new(desired), LogOnce::default());
        Self { redirect, changed, desired, failures, readiness, stale: None }
    }

    /// Applies the desired routes; false if that failed. [`run`](Self::run) then tries again.
    pub async fn feed(&mut self) -> bool {
        self.changed.mark_unchanged();
        let (redirect, desired) = (self.redirect.clone(), self.desired.clone());
        match tokio::task::spawn_blocking(move || redirect.apply(|| desired())).await {
            Ok(Ok(applied)) => {
                self.failures.clear();
                self.stale = None;
                tracing::debug!(writes = applied.writes, deletes = applied.deletes, "routes applied");
                return true;
            }
            Ok(Err(error)) if self.failures.is_new(&error) => {
                tracing::error!(%error, "the routes in the kernel are not current");
            }
            Ok(Err(_)) => {}
            Err(error) => tracing::error!(%error, "feeding the redirect failed"),
        }
        self.stale.get_or_insert_with(|| self.readiness.pending("the kernel's routes are not current"));
        self.changed.mark_changed();
        false
    }

    /// Applies every change until stopped.
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

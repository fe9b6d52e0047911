//! Feeds changes of the routes into the kernel's maps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_core::log_once::LogOnce;

use super::{Desired, Redirect};

/// Changes of routes within this time are applied as one.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause after the kernel refused a change of its maps.
const RETRY: Duration = Duration::from_secs(1);

/// Brings a [`Redirect`] to what a source of routes wants.
pub struct Feeder {
    redirect: Arc<Redirect>,
    changed: watch::Receiver<u64>,
    desired: Arc<dyn Fn() -> Desired + Send + Sync>,
    failures: LogOnce,
}

impl Feeder {
    /// `changed` wakes whenever `desired` may return something else.
    pub fn new(
        redirect: Arc<Redirect>,
        changed: watch::Receiver<u64>,
        desired: impl Fn() -> Desired + Send + Sync + 'static,
    ) -> Self {
        Self { redirect, changed, desired: Arc::new(desired), failures: LogOnce::default() }
    }

    /// Applies the desired routes; false if that failed. [`run`](Self::run) then tries again.
    pub async fn feed(&mut self) -> bool {
        self.changed.mark_unchanged();
        let (redirect, desired) = (self.redirect.clone(), self.desired.clone());
        match tokio::task::spawn_blocking(move || redirect.apply(&desired())).await {
            Ok(Ok(applied)) => {
                self.failures.clear();
                tracing::debug!(writes = applied.writes, deletes = applied.deletes, "routes applied");
                return true;
            }
            Ok(Err(error)) if self.failures.is_new(&error) => {
                tracing::error!(%error, "the routes in the kernel are not current");
            }
            Ok(Err(_)) => {}
            Err(error) => tracing::error!(%error, "feeding the redirect failed"),
        }
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
            tokio::time::sleep(PAUSE).await;
        }
    }
}

//! Keeps the routes of the redirect ranges, and what takes connections by route, while the redirect runs: without them,
//! connects would leave this host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tunnel_runtime::log_once::{LogOnce, LogRarely};
use tunnel_runtime::net::{Ended, NetChanges};

use super::by_route::{ByRoute, Watched};
use super::error::RedirectError;
use super::range_use;
use super::running::Redirect;

/// Interval at which the routes are checked without a change.
const PERIOD: Duration = Duration::from_secs(30);
/// Pause before a broken netlink subscription is renewed.
const RETRY: Duration = Duration::from_secs(1);

impl Redirect {
    pub(super) async fn follow_routes(self: &Arc<Self>) {
        let (mut failures, mut logs) = (LogOnce::default(), Logs::default());
        loop {
            match self.keep_routes(&mut logs).await {
                Err(RedirectError::Stopped) => return,
                Err(error) if failures.is_new(&error) => {
                    tracing::warn!(%error, "failed to follow routes, retrying");
                }
                Err(_) => {}
                Ok(None) => continue,
                Ok(Some(ended)) => {
                    tracing::debug!(reason = %ended, "renewing the subscription to route changes");
                }
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then restores what is missing on each change, until the subscription breaks, or needs to be for another
    /// device.
    async fn keep_routes(self: &Arc<Self>, logs: &mut Logs) -> Result<Option<Ended>, RedirectError> {
        let ranges = self.config.ranges(self.ipv6);
        let watched = self.watched().await?;
        let tables = watched.as_ref().map_or(&[][..], |watched| &watched.tables[..]);
        let (device, own) = (watched.map(|watched| watched.device), watched.map(|watched| watched.author));
        let mut changes =
            NetChanges::of_routes(&ranges, tables, device, own).map_err(|error| RedirectError::Netlink {
                operation: "subscribe to changes of routes".into(),
                reason: error.to_string(),
            })?;
        let mut changed = true;
        loop {
            let lost = self.offload(Self::ensure_routes).await?;
            if !lost.is_empty() {
                self.note(|health| health.restored += 1);
                // Another program may remove them again and again, as systemd-networkd does with rules at each change.
                if let Some(left_out) = logs.restored.due(Instant::now()) {
                    tracing::warn!(lost = lost.join(", "), left_out, "restored lost parts of the redirect");
                }
            }
            if self.watched().await? != watched {
                return Ok(None);
            }
            if changed {
                let used = self.offload(|redirect| range_use::check(&redirect.config, redirect.ipv6)).await;
                match used {
                    Ok(()) => _ = logs.uses.clear(),
                    Err(error) if logs.uses.is_new(&error) => {
                        tracing::warn!(%error, "redirect range is in use");
                    }
                    Err(_) => {}
                }
            }
            match changes.next(PERIOD).await {
                Ok(change) => changed = change,
                Err(ended) => return Ok(Some(ended)),
            }
        }
    }

    async fn watched(self: &Arc<Self>) -> Result<Option<Watched>, RedirectError> {
        if !self.routed {
            return Ok(None);
        }
        self.offload(|redirect| Ok(redirect.lock().by_route.as_ref().map(ByRoute::watched))).await
    }
}

/// Messages that would repeat.
#[derive(Default)]
struct Logs {
    uses: LogOnce,
    restored: LogRarely,
}

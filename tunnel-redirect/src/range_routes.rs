//! Keeps the routes of the redirect ranges while the redirect runs: without them, connects would leave this host.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::net::{Ended, NetChanges};

use super::by_route::ByRoute;
use super::error::RedirectError;
use super::range_use;
use super::running::{Redirect, redirect_ranges};

/// Interval at which the routes are checked without a change.
const PERIOD: Duration = Duration::from_secs(30);
/// Pause before a broken netlink subscription is renewed.
const RETRY: Duration = Duration::from_secs(1);

impl Redirect {
    pub(super) async fn follow_routes(self: &Arc<Self>) {
        let (mut failures, mut uses) = (LogOnce::default(), LogOnce::default());
        loop {
            match self.keep_routes(&mut uses).await {
                Err(RedirectError::Stopped) => return,
                Err(error) if failures.is_new(&error) => {
                    tracing::warn!(%error, "failed to follow routes, retrying");
                }
                Err(_) => {}
                Ok(ended) => tracing::debug!(reason = %ended, "renewing the subscription to route changes"),
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then adds missing routes on each change, until the subscription breaks.
    async fn keep_routes(self: &Arc<Self>, uses: &mut LogOnce) -> Result<Ended, RedirectError> {
        let ranges = redirect_ranges(&self.config, self.ipv6);
        let watched = if self.routed {
            self.offload(|redirect| Ok(redirect.lock().by_route.as_ref().map(ByRoute::watched))).await?
        } else {
            None
        };
        let (tables, own) = watched.unzip();
        let tables = tables.as_ref().map_or(&[][..], |tables| &tables[..]);
        let mut changes =
            NetChanges::of_routes(&ranges, tables, own).map_err(|error| RedirectError::Netlink {
                operation: "subscribe to changes of routes".into(),
                reason: error.to_string(),
            })?;
        let mut changed = true;
        loop {
            if self.offload(Self::ensure_routes).await? {
                tracing::warn!("restored a lost redirect route");
                self.note(|health| health.restored += 1);
            }
            if changed {
                let used = self.offload(|redirect| range_use::check(&redirect.config, redirect.ipv6)).await;
                match used {
                    Ok(()) => _ = uses.clear(),
                    Err(error) if uses.is_new(&error) => tracing::warn!(%error, "redirect range is in use"),
                    Err(_) => {}
                }
            }
            match changes.next(PERIOD).await {
                Ok(change) => changed = change,
                Err(ended) => return Ok(ended),
            }
        }
    }
}

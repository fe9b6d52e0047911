//! Updates the maps with this host's own addresses, which are never redirected.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::net::{Ended, NetChanges};

use super::error::RedirectError;
use super::running::Redirect;

/// Interval at which the addresses are reread anyway.
const PERIOD: Duration = Duration::from_secs(30);
/// Time between two readings of the interfaces that lead to other hosts: every pod that starts changes addresses, and there may be a
/// million routes to read.
const UPLINKS: Duration = Duration::from_secs(5);
/// Pause before a broken netlink subscription is renewed.
const RETRY: Duration = Duration::from_secs(1);

impl Redirect {
    pub(super) async fn follow_addresses(self: &Arc<Self>) {
        let mut failures = LogOnce::default();
        loop {
            let followed = self.follow_subscription(&mut failures).await;
            match followed {
                Err(RedirectError::Stopped) => return,
                Err(error) if failures.is_new(&error) => {
                    tracing::warn!(%error, "failed to follow this host's addresses, retrying");
                }
                Err(_) => {}
                Ok(ended) => tracing::debug!(reason = %ended, "renewing the subscription to address changes"),
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then rereads all addresses on each change and every 30 s, until the subscription breaks.
    async fn follow_subscription(self: &Arc<Self>, failures: &mut LogOnce) -> Result<Ended, RedirectError> {
        let mut changes = NetChanges::of_addresses().map_err(|error| RedirectError::Netlink {
            operation: "subscribe to address changes".into(),
            reason: error.to_string(),
        })?;
        let mut uplinks_due = Instant::now();
        loop {
            let uplinks = uplinks_due <= Instant::now();
            let applied = self.offload(move |this| this.refresh_addresses(uplinks)).await?;
            failures.clear();
            if uplinks {
                uplinks_due = Instant::now() + UPLINKS;
            }
            if applied.writes + applied.deletes > 0 {
                tracing::info!(added = applied.writes, removed = applied.deletes, "host addresses changed");
            }
            if let Err(ended) = changes.next(if uplinks { PERIOD } else { UPLINKS }).await {
                return Ok(ended);
            }
        }
    }
}

//! Updates the maps with this host's own addresses, which are never redirected.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tunnel_runtime::net::{Ended, NetChanges};

use super::error::RedirectError;
use super::running::Redirect;

/// Interval at which the addresses are reread anyway.
const PERIOD: Duration = Duration::from_secs(30);
/// Pause before a broken netlink subscription is renewed.
const RETRY: Duration = Duration::from_secs(1);

impl Redirect {
    pub(super) async fn follow_addresses(self: &Arc<Self>) {
        loop {
            match self.follow_subscription().await {
                Err(RedirectError::Stopped) => return,
                Err(error) => tracing::warn!(%error, "failed to follow this host's addresses, retrying"),
                Ok(ended) => tracing::debug!(reason = %ended, "renewing the subscription to address changes"),
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then rereads all addresses on each change and every 30 s, until the subscription breaks.
    async fn follow_subscription(self: &Arc<Self>) -> Result<Ended, RedirectError> {
        let mut changes = NetChanges::of_addresses().map_err(|error| RedirectError::Netlink {
            operation: "subscribe to address changes".into(),
            reason: error.to_string(),
        })?;
        loop {
            let applied = self.offload(Self::refresh_addresses).await?;
            if applied.writes + applied.deletes > 0 {
                tracing::info!(added = applied.writes, removed = applied.deletes, "host addresses changed");
            }
            if let Err(ended) = changes.next(PERIOD).await {
                return Ok(ended);
            }
        }
    }
}

//! Keeps the maps in step with this host's own addresses, which are never redirected.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use rtnetlink::MulticastGroup;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::error::RedirectError;
use super::running::Redirect;

/// The addresses are also read this often: a burst of changes may overflow the socket.
const PERIOD: Duration = Duration::from_secs(30);
/// Address changes come in bursts (an interface goes down with all of its addresses).
const SETTLE: Duration = Duration::from_millis(20);
/// Until a broken netlink subscription is tried again.
const RETRY: Duration = Duration::from_secs(1);

impl Redirect {
    pub(super) async fn follow_addresses(self: &Arc<Self>) {
        loop {
            match self.follow_subscription().await {
                Err(RedirectError::Stopped) => return,
                Err(error) => tracing::warn!(%error, "cannot follow this host's addresses; trying again"),
                Ok(()) => {}
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then reads all addresses on each change and every 30 s, until the subscription breaks.
    async fn follow_subscription(self: &Arc<Self>) -> Result<(), RedirectError> {
        let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, _handle, mut messages) =
            rtnetlink::new_multicast_connection(&groups).map_err(|error| RedirectError::Netlink {
                operation: "subscribe to address changes".into(),
                reason: error.to_string(),
            })?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        loop {
            let applied = self.offload(Self::refresh_addresses).await?;
            if applied.writes + applied.deletes > 0 {
                tracing::info!(
                    added = applied.writes,
                    removed = applied.deletes,
                    "this host's addresses changed"
                );
            }
            match timeout(PERIOD, messages.next()).await {
                Err(_) => {}
                Ok(None) => return Ok(()),
                Ok(Some(_)) => {
                    // Until it is quiet for a moment; bounded, so that a flapping link cannot hold up the reading.
                    let burst = async { while let Ok(Some(_)) = timeout(SETTLE, messages.next()).await {} };
                    drop(timeout(SETTLE * 10, burst).await);
                }
            }
        }
    }
}

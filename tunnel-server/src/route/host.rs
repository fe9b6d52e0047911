//! Follows this host's addresses, which tell which node of the inventory this host is.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Router;

/// How often this host's addresses are compared with the inventory's.
const PERIOD: Duration = Duration::from_secs(30);

/// Keeps `router` up to date with this host's addresses until stopped.
pub async fn follow_host(router: Arc<Router>, stop: CancellationToken) {
    let mut tick = tokio::time::interval(PERIOD);
    loop {
        tokio::select! {
            _ = tick.tick() => router.refresh_host(),
            () = stop.cancelled() => return,
        }
    }
}

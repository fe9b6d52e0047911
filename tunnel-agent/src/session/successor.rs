//! Notices a link that only looks alive, by a second connection that works.

use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ClientConfig;

use super::connect::{Connected, connect};
use super::state::SessionState;

/// How often to look.
const CHECK: Duration = Duration::from_millis(500);
/// How long a second connection may take.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Within this time the kernel sends again what was not acknowledged; see `link`'s bound on the pauses between.
const SENT_AGAIN: Duration = Duration::from_secs(1);

/// Waits until the session's link has not answered for a while, and another connection to the server works: a NAT has
/// forgotten the link, or this node has another address. While the line is out neither works, and the link is kept: it
/// goes on when the line is back.
pub(super) async fn find(session: &SessionState, tls: &Arc<ClientConfig>) -> Connected {
    let mut tick = tokio::time::interval(CHECK);
    loop {
        tick.tick().await;
        let round = session.flow.rtt.last().unwrap_or_default();
        let limit = session.shared.keepalive + CHECK.max(round * 4);
        if !silent_for(session, limit).await {
            continue;
        }
        let server = session.peer.to_string();
        let attempt = connect(&server, tls.clone(), session.shared.keepalive);
        let Ok(Ok(connected)) = tokio::time::timeout(ATTEMPT, attempt).await else { continue };
        // The line may just have come back.
        tokio::time::sleep(SENT_AGAIN + round * 2).await;
        if silent_for(session, limit).await {
            return connected;
        }
    }
}

async fn silent_for(session: &SessionState, limit: Duration) -> bool {
    session.flow.silence().await.is_some_and(|silence| silence >= limit)
}

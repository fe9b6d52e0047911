//! Notices a link that only looks alive, by a second connection that works, or by the address that it was made from.

use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ClientConfig;
use tunnel_core::link::Silence;

use super::connect::{Connected, connect};
use super::state::SessionState;

/// How often to look.
const CHECK: Duration = Duration::from_millis(250);
/// The least that is waited for an answer.
const ANSWER: Duration = Duration::from_millis(250);
/// How long a second connection may take.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Within this time the kernel sends again what was not acknowledged; see `link`'s bound on the pauses between.
const SENT_AGAIN: Duration = Duration::from_secs(1);

/// Waits until the session's link has not answered for a while, and another connection to the server works: a NAT has
/// forgotten the link. While the line is out neither works, and the link is kept: it goes on when the line is back. If this
/// node has lost the address that the link was made from, only a connection that works is waited for.
pub(super) async fn find(session: &SessionState, tls: &Arc<ClientConfig>) -> Connected {
    let mut tick = tokio::time::interval(CHECK);
    let mut addresses = session.shared.addresses.clone();
    let had = addresses.borrow_and_update().contains(&session.local);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            Ok(()) = addresses.changed() => {}
        }
        if had && !addresses.borrow_and_update().contains(&session.local) {
            let attempt = connect(&session.shared, &session.again, tls.clone());
            if let Ok(Ok(connected)) = tokio::time::timeout(ATTEMPT, attempt).await {
                tracing::info!(server = %session.server, address = %session.local, "this node has lost the address of its link");
                return connected;
            }
            continue;
        }
        let answer = ANSWER.max(session.flow.rtt.last().unwrap_or_default() * 4);
        let limit = session.shared.keepalive + answer;
        let Some(silence) = silent_for(session, limit).await else { continue };
        let attempt = connect(&session.shared, &session.again, tls.clone());
        let Ok(Ok(connected)) = tokio::time::timeout(ATTEMPT, attempt).await else { continue };
        // The line may just have come back, and the link with it. What is sent now is answered at once, but not before
        // what was lost has been sent again.
        session.report_load();
        tokio::time::sleep(if silence.unacknowledged { SENT_AGAIN + answer } else { answer }).await;
        if silent_for(session, limit).await.is_some() {
            return connected;
        }
    }
}

async fn silent_for(session: &SessionState, limit: Duration) -> Option<Silence> {
    session.flow.silence().await.filter(|silence| silence.lasts >= limit)
}

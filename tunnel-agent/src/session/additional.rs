//! Additional links of a session: TCP connections that the server asks for when the node is busy.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_pki::{ALPN_TUNNEL, agent_tls};

use super::connect::{Connected, connect};
use super::serve::serve;
use super::session_end::{Refusal, SessionEnd};
use super::state::{SessionPhase, SessionState};

/// Maximum attempts for one link. Behind a load balancer another server may answer.
const TRIES: u32 = 8;

/// Opens the link with this number as a task of `tasks`, unless it already exists.
pub(super) fn open(first: &Arc<SessionState>, number: u32, tasks: &TaskTracker) {
    let Some(place) = first.common.place(number) else { return };
    let first = first.clone();
    tasks.spawn(async move {
        let mut end = run(&first, number).await;
        for _ in 1..TRIES {
            // A first link that drains or ends gets no more links, at whichever server.
            let wanted = matches!(*first.phase.borrow(), SessionPhase::Attached { .. });
            if !wanted || !matches!(end, SessionEnd::Refused(Refusal::OtherServer)) {
                break;
            }
            end = run(&first, number).await;
        }
        // The server continues without it, and asks again when it needs it.
        tracing::debug!(server = %first.server, link = number, reason = %end, "additional link ended");
        drop(place);
    });
}

async fn run(first: &Arc<SessionState>, number: u32) -> SessionEnd {
    let identity = first.shared.identity.borrow().clone();
    let tls = match agent_tls(&identity, ALPN_TUNNEL) {
        Ok(tls) => tls,
        Err(error) => return SessionEnd::tls(error),
    };
    let connecting = connect(&first.shared.runtime, &first.path.again, tls);
    match first.stop.run_until_cancelled(connecting).await {
        // Needs no draining token: it ends with the first link, after its data is sent.
        Some(Ok(Connected { link, path, .. })) => {
            let state = Arc::new(SessionState::additional(first.clone(), number, path));
            serve(state, link, CancellationToken::new()).await
        }
        Some(Err(end)) => end,
        None => SessionEnd::Stopping,
    }
}

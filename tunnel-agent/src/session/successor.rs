//! Notices a link that only looks alive, by a second connection that works, or by the address that it was made from.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tunnel_core::identity::{ALPN_TUNNEL, AgentIdentity, agent_tls};
use tunnel_core::link::Silence;

use super::connect::{Connected, connect};
use super::state::SessionState;

/// How often to look, at least.
const CHECK: Duration = Duration::from_millis(250);
/// The least that is waited for an answer.
const ANSWER: Duration = Duration::from_millis(250);
/// How long a link may be silent after something was sent on it twice.
const RESENT: Duration = Duration::from_secs(1);
/// How long links are checked more eagerly after this machine was resumed: it may have no network at first.
const EAGER: Duration = Duration::from_secs(30);
/// How long a second connection may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Waits until the session's link has not answered for a while, and another connection to the server works: a NAT has
/// forgotten the link. While the line is out neither works, and the link is kept: it goes on when the line is back. If this
/// node has lost the address that the link was made from, only a connection that works is waited for. After this machine was
/// suspended, what is sent at once has to be acknowledged: the server has given the link up long ago, or a NAT.
pub(super) async fn find(
    session: &SessionState,
    identity: &watch::Receiver<Arc<AgentIdentity>>,
) -> Connected {
    let mut pause = CHECK;
    let mut addresses = session.shared.addresses.clone();
    let mut resumed = session.shared.resumed.subscribe();
    let mut eager_until = Instant::now();
    let had = addresses.borrow_and_update().contains(&session.local);
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = addresses.changed() => {}
            Ok(()) = resumed.changed() => {
                session.report_load();
                eager_until = Instant::now() + EAGER;
                pause = answer(session);
                continue;
            }
        }
        pause = CHECK;
        if had && !addresses.borrow_and_update().contains(&session.local) {
            session.silent.store(true, Ordering::Relaxed);
            if let Some(connected) = another(session, identity).await {
                tracing::info!(server = %session.server, address = %session.local, "this node has lost the address of its link");
                return connected;
            }
            continue;
        }
        let answer = answer(session);
        let Some(silence) = session.flow.silence().await else {
            session.silent.store(false, Ordering::Relaxed);
            continue;
        };
        let limit = match silence.unacknowledged {
            Some(_) if Instant::now() < eager_until => answer,
            _ => patience(&silence, session.shared.keepalive, answer),
        };
        session.silent.store(silence.lasts >= limit, Ordering::Relaxed);
        if silence.lasts < limit {
            pause = CHECK.min(limit - silence.lasts);
            continue;
        }
        let mut start = Instant::now();
        if another(session, identity).await.is_none() {
            continue;
        }
        for last in [false, true] {
            // The line may just have come back, and the link with it. What is sent now is answered at once, but not before
            // what was lost has been sent again.
            session.report_load();
            let until = match silence.unacknowledged {
                // The second connection took no time: the line has been there since its start.
                Some(sent) if start.elapsed() < answer => start + sent.pause + answer,
                Some(sent) => Instant::now() + sent.pause + answer,
                None => Instant::now() + answer,
            };
            tokio::time::sleep_until(until).await;
            let silence = session.flow.silence().await;
            if silence.is_none_or(|silence| silence.lasts < limit) {
                break;
            }
            // It may have gone again since: then the link has to be waited for as before.
            start = Instant::now();
            let Some(connected) = another(session, identity).await else { break };
            if last || start.elapsed() < answer {
                return connected;
            }
        }
    }
}

/// Another connection to the session's server, if it works. The certificate and the roots are those of now: the session may
/// have lasted longer than those that it began with.
async fn another(
    session: &SessionState,
    identity: &watch::Receiver<Arc<AgentIdentity>>,
) -> Option<Connected> {
    let tls = agent_tls(&identity.borrow(), ALPN_TUNNEL).ok()?;
    let attempt = connect(&session.shared, &session.again, tls);
    tokio::time::timeout(ATTEMPT, attempt).await.ok()?.ok()
}

/// How long an answer may take.
fn answer(session: &SessionState) -> Duration {
    ANSWER.max(session.flow.rtt.last().unwrap_or_default() * 4)
}

/// How long the link may be silent. What was sent twice is a sign that comes before the kernel's question.
fn patience(silence: &Silence, keepalive: Duration, answer: Duration) -> Duration {
    let asked = keepalive + answer;
    match silence.unacknowledged {
        Some(sent) if sent.resent => asked.min(RESENT.max(answer)),
        _ => asked,
    }
}

#[cfg(test)]
mod tests {
    use tunnel_core::link::Unacknowledged;

    use super::*;

    #[test]
    fn a_link_may_be_silent_for_as_long_as_its_path_needs() {
        let ms = Duration::from_millis;
        let patience = |resent, answer| {
            let unacknowledged = Some(Unacknowledged { resent, pause: ms(400) });
            let silence = Silence { lasts: ms(500), unacknowledged };
            super::patience(&silence, ms(2000), answer)
        };
        assert_eq!(patience(false, ms(250)), ms(2250));
        assert_eq!(patience(true, ms(250)), RESENT);
        assert_eq!(patience(true, ms(8000)), ms(8000), "a slow path");
        let asked = Silence { lasts: ms(500), unacknowledged: None };
        assert_eq!(super::patience(&asked, ms(2000), ms(250)), ms(2250));
    }
}

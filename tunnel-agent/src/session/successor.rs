//! Detects a dead link that still looks alive, by a second connection that works or by a change of this node's address.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_link::link::Silence;
use tunnel_pki::{ALPN_TUNNEL, agent_tls};

use super::connect::{Connected, connect};
use super::state::SessionState;

/// Maximum interval of checks.
const CHECK: Duration = Duration::from_millis(250);
/// Minimum wait for an answer.
const ANSWER: Duration = Duration::from_millis(250);
/// Maximum silence of a link on which data was sent twice.
const RESENT: Duration = Duration::from_secs(1);
/// Time after a resume in which links are checked more eagerly. The machine may have no network at first.
const EAGER: Duration = Duration::from_secs(30);
/// Maximum time for a second connection.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Waits until the session's link has not answered for a while and another connection to the server works: a NAT has
/// forgotten the link. While the network is down neither works, and the link is kept: it goes on when the network is
/// back. If this node has lost the local address of the link, waits only for a connection that works. After this
/// machine was suspended, data is sent at once and has to be acknowledged: the server or a NAT may have given the link
/// up long ago.
pub(super) async fn find(session: &SessionState) -> Connected {
    let mut pause = CHECK;
    let mut addresses = session.shared.runtime.addresses.subscribe();
    let mut resumed = session.shared.resumed.subscribe();
    let mut eager_until = Instant::now();
    // Not if it was none of this node's from the beginning.
    let local = session.path.local.filter(|local| addresses.borrow_and_update().contains(local));
    let keepalive = session.shared.runtime.config.given.links.keepalive;
    let flow = &session.path.flow;
    // True while the server owes no answer. Only what is sent then, or the kernel's next probe, can go unanswered.
    let mut owes_nothing = false;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = flow.more_sent(), if owes_nothing => {
                owes_nothing = false;
                pause = CHECK;
                continue;
            }
            // The route may have changed too.
            Ok(()) = addresses.changed() => session.nudge(),
            Ok(()) = resumed.changed() => {
                session.nudge();
                owes_nothing = false;
                eager_until = Instant::now() + EAGER;
                pause = answer(session);
                continue;
            }
        }
        (pause, owes_nothing) = (CHECK, false);
        if let Some(address) = local.filter(|local| !addresses.borrow_and_update().contains(local)) {
            session.silent.store(true, Ordering::Relaxed);
            if let Some(connected) = another(session).await {
                tracing::info!(server = %session.server, %address, "link lost its address, replacing it");
                return connected;
            }
            continue;
        }
        let answer = answer(session);
        flow.await_sending();
        let silence = flow.silence().await;
        owes_nothing = silence.is_none();
        let Some(silence) = silence else {
            session.silent.store(false, Ordering::Relaxed);
            pause = CHECK.max((keepalive + answer).saturating_sub(flow.heard()));
            continue;
        };
        let limit = match silence.unacknowledged {
            Some(_) if Instant::now() < eager_until => answer,
            _ => patience(&silence, keepalive, answer),
        };
        session.silent.store(silence.lasts >= limit, Ordering::Relaxed);
        if silence.lasts < limit {
            pause = CHECK.min(limit - silence.lasts);
            continue;
        }
        let mut start = Instant::now();
        if another(session).await.is_none() {
            continue;
        }
        for last in [false, true] {
            // The network, and the link with it, may just have come back. Data sent now is answered at once, but only
            // after lost data has been retransmitted.
            session.nudge();
            let until = match silence.unacknowledged {
                // The second connection took no time: the network has been there since its start.
                Some(sent) if start.elapsed() < answer => start + sent.pause + answer,
                Some(sent) => Instant::now() + sent.pause + answer,
                None => Instant::now() + answer,
            };
            tokio::time::sleep_until(until).await;
            let silence = flow.silence().await;
            if silence.is_none_or(|silence| silence.lasts < limit) {
                break;
            }
            // The network may have gone again since. Then the link has to be waited for as before.
            start = Instant::now();
            let Some(connected) = another(session).await else { break };
            if last || start.elapsed() < answer {
                return connected;
            }
        }
    }
}

/// Opens another connection to the session's server, if that works. Uses the current certificate and roots: the session
/// may have outlasted those that it began with.
async fn another(session: &SessionState) -> Option<Connected> {
    let tls = agent_tls(&session.shared.identity.borrow(), ALPN_TUNNEL).ok()?;
    let attempt = connect(&session.shared.runtime, &session.path.again, tls);
    tokio::time::timeout(ATTEMPT, attempt).await.ok()?.ok()
}

/// Maximum time for an answer.
fn answer(session: &SessionState) -> Duration {
    ANSWER.max(session.path.flow.rtt.last().unwrap_or_default() * 4)
}

/// Maximum silence of the link. A retransmission is a sign that comes before the kernel's keepalive probe.
fn patience(silence: &Silence, keepalive: Duration, answer: Duration) -> Duration {
    let asked = keepalive + answer;
    match silence.unacknowledged {
        Some(sent) if sent.resent => asked.min(RESENT.max(answer)),
        _ => asked,
    }
}

#[cfg(test)]
mod tests {
    use tunnel_link::link::Unacknowledged;

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

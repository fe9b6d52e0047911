//! Takeover, side of the second agent: takes over from the first one.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, sleep};
use tunnel_runtime::lifecycle::ReadyGuard;
use tunnel_runtime::takeover;

use super::message::{Answer, Ask, Hello};
use super::successor::Succession;
use crate::session::LinkSet;

/// Time without a newly attached server after which missing ones are not waited for.
const QUIET: Duration = Duration::from_secs(3);
/// Interval of checks.
const CHECK: Duration = Duration::from_millis(20);
/// Maximum time for which this agent's renewals wait: a certificate that is refused meanwhile has to be replaced, or no
/// server ever attaches.
const HELD: Duration = Duration::from_secs(60);

/// The agent that runs on this node with the same state directory.
pub type Predecessor = takeover::Predecessor<Hello>;

/// Takes over from `before` once the servers have attached. Then keeps the connection open, by which `before` knows
/// that this agent lives. `renewals` keeps this one from renewing the certificate meanwhile.
pub async fn take_over(
    mut before: Predecessor,
    links: Arc<LinkSet>,
    succession: Arc<Succession>,
    pending: ReadyGuard,
    renewals: OwnedMutexGuard<()>,
) {
    let mut renewals = Some(renewals);
    let (started, pid) = (Instant::now(), before.pid());
    let ended = {
        let mut handing = std::pin::pin!(hand_over(&mut before, &links));
        match tokio::time::timeout(HELD, handing.as_mut()).await {
            Ok(ended) => ended,
            Err(_) => {
                drop(renewals.take());
                handing.await
            }
        }
    };
    match ended {
        Ok(servers) => {
            let took_ms = started.elapsed().as_millis();
            tracing::info!(pid, servers, took_ms, "took over from the agent before");
            before.refuse_rest();
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            tracing::warn!(pid, "no answer from the agent before, going on beside it");
        }
        Err(error) => tracing::warn!(pid, %error, "failed to take over from the agent before, going on"),
    }
    succession.runtime.handover.set_successor(false);
    drop(renewals);
    pending.ready();
    succession.open();
    before.ended().await;
}

/// Hands over, and returns the number of servers that this agent is attached to. While there is none, the previous
/// agent goes on.
async fn hand_over(before: &mut Predecessor, links: &LinkSet) -> io::Result<usize> {
    let wanted = before.own().attached.clone();
    let (mut told, mut since) = (BTreeSet::new(), Instant::now());
    loop {
        let attached = links.attached_at();
        if attached != told {
            let Answer::Done = before.ask(&Ask::Attached(attached.clone())).await?;
            (told, since) = (attached, Instant::now());
        }
        if is_enough(&wanted, &told, since.elapsed()) {
            break;
        }
        sleep(CHECK).await;
    }
    let Answer::Done = before.ask(&Ask::Finish).await?;
    Ok(told.len())
}

/// True if there is nothing more to wait for.
fn is_enough(wanted: &BTreeSet<String>, attached: &BTreeSet<String>, unchanged: Duration) -> bool {
    wanted.is_subset(attached) || (!attached.is_empty() && unchanged > QUIET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_before_is_needed_until_another_has_its_servers() {
        let set = |servers: &[&str]| servers.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        let (now, later) = (Duration::ZERO, QUIET * 100);
        assert!(is_enough(&set(&[]), &set(&[]), now), "it has none itself");
        assert!(!is_enough(&set(&["a:1"]), &set(&[]), later), "the line may be out, or this agent wrong");
        assert!(!is_enough(&set(&["a:1", "b:1"]), &set(&["a:1"]), now));
        assert!(is_enough(&set(&["a:1", "b:1"]), &set(&["a:1"]), later), "the other may be dead");
        assert!(is_enough(&set(&["a:1"]), &set(&["a:1", "b:1"]), now));
    }
}

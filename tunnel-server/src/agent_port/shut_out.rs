//! Ends the sessions of agents that are no longer permitted: their node was revoked, or has left the inventory, or their
//! certificate's root was retired.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tunnel_pki::TrustBundle;
use tunnel_runtime::NodeName;

use super::judged::SWEEP;
use super::link::LinkContext;
use crate::pki::{KnownNodes, Revocations};
use crate::session::{Session, grace};

pub(super) async fn run(context: &LinkContext) {
    let (mut standing, mut roots) = (context.standing.clone(), context.bundle.clone());
    // The node and the time of the end, by session.
    let mut ending: HashMap<u64, (NodeName, Instant)> = HashMap::new();
    let mut judged_by = None;
    let (mut sweep, mut renewed) = (Instant::now(), Duration::ZERO);
    loop {
        let (now, before) = (Instant::now(), std::mem::take(&mut ending));
        let (revoked, nodes) = standing.known();
        let known = (revoked, nodes, roots.borrow_and_update().clone());
        let concerned = match judged_by.as_ref().filter(|_| now < sweep).and_then(|by| changed(by, &known)) {
            Some(mut nodes) => {
                nodes.extend(before.values().map(|(node, _)| node.clone()));
                nodes.iter().flat_map(|node| context.sessions.linked_of(node)).collect::<Vec<Arc<Session>>>()
            }
            // Not only those of changed nodes: one may have started just then, and certificates expire.
            None => {
                sweep = now + SWEEP;
                context.sessions.linked()
            }
        };
        judged_by = Some(known);
        let at_present = grace(context.sessions.count(), context.drain_timeout);
        // Those that wait to be told keep the time that they were given.
        renewed = if before.is_empty() { at_present } else { renewed.max(at_present) };
        for session in concerned {
            let judged = context.judge_agent(&session.node, &session.credential.load());
            let Err(refusal) = judged else { continue };
            let earlier = before.get(&session.id).map(|(_, end)| *end);
            let end = refusal.ends(earlier, now, renewed);
            if end <= now {
                session.refuse(refusal);
                continue;
            }
            if refusal.wants_new_link() {
                session.links.use_up();
            }
            ending.insert(session.id, (session.node.clone(), end));
        }
        let next = ending.values().map(|(_, end)| *end).min().unwrap_or(sweep).min(sweep);
        tokio::select! {
            () = standing.changed() => {}
            Ok(()) = roots.changed() => {}
            () = sleep_until(next) => {}
        }
    }
}

type Known = (Arc<Revocations>, Option<Arc<KnownNodes>>, Arc<TrustBundle>);

/// The nodes whose judgement may have changed; None if all may have.
fn changed(
    (revoked, nodes, roots): &Known,
    (revoked_now, nodes_now, roots_now): &Known,
) -> Option<HashSet<NodeName>> {
    if !Arc::ptr_eq(revoked, revoked_now) || !Arc::ptr_eq(roots, roots_now) {
        return None;
    }
    match (nodes, nodes_now) {
        (None, None) => Some(HashSet::new()),
        (Some(nodes), Some(nodes_now)) => Some(nodes_now.changed_since(nodes).into_iter().collect()),
        _ => None,
    }
}

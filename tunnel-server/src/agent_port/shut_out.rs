//! Ends the sessions of agents that are no longer permitted: their node was revoked, or has left the inventory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tunnel_pki::Holder;
use tunnel_runtime::NodeName;

use super::link::LinkContext;
use crate::pki::{KnownNodes, Revocations};
use crate::session::Session;

/// Time that a node may be missing: an inventory file may be replaced in two steps, and a Node created again at once.
const GRACE: Duration = Duration::from_secs(5);
/// Interval at which all sessions are judged, not only those of changed nodes: one may have started just then.
const SWEEP: Duration = Duration::from_secs(300);

pub(super) async fn run(context: &LinkContext) {
    let mut standing = context.standing.clone();
    // The node and the end of its grace period, by session.
    let mut missing: HashMap<u64, (NodeName, Instant)> = HashMap::new();
    let mut judged_by = None;
    let mut sweep = Instant::now();
    loop {
        let (now, before) = (Instant::now(), std::mem::take(&mut missing));
        let known = standing.known();
        let concerned = match judged_by.as_ref().filter(|_| now < sweep).and_then(|by| changed(by, &known)) {
            Some(mut nodes) => {
                nodes.extend(before.values().map(|(node, _)| node.clone()));
                nodes.iter().flat_map(|node| context.sessions.linked_of(node)).collect::<Vec<Arc<Session>>>()
            }
            None => {
                sweep = now + SWEEP;
                context.sessions.linked()
            }
        };
        judged_by = Some(known);
        for session in concerned {
            let Err(refusal) = standing.judge((Holder::Agent, &session.node), session.issued) else {
                continue;
            };
            let over = before.get(&session.id).map_or(now + GRACE, |(_, over)| *over);
            if refusal.may_pass() && now < over {
                missing.insert(session.id, (session.node.clone(), over));
            } else {
                session.refuse(refusal);
            }
        }
        let next = missing.values().map(|(_, over)| *over).min().unwrap_or(sweep).min(sweep);
        tokio::select! {
            () = standing.changed() => {}
            () = sleep_until(next) => {}
        }
    }
}

type Known = (Arc<Revocations>, Option<Arc<KnownNodes>>);

/// The nodes whose judgement may have changed; None if all may have.
fn changed((revoked, nodes): &Known, (revoked_now, nodes_now): &Known) -> Option<HashSet<NodeName>> {
    if !Arc::ptr_eq(revoked, revoked_now) {
        return None;
    }
    match (nodes, nodes_now) {
        (None, None) => Some(HashSet::new()),
        (Some(nodes), Some(nodes_now)) => Some(nodes_now.changed_since(nodes).into_iter().collect()),
        _ => None,
    }
}

//! Ends the sessions of agents that may have none any more: their node was revoked, or has left the inventory.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::link::LinkContext;

/// How long a node may be missing: an inventory file may be replaced in two steps, and a Node created again at once.
const GRACE: Duration = Duration::from_secs(5);

pub(super) async fn run(context: &LinkContext) {
    let mut standing = context.standing.clone();
    // By session, when its grace is over.
    let mut missing: HashMap<u64, Instant> = HashMap::new();
    loop {
        let (now, before) = (Instant::now(), std::mem::take(&mut missing));
        for session in context.sessions.linked() {
            let Err(refusal) = standing.judge(&session.node, session.issued) else { continue };
            let over = before.get(&session.id).copied().unwrap_or(now + GRACE);
            if refusal.may_pass() && now < over {
                missing.insert(session.id, over);
            } else {
                session.refuse(refusal);
            }
        }
        let next = missing.values().min().copied();
        tokio::select! {
            () = standing.changed() => {}
            () = sleep_until(next.unwrap_or(now)), if next.is_some() => {}
        }
    }
}

//! Tunnels, for the Events and the condition of Nodes: a node has a tunnel while any server has its session.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_runtime::NodeName;

use super::condition;
use super::events::{self, Events};
use super::tracker::{Change, Tracker};
use crate::kube::context::KubeContext;

/// An agent that is replaced by another one within this time was not away.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Nodes with tunnels, and a signal for their changes.
pub struct Tunnels<F> {
    pub changed: watch::Receiver<u64>,
    pub nodes: F,
}

/// Reports the tunnels of this server and of others while this one leads, until stopped: as Events and, if `condition`, as
/// condition. `elsewhere` has a second set, of nodes that were last at a server which is out of reach.
pub async fn run(
    context: KubeContext,
    events: Events,
    own: Tunnels<impl Fn() -> BTreeSet<NodeName> + Send>,
    elsewhere: Tunnels<impl Fn() -> (BTreeSet<NodeName>, BTreeSet<NodeName>) + Send>,
    condition: bool,
) {
    let tracker = Arc::new(Mutex::new(Tracker::new(Instant::now())));
    let (changed, changes) = watch::channel(());
    let track = track(&context, events, own, elsewhere, &tracker, changed);
    let conditions = async {
        if condition {
            condition::run(context.clone(), tracker.clone(), changes).await;
        }
    };
    let all = async { tokio::join!(track, conditions) };
    let _ = context.stop.run_until_cancelled(all).await;
}

/// Feeds the tracker, and publishes the changes that take effect as Events.
async fn track(
    context: &KubeContext,
    events: Events,
    mut own: Tunnels<impl Fn() -> BTreeSet<NodeName>>,
    mut elsewhere: Tunnels<impl Fn() -> (BTreeSet<NodeName>, BTreeSet<NodeName>)>,
    tracker: &Mutex<Tracker>,
    changed: watch::Sender<()>,
) {
    let (mut leader, mut inventory) = (context.leader.clone(), context.inventory.clone());
    let mut known = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
    loop {
        let (of_here, (of_others, of_lost)) = ((own.nodes)(), (elsewhere.nodes)());
        let before = std::mem::replace(&mut known, [of_here, of_others, of_lost]);
        let [here, there, lost] = &known;
        let (due, next) = {
            let mut tracker = tracker.lock();
            let now = Instant::now();
            tracker.set_leading(*leader.borrow_and_update());
            for node in
                known.iter().zip(&before).flat_map(|(nodes, before)| nodes.symmetric_difference(before))
            {
                let live = here.contains(node) || there.contains(node);
                tracker.observe(now, node, live, lost.contains(node));
            }
            if inventory.has_changed().unwrap_or(false) {
                tracker.expect(now, &inventory.borrow_and_update());
            }
            (tracker.take(now, |node| there.contains(node)), tracker.next())
        };
        if !due.is_empty() {
            changed.send_replace(());
        }
        for Change { node, up, .. } in due.into_iter().filter(|change| change.is_news) {
            let (kind, reason, note) = if up {
                (EventType::Normal, "TunnelUp", "connected: the agent has a tunnel")
            } else {
                (EventType::Warning, "TunnelDown", "away: the agent has a tunnel to no server any more")
            };
            events.publish(events::node(node.as_str()), kind, reason, note.to_owned());
        }
        tokio::select! {
            changed = own.changed.changed() => if changed.is_err() { return },
            changed = elsewhere.changed.changed() => if changed.is_err() { return },
            Ok(()) = leader.changed() => continue,
            // Read above.
            Ok(()) = inventory.changed() => inventory.mark_changed(),
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => continue,
        }
        tokio::time::sleep(DEBOUNCE).await;
    }
}

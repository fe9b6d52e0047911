//! Tunnels, for the Events and the condition of their Nodes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tunnel_core::identity::NodeName;

use super::events::Events;
use super::{condition, tunnel_events};
use crate::kube::context::KubeContext;
use crate::peers::Peers;
use crate::session::Sessions;
use crate::shared_map::SharedSet;

/// An agent that is replaced by another one within this time has not been away.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Reports the tunnels of all servers while this one leads, until the stop: as Events and, with `condition`, as the condition.
pub async fn run(
    context: KubeContext,
    events: Events,
    sessions: Arc<Sessions>,
    peers: Arc<Peers>,
    condition: bool,
) {
    let own = Tunnels { changed: sessions.changed(), nodes: move || sessions.live() };
    let elsewhere = Tunnels { changed: peers.changed(), nodes: move || peers.nodes() };
    follow(context, events, own, elsewhere, condition).await;
}

/// Nodes with tunnels, and when they change.
pub struct Tunnels<F> {
    pub changed: watch::Receiver<u64>,
    pub nodes: F,
}

/// [`run`] with these tunnels: this server's own, and those to other servers.
pub async fn follow(
    context: KubeContext,
    events: Events,
    mut own: Tunnels<impl Fn() -> SharedSet<NodeName> + Send>,
    mut elsewhere: Tunnels<impl Fn() -> SharedSet<NodeName> + Send>,
    condition: bool,
) {
    let (elsewhere_now, there) = watch::channel(SharedSet::default());
    let (all_now, anywhere) = watch::channel(SharedSet::default());
    let update = async {
        let mut fleet = Fleet::default();
        loop {
            fleet.follow((own.nodes)(), (elsewhere.nodes)());
            elsewhere_now.send_replace(fleet.elsewhere.clone());
            all_now.send_replace(fleet.anywhere.clone());
            let changed = tokio::select! {
                changed = own.changed.changed() => changed,
                changed = elsewhere.changed.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    let (stop, leader) = (context.stop.clone(), context.leader.clone());
    let reports = tunnel_events::run(leader, events, anywhere.clone(), there);
    let conditions = async {
        if condition {
            condition::run(context, anywhere).await;
        }
    };
    let all = async { tokio::join!(update, reports, conditions) };
    let _ = stop.run_until_cancelled(all).await;
}

/// Nodes with a tunnel.
#[derive(Default)]
struct Fleet {
    here: SharedSet<NodeName>,
    elsewhere: SharedSet<NodeName>,
    anywhere: SharedSet<NodeName>,
}

impl Fleet {
    /// At the cost of what has changed.
    fn follow(&mut self, here: SharedSet<NodeName>, elsewhere: SharedSet<NodeName>) {
        let changed =
            here.changes_since(&self.here).into_iter().chain(elsewhere.changes_since(&self.elsewhere));
        for (node, _) in changed {
            if here.contains(node) || elsewhere.contains(node) {
                self.anywhere.insert(node.clone());
            } else {
                self.anywhere.remove(node);
            }
        }
        (self.here, self.elsewhere) = (here, elsewhere);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_somewhere_while_any_server_has_it() {
        let set =
            |nodes: &[&str]| nodes.iter().map(|node| node.parse().unwrap()).collect::<SharedSet<NodeName>>();
        let mut fleet = Fleet::default();
        for (here, elsewhere, anywhere) in [
            (&["a", "b"][..], &["b", "c"][..], &["a", "b", "c"][..]),
            (&["b"], &["c"], &["b", "c"]),
            (&[], &["b", "c"], &["b", "c"]),
            (&["c"], &[], &["c"]),
            (&[], &[], &[]),
        ] {
            fleet.follow(set(here), set(elsewhere));
            assert_eq!(fleet.anywhere, set(anywhere), "{here:?} {elsewhere:?}");
        }
    }
}

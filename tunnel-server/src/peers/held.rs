//! The nodes of the other servers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::watch;
use tunnel_routing::{Holder, Router};
use tunnel_runtime::NodeName;

use super::peer::Peer;

/// The other servers and their nodes.
pub struct Peers {
    up: RwLock<Vec<Arc<Peer>>>,
    held: RwLock<HashMap<NodeName, Vec<Arc<Peer>>>>,
    router: Arc<Router>,
    changed: watch::Sender<u64>,
}

impl Peers {
    /// Creates an empty list. Updates `router` with the nodes of the other servers.
    pub fn new(router: Arc<Router>) -> Self {
        Self { up: RwLock::default(), held: RwLock::default(), router, changed: watch::Sender::new(0) }
    }

    /// Servers that have the node, the best one first. Draining ones come after the others. One that has not answered
    /// comes last: asking it again would delay each connection by the time limit for its answer.
    pub fn holders(&self, node: &NodeName) -> Vec<Arc<Peer>> {
        let held = self.held.read();
        let mut holders = held.get(node).cloned().unwrap_or_default();
        drop(held);
        // Cached, because the connection counts change meanwhile.
        holders.sort_by_cached_key(|peer| (peer.is_silent(), peer.is_draining(), peer.connections()));
        holders
    }

    /// The nodes that any other server has.
    pub fn nodes(&self) -> BTreeSet<NodeName> {
        self.held.read().keys().cloned().collect()
    }

    /// Incremented when a node appears at its first other server, or vanishes from its last. A receiver may see several
    /// changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Must be called under the lock, so that the router sees changes in the same order.
    fn moved(&self, node: &NodeName, held: bool) {
        if held {
            self.router.set_live(node, Holder::Peers, true);
        } else {
            self.router.lose(node, Holder::Peers);
        }
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// The servers that this one is connected to.
    pub fn all(&self) -> Vec<Arc<Peer>> {
        self.up.read().clone()
    }

    pub(super) fn join(&self, peer: &Arc<Peer>) {
        self.up.write().push(peer.clone());
    }

    /// Removes a server and its nodes.
    pub(super) fn part(&self, peer: &Arc<Peer>) {
        self.up.write().retain(|other| !Arc::ptr_eq(other, peer));
        let nodes = std::mem::take(&mut *peer.nodes());
        for node in nodes {
            self.remove(peer, &node);
        }
    }

    pub(super) fn gained(&self, peer: &Arc<Peer>, node: &NodeName) {
        if !peer.nodes().insert(node.clone()) {
            return;
        }
        let mut held = self.held.write();
        let holders = held.entry(node.clone()).or_default();
        holders.push(peer.clone());
        if holders.len() == 1 {
            self.moved(node, true);
        }
    }

    pub(super) fn lost(&self, peer: &Arc<Peer>, node: &NodeName) {
        if peer.nodes().remove(node) {
            self.remove(peer, node);
        }
    }

    /// Removes all nodes of `peer` except these.
    pub(super) fn only(&self, peer: &Arc<Peer>, nodes: &HashSet<NodeName>) {
        let gone: Vec<_> = peer.nodes().difference(nodes).cloned().collect();
        for node in gone {
            self.lost(peer, &node);
        }
    }

    fn remove(&self, peer: &Arc<Peer>, node: &NodeName) {
        let mut held = self.held.write();
        let Some(holders) = held.get_mut(node) else { return };
        holders.retain(|other| !Arc::ptr_eq(other, peer));
        if holders.is_empty() {
            held.remove(node);
            self.moved(node, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::session::test_link;

    async fn peer(server_id: &str) -> Arc<Peer> {
        let told_by = (server_id.to_owned(), "1.0.0".to_owned(), "10.70.0.2:10262".to_owned());
        let (closed, draining) = (CancellationToken::new(), CancellationToken::new());
        Arc::new(Peer::new(told_by, test_link(0, Duration::from_millis(1)).await, closed, draining))
    }

    #[tokio::test]
    async fn who_did_not_answer_is_asked_last() {
        let peers = Peers::new(crate::runtime::without_nodes(&mut Registry::default()));
        let node: NodeName = "edge-1".parse().unwrap();
        let (leaving, busy, idle) = (peer("leaving").await, peer("busy").await, peer("idle").await);
        for peer in [&leaving, &busy, &idle] {
            peers.gained(peer, &node);
        }
        leaving.draining.cancel();
        let _relayed = busy.links.take();
        let order = || peers.holders(&node).iter().map(|peer| peer.server_id.clone()).collect::<Vec<_>>();
        assert_eq!(order(), ["idle", "busy", "leaving"]);
        idle.links.take().note_unanswered();
        assert_eq!(order(), ["busy", "leaving", "idle"]);
    }
}

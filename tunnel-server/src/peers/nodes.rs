//! The nodes of the other servers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_routing::{Router, TunnelHolder};
use tunnel_runtime::NodeName;
use tunnel_runtime::admin;
use tunnel_runtime::config::HostPort;

use super::peer::Peer;
use crate::pki::{Refusal, Standing};

/// Time in which a server that was removed may be back: its pod was deleted, and another one is made.
const RETURNS: Duration = Duration::from_secs(300);

/// The other servers and their nodes.
pub struct Peers {
    up: RwLock<Vec<Arc<Peer>>>,
    nodes: RwLock<HashMap<NodeName, RemoteNode>>,
    /// The addresses to link with, each with the ID of the server that was found there last. Some may be this server's own.
    wanted: RwLock<HashMap<String, Option<String>>>,
    /// Addresses that were removed, each with the same ID and the time of the removal: the server may be back soon.
    removed: RwLock<HashMap<String, (Option<String>, Instant)>>,
    /// Not set: no node is revoked.
    standing: OnceLock<Standing>,
    /// The status that the other servers may ask for. Weak, as it reads this.
    status: OnceLock<Weak<admin::Status>>,
    router: Arc<Router>,
    changed: watch::Sender<u64>,
}

/// A node at other servers.
#[derive(Default)]
struct RemoteNode {
    peers: Vec<Arc<Peer>>,
    /// True if it is reached through them: it is not revoked.
    offered: bool,
    /// The address of the server that had it last, if the link with that was lost: the node may still be there.
    lost_at: Option<String>,
}

impl Peers {
    /// Creates an empty list. Updates `router` with the nodes of the other servers.
    pub fn new(router: Arc<Router>) -> Self {
        Self {
            up: RwLock::default(),
            nodes: RwLock::default(),
            wanted: RwLock::default(),
            removed: RwLock::default(),
            standing: OnceLock::new(),
            status: OnceLock::new(),
            router,
            changed: watch::Sender::new(0),
        }
    }

    /// Sets the status that the other servers may ask for; only once.
    pub fn tell(&self, status: &Arc<admin::Status>) {
        let _ = self.status.set(Arc::downgrade(status));
    }

    /// This server's own status; None without an admin port.
    pub(crate) fn own_status(&self) -> Option<Arc<admin::Status>> {
        self.status.get().and_then(Weak::upgrade)
    }

    /// Offers no route to revoked nodes, and forwards nothing to them, whatever the other servers say that they have. Call it
    /// before the first link. The future follows the revocations until the stop.
    pub fn keep_out(
        self: Arc<Self>,
        standing: Standing,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> {
        // Not each change of the inventory: this goes through all nodes under a lock that connections take too.
        let mut revocations = standing.revocations();
        // Set once.
        let _ = self.standing.set(standing);
        async move {
            while let Some(Ok(())) = stop.run_until_cancelled(revocations.changed()).await {
                let mut nodes = self.nodes.write();
                for (node, remote) in &mut *nodes {
                    self.offer(node, remote);
                }
            }
        }
    }

    /// The reason why nothing is forwarded to the node, if it is revoked.
    pub fn refusal(&self, node: &NodeName) -> Option<Refusal> {
        self.standing.get().and_then(|standing| standing.not_revoked(node).err())
    }

    /// Servers that have the node, the best one first. Draining ones come after the others. One that has not answered
    /// comes last: asking it again would delay each connection by the time limit for its answer. None if the node is revoked.
    pub fn holders(&self, node: &NodeName) -> Vec<Arc<Peer>> {
        let all = self.nodes.read();
        let remote = all.get(node).filter(|_| self.refusal(node).is_none());
        let mut holders = remote.map(|remote| remote.peers.clone()).unwrap_or_default();
        drop(all);
        // Cached, because the connection counts change meanwhile.
        holders.sort_by_cached_key(|peer| {
            (peer.links.are_silent(), peer.is_draining(), peer.links.connections())
        });
        holders
    }

    /// The nodes that are reached through another server, and those that were last at a server which is not linked, but should
    /// be: they may still be there.
    pub fn nodes(&self) -> (BTreeSet<NodeName>, BTreeSet<NodeName>) {
        let all = self.nodes.read();
        let names = |those: fn(&RemoteNode) -> bool| -> BTreeSet<NodeName> {
            all.iter().filter(|(_, remote)| those(remote)).map(|(node, _)| node.clone()).collect()
        };
        (names(|remote| remote.offered), names(|remote| remote.lost_at.is_some()))
    }

    /// Incremented when a node appears at its first other server, or vanishes from its last, and when it is known to be no
    /// longer at one that was lost. A receiver may see several changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Must be called under the lock, so that the router sees changes in the same order.
    fn offer(&self, node: &NodeName, remote: &mut RemoteNode) {
        let revoked = self.refusal(node).is_some();
        let offered = !remote.peers.is_empty() && !revoked;
        match (std::mem::replace(&mut remote.offered, offered), offered) {
            (true, false) if !revoked => self.router.lose(node, TunnelHolder::Peers),
            (before, now) if before == now => return,
            _ => self.router.set_live(node, TunnelHolder::Peers, offered),
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

    /// Sets the addresses to link with. A server that was lost at another one is gone.
    pub(super) fn want(&self, addresses: &BTreeSet<HostPort>) {
        let (mut wanted, mut removed) = (self.wanted.write(), self.removed.write());
        removed.retain(|_, (_, since)| since.elapsed() < RETURNS);
        let mut before = std::mem::take(&mut *wanted);
        wanted.extend(addresses.iter().map(ToString::to_string).map(|address| {
            let returned = removed.remove(&address).and_then(|(found, _)| found);
            let found = before.remove(&address).flatten().or(returned);
            (address, found)
        }));
        removed.extend(before.into_iter().map(|(address, found)| (address, (found, Instant::now()))));
        drop(removed);
        self.forget_lost(|address| !wanted.contains_key(address));
    }

    /// Keeps the ID of the server at an address.
    pub(super) fn found(&self, address: &str, server_id: &str) {
        if let Some(found) = self.wanted.write().get_mut(address) {
            *found = Some(server_id.to_owned());
        }
    }

    /// Number of servers: this one, those that are down, and those that were removed a moment ago. One with several addresses counts
    /// for each that was not reached yet.
    pub fn servers(&self, own_id: &str) -> usize {
        let (wanted, removed) = (self.wanted.read(), self.removed.read());
        let recent = removed.values().filter(|(_, since)| since.elapsed() < RETURNS).map(|(found, _)| found);
        let all: Vec<_> = wanted.values().chain(recent).map(Option::as_deref).collect();
        let found: HashSet<_> = all.iter().flatten().copied().chain([own_id]).collect();
        found.len() + all.iter().filter(|found| found.is_none()).count()
    }

    /// Removes a server and its nodes.
    pub(super) fn part(&self, peer: &Arc<Peer>) {
        let mut up = self.up.write();
        up.retain(|other| !Arc::ptr_eq(other, peer));
        let same = |other: &Arc<Peer>| other.address == peer.address || other.server_id == peer.server_id;
        let linked = up.iter().any(|other| same(other) && !other.is_draining());
        drop(up);
        // Held until all are removed: the address may be removed meanwhile.
        let wanted = self.wanted.read();
        let lost_at = Some(peer.address.as_str()).filter(|address| !linked && wanted.contains_key(*address));
        let nodes = std::mem::take(&mut *peer.nodes());
        for node in nodes {
            self.remove(peer, &node, lost_at);
        }
    }

    /// Forgets the nodes that were lost at such addresses.
    fn forget_lost(&self, gone: impl Fn(&str) -> bool) {
        let mut all = self.nodes.write();
        let before = all.len();
        all.retain(|_, remote| remote.lost_at.as_deref().is_none_or(|address| !gone(address)));
        if all.len() < before {
            self.changed.send_modify(|changes| *changes += 1);
        }
    }

    pub(crate) fn gained(&self, peer: &Arc<Peer>, node: &NodeName) {
        if !peer.nodes().insert(node.clone()) {
            return;
        }
        let mut all = self.nodes.write();
        let remote = all.entry(node.clone()).or_default();
        remote.peers.push(peer.clone());
        remote.lost_at = None;
        match remote.offered {
            // The others may not have noticed yet that they lost its agent, which is awaited here.
            true => self.router.set_live(node, TunnelHolder::Peers, true),
            false => self.offer(node, remote),
        }
    }

    pub(super) fn lost(&self, peer: &Arc<Peer>, node: &NodeName) {
        if peer.nodes().remove(node) {
            self.remove(peer, node, None);
        }
    }

    /// Removes all nodes of `peer` except these: it has named all that it has.
    pub(super) fn only(&self, peer: &Arc<Peer>, nodes: &HashSet<NodeName>) {
        let gone: Vec<_> = peer.nodes().difference(nodes).cloned().collect();
        for node in gone {
            self.lost(peer, &node);
        }
        self.forget_lost(|address| address == peer.address);
    }

    /// `lost_at`: the link with the server at this address was lost.
    fn remove(&self, peer: &Arc<Peer>, node: &NodeName, lost_at: Option<&str>) {
        let mut all = self.nodes.write();
        let Some(remote) = all.get_mut(node) else { return };
        remote.peers.retain(|other| !Arc::ptr_eq(other, peer));
        self.offer(node, remote);
        if remote.peers.is_empty() {
            remote.lost_at = lost_at.map(str::to_owned);
            if lost_at.is_none() {
                all.remove(node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::pki::{Revocation, Revocations};
    use crate::session::test_link;

    async fn peer(server_id: &str) -> Arc<Peer> {
        let told_by = (server_id.to_owned(), "1.0.0".to_owned(), "10.70.0.2:10262".to_owned());
        let (closed, draining) = (CancellationToken::new(), CancellationToken::new());
        Arc::new(Peer::new(told_by, test_link(0, Duration::from_millis(1)).await, closed, draining))
    }

    #[tokio::test(start_paused = true)]
    async fn each_server_is_counted_once_also_this_one() {
        let peers = Peers::new(crate::runtime::without_nodes(&mut Registry::default()));
        let addresses = |list: &[&str]| list.iter().map(|address| address.parse().unwrap()).collect();
        assert_eq!(peers.servers("own"), 1);
        peers.want(&addresses(&["10.0.0.1:1", "10.0.0.2:1", "[fd00::2]:1"]));
        assert_eq!(peers.servers("own"), 4, "none was reached yet");
        peers.found("10.0.0.1:1", "own");
        assert_eq!(peers.servers("own"), 3);
        for address in ["10.0.0.2:1", "[fd00::2]:1", "10.0.0.9:1"] {
            peers.found(address, "other");
        }
        assert_eq!(peers.servers("own"), 2);
        peers.want(&addresses(&["10.0.0.1:1", "10.0.0.2:1"]));
        assert_eq!(peers.servers("own"), 2);
        // Its pod is deleted, and made again.
        peers.want(&addresses(&["10.0.0.1:1"]));
        assert_eq!(peers.servers("own"), 2);
        tokio::time::advance(RETURNS).await;
        assert_eq!(peers.servers("own"), 1);
        peers.want(&addresses(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]));
        assert_eq!(peers.servers("own"), 3);
    }

    #[tokio::test]
    async fn nothing_is_forwarded_to_a_revoked_node_whatever_another_server_has() {
        let (node, other): (NodeName, NodeName) = ("edge-1".parse().unwrap(), "edge-2".parse().unwrap());
        let peers = Arc::new(Peers::new(crate::runtime::without_nodes(&mut Registry::default())));
        let revocations = watch::Sender::<Arc<Revocations>>::default();
        let (nodes, known) = watch::channel(None);
        let standing = Standing::new(revocations.subscribe(), known, true);
        let stop = CancellationToken::new();
        let following = tokio::spawn(peers.clone().keep_out(standing, stop.clone()));
        let publish = |record: &Revocation| {
            let records = [(record.subject.clone(), record.clone())].into();
            revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
        };
        let (peer, now) = (peer("server-b").await, jiff::Timestamp::now());
        peers.gained(&peer, &node);
        peers.gained(&peer, &other);
        assert_eq!(peers.holders(&node).len(), 1);
        let revoked = Revocation::revoke(None, &node, now);
        let mut changed = peers.changed();
        changed.mark_unchanged();
        publish(&revoked);
        // Connections at once, and the route as soon as the change is noticed.
        assert!(peers.holders(&node).is_empty());
        assert!(peers.refusal(&node).unwrap().to_string().contains("agent readmit edge-1"));
        changed.changed().await.unwrap();
        assert_eq!(peers.nodes().0, [other.clone()].into());
        assert!(peers.router.awaited(&node).is_none(), "no connection waits for it");
        // Nor if the other server says it again.
        peers.lost(&peer, &node);
        peers.gained(&peer, &node);
        assert_eq!((peers.nodes().0, peers.holders(&other).len()), ([other.clone()].into(), 1));
        changed.mark_unchanged();
        publish(&revoked.readmit(now).unwrap());
        changed.changed().await.unwrap();
        assert_eq!((peers.nodes().0, peers.holders(&node).len()), ([node, other.clone()].into(), 1));
        // A change of the inventory judges no node.
        peers.nodes.write().get_mut(&other).unwrap().offered = false;
        nodes.send_replace(Some(Arc::default()));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(!peers.nodes.read()[&other].offered);
        stop.cancel();
        following.await.unwrap();
    }

    #[tokio::test]
    async fn the_nodes_of_a_lost_server_may_still_be_there_until_it_is_linked_again_or_gone() {
        let peers = Peers::new(crate::runtime::without_nodes(&mut Registry::default()));
        let (one, two): (NodeName, NodeName) = ("edge-1".parse().unwrap(), "edge-2".parse().unwrap());
        let linked = async |nodes: &[&NodeName]| {
            let peer = peer("server-b").await;
            peers.join(&peer);
            for node in nodes {
                peers.gained(&peer, node);
            }
            peer
        };
        let known = || {
            let (nodes, lost) = peers.nodes();
            [nodes, lost].map(|nodes| nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        // An address that was removed.
        peers.part(&linked(&[&one]).await);
        assert_eq!(known(), ["", ""]);
        peers.want(&BTreeSet::from(["10.70.0.2:10262".parse().unwrap()]));
        peers.part(&linked(&[&one, &two]).await);
        assert_eq!(known(), ["", "edge-1 edge-2"]);
        assert!(peers.holders(&one).is_empty());
        let again = linked(&[&one]).await;
        assert_eq!(known(), ["edge-1", "edge-2"]);
        let mut changed = peers.changed();
        changed.mark_unchanged();
        peers.only(&again, &HashSet::from([one.clone()]));
        assert_eq!(known(), ["edge-1", ""]);
        assert!(changed.has_changed().unwrap());
        // There is another link with the server, which has told that the node is gone.
        let next = linked(&[]).await;
        peers.part(&again);
        assert_eq!(known(), ["", ""]);
        // A link that is used up is no such.
        let used_up = linked(&[&two]).await;
        used_up.draining.cancel();
        peers.gained(&next, &one);
        peers.lost(&used_up, &two);
        peers.part(&next);
        assert_eq!(known(), ["", "edge-1"]);
        changed.mark_unchanged();
        peers.want(&BTreeSet::new());
        assert_eq!(known(), ["", ""]);
        assert!(changed.has_changed().unwrap());
    }

    #[tokio::test]
    async fn an_agent_is_awaited_until_another_server_gets_it() {
        let peers = Peers::new(crate::runtime::without_nodes(&mut Registry::default()));
        let node: NodeName = "edge-1".parse().unwrap();
        // This one has not noticed that the agent is gone.
        peers.gained(&peer("server-b").await, &node);
        peers.router.set_live(&node, TunnelHolder::This, true);
        peers.router.lose(&node, TunnelHolder::This);
        let awaited = peers.router.awaited(&node).unwrap();
        peers.gained(&peer("server-c").await, &node);
        assert!(awaited.is_cancelled());
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

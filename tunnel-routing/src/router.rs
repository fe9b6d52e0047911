//! Updates the routes when nodes, tunnels, ports or this host's addresses change.
//!
//! A change of the nodes recomputes everything; a session that starts or ends only changes which routes are up. Readers
//! take a [`Snapshot`] without a lock. The redirect takes [`Router::desired`] whenever [`Router::changed`] reports a
//! change; changes in between are coalesced.

#[cfg(test)]
mod change_tests;
#[cfg(test)]
mod claims_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;

use super::awaited::Awaited;
use super::claims::{Claims, StoredClaims};
use super::config::RouterConfig;
use super::desired::{Desired, Table};
pub use super::held::TunnelHolder;
use super::held::{Counted, Counts, Held};
use super::own_ports::OwnPorts;
use super::planner::{Planned, Planner};
use super::snapshot::{NodeAddress, Snapshot};
use crate::inventory::Inventory;

/// Maximum number of nodes looked up under one lock, so that a session that starts or ends is not blocked for longer.
const CHUNK: usize = 512;

/// The current routes.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    snapshot: ArcSwap<Snapshot>,
    /// This host's addresses.
    host: ArcSwap<HashSet<IpAddr>>,
    ports: ArcSwap<Ports>,
    /// Locked only briefly, as session threads wait for it. Every change is computed before it is stored, so a panic
    /// leaves no partial update.
    state: Mutex<RouterState>,
    /// Locked during a whole computation, so that an older inventory never replaces a newer one. The computation after
    /// a panic starts from its own inventory.
    planner: Mutex<Planner>,
    version: watch::Sender<u64>,
    due: watch::Sender<Option<Instant>>,
    gives_up: watch::Sender<Option<Instant>>,
    claims: watch::Sender<u64>,
    pub own_ports: OwnPorts,
}

/// Port sets that the listeners look up.
#[derive(Debug)]
struct Ports {
    tunnelled: BTreeSet<u16>,
    /// Ports that the agent dials on its node's loopback.
    loopback: BTreeSet<u16>,
}

#[derive(Debug)]
struct RouterState {
    /// Nodes with a tunnel, and those whose agents are awaited.
    live: HashMap<NodeName, Held>,
    awaited: Awaited,
    desired: Desired,
    counts: Counts,
    /// Nodes whose session started or ended while a new plan's nodes are looked up.
    flipped: Option<HashSet<NodeName>>,
}

impl Router {
    /// Creates a router without nodes. Metrics go into `registry`, which has the prefix `postern`.
    pub fn new(config: RouterConfig, registry: &mut Registry) -> Self {
        let desired = Desired { ports: config.ports.clone(), ..Desired::default() };
        let state = RouterState {
            live: HashMap::new(),
            awaited: Awaited::default(),
            desired,
            counts: Counts::register(registry),
            flipped: None,
        };
        let ports = Ports { tunnelled: config.ports.clone(), loopback: BTreeSet::new() };
        let router = Self {
            ports: ArcSwap::from_pointee(ports),
            planner: Mutex::new(Planner::new(&config, registry)),
            config,
            snapshot: ArcSwap::default(),
            host: ArcSwap::default(),
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            due: watch::Sender::new(None),
            gives_up: watch::Sender::new(None),
            claims: watch::Sender::new(0),
            own_ports: OwnPorts::default(),
        };
        // Exclusions and clients take effect from the start.
        router.set_inventory(Inventory::default());
        router
    }

    /// This host's clock.
    pub fn clock(&self) -> Clock {
        self.config.clock
    }

    /// True if one of Postern's own listeners is there.
    pub fn is_own_port(&self, target: SocketAddr) -> bool {
        self.own_ports.has(target, self.tunnels(target.port()))
    }

    /// Replaces the nodes. Nodes that stay keep their virtual addresses. Slow with many nodes: see [`update`](super::update).
    pub fn set_inventory(&self, inventory: Inventory) {
        self.set_inventory_at(inventory, Instant::now());
    }

    fn set_inventory_at(&self, inventory: Inventory, now: Instant) {
        let mut planner = self.planner.lock();
        self.refresh_host(&mut planner);
        self.compute(Arc::new(inventory), &mut planner, now);
    }

    /// Replaces the cluster's ranges of Service addresses, which add to the configured ones: no node gets an address in
    /// them.
    pub fn set_services(&self, ranges: Vec<IpNet>) {
        let mut planner = self.planner.lock();
        if planner.set_services(&self.config, ranges) {
            let inventory = Arc::clone(&self.snapshot.load().inventory);
            self.compute(inventory, &mut planner, Instant::now());
        }
    }

    /// The ranges last set by [`set_services`](Self::set_services). May wait for a computation of the routes.
    pub fn services(&self) -> Vec<IpNet> {
        self.planner.lock().services(&self.config)
    }

    /// Recomputes the routes if something other than the inventory has changed: this host's addresses, virtual addresses that left
    /// quarantine, or cloud nodes' addresses whose delay is over. Cheap if nothing has; call it periodically and when
    /// [`due`](Self::due).
    pub fn refresh(&self) {
        self.refresh_at(Instant::now());
    }

    fn refresh_at(&self, now: Instant) {
        let mut planner = self.planner.lock();
        let moved = self.refresh_host(&mut planner);
        let due = self.due.borrow().is_some_and(|due| due <= now);
        if moved || due {
            let inventory = Arc::clone(&self.snapshot.load().inventory);
            self.compute(inventory, &mut planner, now);
        }
    }

    /// Returns true if this host's addresses have changed.
    fn refresh_host(&self, planner: &mut Planner) -> bool {
        let moved = planner.refresh_host(&self.config);
        if moved {
            self.host.store(planner.host.clone());
        }
        moved
    }

    /// Reports whether this host had the address at the last [`Self::refresh`].
    pub fn is_own(&self, address: IpAddr) -> bool {
        self.host.load().contains(&address.to_canonical())
    }

    /// Time at which [`Self::refresh`] has work to do even if nothing changes; a receiver sees the latest.
    pub fn due(&self) -> watch::Receiver<Option<Instant>> {
        self.due.subscribe()
    }

    fn compute(&self, inventory: Arc<Inventory>, planner: &mut Planner, now: Instant) {
        let Planned { snapshot, table, due, claims_changed } = planner.plan(&self.config, inventory, now);
        let differs = !Arc::ptr_eq(&self.state.lock().desired.table, &table);
        // Freeing the old ones is slow, so they are dropped after the state lock is released.
        let _earlier = match differs {
            true => self.replace(snapshot, table),
            false => (self.snapshot.swap(snapshot), Arc::default()),
        };
        self.due.send_if_modified(|known| std::mem::replace(known, due) != due);
        if claims_changed {
            self.claims.send_modify(|changes| *changes += 1);
        }
    }

    /// Replaces the routes; returns the old ones.
    fn replace(&self, snapshot: Arc<Snapshot>, table: Arc<Table>) -> (Arc<Snapshot>, Arc<Table>) {
        self.state.lock().flipped = Some(HashSet::new());
        let (mut up, mut counted) = (Vec::with_capacity(table.nodes.len()), Counted::default());
        for nodes in table.nodes.chunks(CHUNK) {
            let state = self.state.lock();
            for (node, _) in nodes {
                let held = state.live.get(node);
                up.push(held.is_some());
                counted.add(&table, held.copied().unwrap_or_default());
            }
            MutexGuard::unlock_fair(state);
        }
        let mut state = self.state.lock();
        // The snapshot comes first: a redirected connection must find its node in it.
        let earlier = self.snapshot.swap(snapshot);
        let replaced = std::mem::replace(&mut state.desired.table, table);
        state.desired.up = up;
        let _held = state.counts.replace(counted);
        for node in state.flipped.take().unwrap_or_default() {
            state.follow(&node);
        }
        self.bump();
        (earlier, replaced)
    }

    /// Records whether `holder` has a tunnel to the node; its routes are up while either side has one. The cost does
    /// not depend on the number of nodes. A node that the inventory does not have yet is remembered. With a tunnel, its agent is no
    /// longer awaited.
    pub fn set_live(&self, node: &NodeName, holder: TunnelHolder, live: bool) {
        self.hold(node, holder, live, None);
    }

    /// Records that `holder` lost its tunnel to the node, whose agent is expected back: the routes stay up for
    /// [`RETURN`](super::RETURN).
    pub fn lose(&self, node: &NodeName, holder: TunnelHolder) {
        self.hold(node, holder, false, Some(Instant::now()));
    }

    /// `lost_at` is None if the node's agent is not expected back.
    fn hold(&self, node: &NodeName, holder: TunnelHolder, live: bool, lost_at: Option<Instant>) {
        let mut state = self.state.lock();
        let before = state.live.get(node).copied().unwrap_or_default();
        let held = match holder {
            TunnelHolder::This => Held { here: live, ..before },
            TunnelHolder::Peers => Held { elsewhere: live, ..before },
        };
        // The agent is back also if it has come to another one of the other servers.
        if held == before && !live {
            return;
        }
        match lost_at {
            Some(now) => state.awaited.add(node, now),
            None => state.awaited.remove(node),
        }
        self.gives_up.send_if_modified(|next| {
            let first = next.is_none();
            *next = next.or_else(|| state.awaited.next());
            first && next.is_some()
        });
        if state.set_reachable(node, held) {
            self.bump();
        }
    }

    /// Reports whether a server has a tunnel to the node.
    pub fn is_reachable(&self, node: &NodeName) -> bool {
        self.state.lock().live.contains_key(node)
    }

    /// While the node's agent is expected back, a [`CancellationToken`] cancelled once it is back or given up.
    pub fn awaited(&self, node: &NodeName) -> Option<CancellationToken> {
        self.state.lock().awaited.over(node)
    }

    /// Time at which [`Self::give_up`] has work to do; a receiver sees the latest.
    pub(super) fn gives_up(&self) -> watch::Receiver<Option<Instant>> {
        self.gives_up.subscribe()
    }

    /// Takes down the routes of nodes whose agents have not come back in time.
    pub(super) fn give_up(&self, now: Instant) {
        let gone = {
            let mut state = self.state.lock();
            let gone = state.awaited.expire(now);
            self.gives_up.send_replace(state.awaited.next());
            gone
        };
        // Locks for each node, as there may be many.
        for node in gone {
            let mut state = self.state.lock();
            let held = state.live.get(&node).copied().unwrap_or_default();
            if state.set_reachable(&node, held) {
                self.bump();
            }
        }
    }

    /// Replaces the ports that are tunnelled in addition to the configured ones, and those that agents dial on their
    /// node's loopback.
    pub fn set_ports(&self, more: &BTreeSet<u16>, loopback: &BTreeSet<u16>) {
        let tunnelled: BTreeSet<u16> = self.config.ports.union(more).copied().collect();
        let mut state = self.state.lock();
        self.ports.store(Arc::new(Ports { tunnelled: tunnelled.clone(), loopback: loopback.clone() }));
        if state.desired.ports != tunnelled {
            state.desired.ports = tunnelled;
            self.bump();
        }
    }

    /// Reports whether connections to this TCP port of a node are tunnelled.
    pub fn tunnels(&self, port: u16) -> bool {
        self.ports.load().tunnelled.contains(&port)
    }

    /// The target that the agent dials for a connection to `port` of a node or pod.
    pub fn dialled(&self, found: &NodeAddress, port: u16) -> SocketAddr {
        // Programs that listen on loopback only use 127.0.0.1, whatever the node's own address family.
        let loopback = !found.pod && self.ports.load().loopback.contains(&port);
        SocketAddr::new(if loopback { Ipv4Addr::LOCALHOST.into() } else { found.address }, port)
    }

    /// Reports whether the redirect leads clients to this target on the node: a tunnelled port of an address that is its own,
    /// or of its loopback, or any port of a pod there.
    pub fn redirects(&self, node: &NodeName, target: SocketAddr) -> bool {
        let (address, snapshot, ports) = (target.ip().to_canonical(), self.snapshot(), self.ports.load());
        let tunnelled = ports.tunnelled.contains(&target.port());
        let edge = snapshot.inventory().get(node.as_str()).is_some_and(|known| known.edge);
        if address.is_loopback() {
            return edge && tunnelled && ports.loopback.contains(&target.port());
        }
        // The holder of an address may be another one here than where the client is, by interfaces and claims.
        if snapshot.names(node, address) {
            return edge && tunnelled;
        }
        snapshot.by_pod(address).is_some_and(|pod| pod.node == *node)
    }

    /// Reports whether the address is a virtual one (in a redirect range). It stands for an edge node for any client on
    /// this host.
    pub fn is_virtual(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.config.redirect_ranges().iter().any(|range| range.contains(&address))
    }

    /// Returns the current routes without taking a lock.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// The state that the kernel should have. A session that starts or ends meanwhile may be in it or not; it is
    /// announced either way.
    pub fn desired(&self) -> Desired {
        self.state.lock().desired.clone()
    }

    /// Increases whenever [`Router::desired`] changes. A receiver sees several changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Takes over the virtual addresses of earlier servers of this host, after the claims and before the first inventory:
    /// connections that those redirected arrive with them. `given` are a live predecessor's, whose programs redirect by
    /// them until it has handed over; the claims say whose the others were. Of two contradicting entries the first counts.
    pub fn take_over_addresses(&self, given: &[(IpNet, IpAddr)], left: &[(IpNet, IpAddr)]) {
        let mut planner = self.planner.lock();
        let Planner { virtual_addresses, claims, .. } = &mut *planner;
        let now = Instant::now();
        virtual_addresses.take_over(given, |_| None, now);
        virtual_addresses.take_over(left, |net| claims.edge_node(net).cloned(), now);
    }

    /// Takes over the claims of an earlier run, before the first inventory.
    ///
    /// # Errors
    /// The claims have another version.
    pub fn restore_claims(&self, stored: StoredClaims) -> Result<(), String> {
        self.planner.lock().claims = Claims::restore(stored, Instant::now(), self.config.clock.now())?;
        Ok(())
    }

    /// The first holder of each address, for [`Self::restore_claims`]; None before the first nodes. May wait for a
    /// computation.
    pub fn stored_claims(&self) -> Option<StoredClaims> {
        let claims = self.planner.lock().claims.clone();
        claims.known.then(|| claims.store(Instant::now(), self.config.clock.now()))
    }

    /// Increases whenever [`Self::stored_claims`] changes.
    pub fn claims_changed(&self) -> watch::Receiver<u64> {
        self.claims.subscribe()
    }

    fn bump(&self) {
        self.version.send_modify(|version| *version += 1);
    }
}

impl RouterState {
    /// Brings the node's routes up if either side has a tunnel to it or its agent is awaited, else down. Returns true
    /// if any of its routes changed.
    fn set_reachable(&mut self, node: &NodeName, held: Held) -> bool {
        let up = held.anywhere() || self.awaited.contains(node);
        let before = match up {
            true => self.live.insert(node.clone(), held),
            false => self.live.remove(node),
        };
        if before == up.then_some(held) {
            return false;
        }
        if let Some(flipped) = &mut self.flipped {
            flipped.insert(node.clone());
        }
        self.follow(node)
    }

    /// Brings the node's routes and its count into agreement with its tunnels. Returns true if any of its routes changed.
    fn follow(&mut self, node: &NodeName) -> bool {
        let held = self.live.get(node).copied();
        let Some(place) = self.desired.table.place(node) else { return false };
        self.counts.set(&self.desired.table, place, held.unwrap_or_default());
        self.desired.set_up(place, held.is_some())
    }
}

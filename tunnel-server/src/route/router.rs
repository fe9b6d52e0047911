//! Keeps the routes: recomputes them when nodes, tunnels, ports or this host's addresses change.
//!
//! Readers take a [`Snapshot`] without a lock. The redirect takes [`Router::desired`] whenever [`Router::changed`]
//! reports a change; changes in between are coalesced.

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
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tunnel_core::identity::NodeName;

use super::claims::Claims;
use super::config::RouterConfig;
use super::planner::{Planned, Planner};
use super::snapshot::Snapshot;
use crate::inventory::Inventory;
use crate::redirect::{Desired, RouteTarget};

/// How many routes are compared under one lock: a session that comes or goes waits for no more.
const CHUNK: usize = 512;

/// The routes, kept up to date.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    snapshot: ArcSwap<Snapshot>,
    ports: ArcSwap<Ports>,
    /// Locked for moments only: a session's thread waits for it.
    state: Mutex<RouterState>,
    /// Locked during a whole recomputation, so that an older inventory never replaces a newer one.
    planner: Mutex<Planner>,
    version: watch::Sender<u64>,
    due: watch::Sender<Option<Instant>>,
    claims: watch::Sender<u64>,
}

/// What the doors need to know about a port.
#[derive(Debug)]
struct Ports {
    tunnelled: BTreeSet<u16>,
    /// Those that the agent dials on its node's loopback.
    loopback: BTreeSet<u16>,
}

/// Who may have a tunnel to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    This,
    /// At least one of the other servers.
    Peers,
}

/// Who has a tunnel to a node.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    here: bool,
    elsewhere: bool,
}

impl Held {
    fn anywhere(self) -> bool {
        self.here || self.elsewhere
    }
}

#[derive(Debug)]
struct RouterState {
    /// Nodes without any tunnel are not in it.
    live: HashMap<NodeName, Held>,
    desired: Desired,
    /// The keys in `desired.routes` whose `up` follows the node.
    routes_of: HashMap<NodeName, Vec<IpNet>>,
    /// Nodes whose session came or went during the recomputation that is under way.
    flipped: Option<HashSet<NodeName>>,
    /// Grows with each recomputation.
    generation: u64,
}

impl Router {
    /// Without any node. Metrics go into `registry`, which has the prefix `postern`.
    pub fn new(config: RouterConfig, registry: &mut Registry) -> Self {
        let state = RouterState {
            live: HashMap::new(),
            desired: Desired { ports: config.ports.clone(), ..Desired::default() },
            routes_of: HashMap::new(),
            flipped: None,
            generation: 0,
        };
        let ports = Ports { tunnelled: config.ports.clone(), loopback: BTreeSet::new() };
        let router = Self {
            ports: ArcSwap::from_pointee(ports),
            planner: Mutex::new(Planner::new(&config, registry)),
            config,
            snapshot: ArcSwap::default(),
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            due: watch::Sender::new(None),
            claims: watch::Sender::new(0),
        };
        // Exclusions and clients take effect from the start.
        router.set_inventory(Inventory::default());
        router
    }

    /// Replaces the nodes. Tokens of those that stay are kept. With many nodes it takes long: see
    /// [`update`](super::update).
    pub fn set_inventory(&self, inventory: Inventory) {
        self.set_inventory_at(inventory, Instant::now());
    }

    fn set_inventory_at(&self, inventory: Inventory, now: Instant) {
        let mut planner = self.lock_planner();
        planner.refresh_host(&self.config);
        self.recompute(Arc::new(inventory), &mut planner, now);
    }

    /// Replaces the ranges of Service addresses that the cluster names, in addition to the configured ones: no node gets
    /// an address in them.
    pub fn set_services(&self, ranges: Vec<IpNet>) {
        let mut planner = self.lock_planner();
        if planner.set_services(&self.config, ranges) {
            let inventory = Arc::clone(&self.snapshot.load().inventory);
            self.recompute(inventory, &mut planner, Instant::now());
        }
    }

    /// Recomputes what has changed although the inventory has not: this host's addresses, tokens that are free again,
    /// addresses of cloud nodes that are old enough. Cheap when nothing has; call it periodically, and when it is
    /// [`due`](Self::due).
    pub fn refresh(&self) {
        self.refresh_at(Instant::now());
    }

    fn refresh_at(&self, now: Instant) {
        let mut planner = self.lock_planner();
        let moved = planner.refresh_host(&self.config);
        let due = self.due.borrow().is_some_and(|due| due <= now);
        if moved || due {
            let inventory = Arc::clone(&self.snapshot.load().inventory);
            self.recompute(inventory, &mut planner, now);
        }
    }

    /// When [`Self::refresh`] has something to do although nothing changed; a receiver sees the latest.
    pub fn due(&self) -> watch::Receiver<Option<Instant>> {
        self.due.subscribe()
    }

    fn recompute(&self, inventory: Arc<Inventory>, planner: &mut Planner, now: Instant) {
        self.lock().flipped = Some(HashSet::new());
        let mut planned = planner.plan(&self.config, inventory, now);
        self.bring_up(&mut planned);
        let differs = self.differs(&planned);
        let Planned { snapshot, excluded, clients, routes, routes_of, due, claims_changed } = planned;

        let mut state = self.lock();
        let desired = Desired { ports: state.desired.ports.clone(), excluded, clients, routes };
        let before = (
            std::mem::replace(&mut state.desired, desired),
            std::mem::replace(&mut state.routes_of, routes_of),
            self.snapshot.swap(snapshot),
        );
        for node in state.flipped.take().unwrap_or_default() {
            let live = state.live.contains_key(&node);
            state.set_up(&node, live);
        }
        state.generation += 1;
        if differs {
            self.bump();
        }
        drop(state);
        // Freeing that takes long, so nobody waits for it.
        drop(before);
        self.due.send_if_modified(|known| std::mem::replace(known, due) != due);
        if claims_changed {
            self.claims.send_modify(|changes| *changes += 1);
        }
    }

    /// Sets the planned routes of nodes with a tunnel up. What changes meanwhile is in `flipped`.
    fn bring_up(&self, planned: &mut Planned) {
        let nodes: Vec<_> = planned.routes_of.iter().collect();
        for nodes in nodes.chunks(CHUNK) {
            let up: Vec<_> = {
                let state = self.lock();
                nodes.iter().filter(|(node, _)| state.live.contains_key(*node)).collect()
            };
            for net in up.into_iter().flat_map(|(_, nets)| nets.iter()) {
                if let Some(target) = planned.routes.get_mut(net) {
                    target.up = true;
                }
            }
        }
    }

    /// Whether the planned routes are others than those in effect. Sessions that come or go meanwhile report that
    /// themselves.
    fn differs(&self, planned: &Planned) -> bool {
        {
            let RouterState { desired, .. } = &*self.lock();
            if desired.routes.len() != planned.routes.len()
                || desired.excluded != planned.excluded
                || desired.clients != planned.clients
            {
                return true;
            }
        }
        let planned: Vec<_> = planned.routes.iter().collect();
        planned.chunks(CHUNK).any(|routes| {
            let state = self.lock();
            routes.iter().any(|(net, target)| state.desired.routes.get(*net) != Some(*target))
        })
    }

    /// Sets whether `holder` has a tunnel to the node; its routes are up while anyone has. The cost does not depend on the
    /// number of nodes. A node that the inventory does not have yet is remembered.
    pub fn set_live(&self, node: &NodeName, holder: Holder, live: bool) {
        let mut state = self.lock();
        let before = state.live.get(node).copied().unwrap_or_default();
        let held = match holder {
            Holder::This => Held { here: live, ..before },
            Holder::Peers => Held { elsewhere: live, ..before },
        };
        let live = held.anywhere();
        if live {
            state.live.insert(node.clone(), held);
        } else {
            state.live.remove(node);
        }
        if live == before.anywhere() {
            return;
        }
        if let Some(flipped) = &mut state.flipped {
            flipped.insert(node.clone());
        }
        if state.set_up(node, live) {
            self.bump();
        }
    }

    /// Replaces the ports that are tunnelled in addition to the configured ones, and those that agents dial on their
    /// node's loopback.
    pub fn set_ports(&self, more: &BTreeSet<u16>, loopback: &BTreeSet<u16>) {
        let tunnelled: BTreeSet<u16> = self.config.ports.union(more).copied().collect();
        let mut state = self.lock();
        self.ports.store(Arc::new(Ports { tunnelled: tunnelled.clone(), loopback: loopback.clone() }));
        if state.desired.ports != tunnelled {
            state.desired.ports = tunnelled;
            self.bump();
        }
    }

    /// Whether connections to this TCP port of a node are tunnelled.
    pub fn tunnels(&self, port: u16) -> bool {
        self.ports.load().tunnelled.contains(&port)
    }

    /// What the agent dials for a connection to `port` of `address`, its node's.
    pub fn target(&self, address: IpAddr, port: u16) -> SocketAddr {
        // Programs that listen on loopback only use 127.0.0.1, whatever the node's own address family.
        let loopback = self.ports.load().loopback.contains(&port);
        SocketAddr::new(if loopback { Ipv4Addr::LOCALHOST.into() } else { address }, port)
    }

    /// The current routes, without a lock.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// What the kernel should hold; a copy, so call it once per [`Router::changed`], not per event. A session that comes
    /// or goes meanwhile may be in it or not; it is announced either way.
    pub fn desired(&self) -> Desired {
        loop {
            let (mut copy, generation) = {
                let state = self.lock();
                let Desired { ports, excluded, clients, .. } = &state.desired;
                let copy = Desired {
                    ports: ports.clone(),
                    excluded: excluded.clone(),
                    clients: clients.clone(),
                    ..Desired::default()
                };
                (copy, state.generation)
            };
            if let Some(routes) = self.copy_routes(generation) {
                copy.routes = routes.into_iter().collect();
                return copy;
            }
        }
    }

    /// None: they were replaced meanwhile.
    fn copy_routes(&self, generation: u64) -> Option<Vec<(IpNet, RouteTarget)>> {
        let mut routes: Vec<(IpNet, RouteTarget)> = Vec::new();
        loop {
            let state = self.lock();
            if state.generation != generation {
                return None;
            }
            let (before, all) = (routes.len(), state.desired.routes.len());
            routes.reserve(all - before);
            let from = routes.last().map_or(Bound::Unbounded, |(net, _)| Bound::Excluded(*net));
            let rest = state.desired.routes.range((from, Bound::Unbounded));
            routes.extend(rest.take(CHUNK).map(|(net, target)| (*net, *target)));
            if routes.len() == all {
                return Some(routes);
            }
        }
    }

    /// Increases whenever [`Router::desired`] differs from before. A receiver sees many changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Takes over the tokens of an earlier server of this host, before the first inventory: connections that it redirected
    /// arrive with them.
    pub fn take_over_tokens(&self, found: &[(IpNet, IpAddr)]) {
        self.lock_planner().tokens.take_over(found, Instant::now());
    }

    /// Takes over the claims of an earlier run, before the first inventory.
    ///
    /// # Errors
    /// The text is not what [`Self::stored_claims`] gave.
    pub fn restore_claims(&self, text: &[u8]) -> Result<(), String> {
        self.lock_planner().claims = Claims::restore(text, Instant::now(), SystemTime::now())?;
        Ok(())
    }

    /// Which node had an address first, for [`Self::restore_claims`]; None before the first nodes. It may wait for a
    /// recomputation.
    ///
    /// # Errors
    /// Those of the format.
    pub fn stored_claims(&self) -> Result<Option<Vec<u8>>, serde_json::Error> {
        let claims = self.lock_planner().claims.clone();
        claims.known.then(|| claims.store(Instant::now(), SystemTime::now())).transpose()
    }

    /// Increases whenever [`Self::stored_claims`] differs from before.
    pub fn claims_changed(&self) -> watch::Receiver<u64> {
        self.claims.subscribe()
    }

    fn bump(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    fn lock(&self) -> MutexGuard<'_, RouterState> {
        // Every change is computed before it is stored, so a panic leaves nothing half-done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_planner(&self) -> MutexGuard<'_, Planner> {
        // Each of its parts is replaced as a whole.
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RouterState {
    /// Whether the node has any routes.
    fn set_up(&mut self, node: &NodeName, up: bool) -> bool {
        let mut any = false;
        for net in self.routes_of.get(node).into_iter().flatten() {
            if let Some(target) = self.desired.routes.get_mut(net) {
                target.up = up;
                any = true;
            }
        }
        any
    }
}

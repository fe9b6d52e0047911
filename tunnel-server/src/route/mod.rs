//! From the inventory to destinations: which address, name or token leads to which edge node.
//!
//! Readers take a [`Snapshot`] without a lock. The loader of the programs takes [`Router::desired`] whenever
//! [`Router::changed`] says so; changes in between are coalesced.

mod host;
mod plan;
mod snapshot;
mod tokens;

#[cfg(test)]
mod model_tests;

pub use host::follow_host;
pub use plan::{Conflict, ConflictKind};
pub use snapshot::{ByAddress, Destination, Snapshot};
pub use tokens::QUARANTINE;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;
use crate::redirect::{Desired, RouteTarget};
use plan::{Holder, Plan};
use tokens::{Owner, Tokens};

/// Conflicts that one reload may log; the rest are counted in one line. `status` shows them all.
const MAX_LOGGED: usize = 20;

/// What does not change while running.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    pub token_range: Ipv4Net,
    pub token_range_v6: Ipv6Net,
    /// TCP ports that are tunnelled, whatever [`Router::set_ports`] adds.
    pub ports: BTreeSet<u16>,
    /// Pods of edge nodes in these ranges are redirected too, on any port.
    pub pods: Vec<IpNet>,
    /// Which node this host is, when that is known; else its addresses tell.
    pub host: Option<NodeName>,
    /// Never redirected.
    pub exclude: Vec<IpNet>,
    /// May use the redirect, besides this host and its pods.
    pub clients: Vec<IpNet>,
    /// Tells which node of the inventory is this host, whose pods may use the redirect: [`host_addresses`]. None: it
    /// cannot be known at this moment.
    pub host_addresses: fn() -> Option<HashSet<IpAddr>>,
}

/// See the module.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    snapshot: ArcSwap<Snapshot>,
    ports: ArcSwap<Ports>,
    state: Mutex<State>,
    /// This host's addresses as last known. Held over a whole recomputation, so that an older inventory never replaces
    /// a newer one.
    host: Mutex<HashSet<IpAddr>>,
    version: watch::Sender<u64>,
    conflicts: Family<[(&'static str, &'static str); 1], Gauge>,
}

/// What the doors ask about a port.
#[derive(Debug)]
struct Ports {
    tunnelled: BTreeSet<u16>,
    /// Those that the agent dials on its node's loopback.
    loopback: BTreeSet<u16>,
}

#[derive(Debug)]
struct State {
    tokens: Tokens,
    live: HashSet<NodeName>,
    desired: Desired,
    /// The keys in `desired.routes` whose `up` follows the node.
    routes_of: HashMap<NodeName, Vec<IpNet>>,
    conflicts: BTreeSet<Conflict>,
}

impl Router {
    /// Without any node. Metrics go into `registry`, which has the prefix `postern`.
    pub fn new(config: RouterConfig, registry: &mut Registry) -> Self {
        let conflicts = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        for kind in ConflictKind::ALL {
            conflicts.get_or_create(&[("kind", kind.as_str())]).set(0);
        }
        let help = "Contradictions in the inventory, by kind (see status)";
        registry.register("inventory_conflicts", help, conflicts.clone());
        let state = State {
            tokens: Tokens::new(config.token_range, config.token_range_v6),
            live: HashSet::new(),
            desired: Desired::default(),
            routes_of: HashMap::new(),
            conflicts: BTreeSet::new(),
        };
        let ports = Ports { tunnelled: config.ports.clone(), loopback: BTreeSet::new() };
        let router = Self {
            ports: ArcSwap::from_pointee(ports),
            config,
            snapshot: ArcSwap::default(),
            state: Mutex::new(state),
            host: Mutex::default(),
            version: watch::Sender::new(0),
            conflicts,
        };
        // Ports, exclusions and clients count from the start.
        router.set_inventory(Inventory::default());
        router
    }

    /// Replaces the nodes. Tokens of those that stay are kept.
    pub fn set_inventory(&self, inventory: Inventory) {
        self.set_inventory_at(inventory, Instant::now());
    }

    fn set_inventory_at(&self, inventory: Inventory, now: Instant) {
        let mut host = self.lock_host();
        if let Some(addresses) = (self.config.host_addresses)() {
            *host = addresses;
        }
        self.recompute(Arc::new(inventory), &host, now);
    }

    /// Asks for this host's addresses again, which may have come or gone since the inventory was read: they tell whose
    /// pods may use the redirect. Cheap while they stay the same; meant to be called every now and then.
    pub fn refresh_host(&self) {
        let mut host = self.lock_host();
        match (self.config.host_addresses)() {
            Some(addresses) if addresses != *host => *host = addresses,
            _ => return,
        }
        let inventory = Arc::clone(&self.snapshot.load().inventory);
        self.recompute(inventory, &host, Instant::now());
    }

    /// The caller holds `self.host`, whose content `host` is.
    fn recompute(&self, inventory: Arc<Inventory>, host: &HashSet<IpAddr>, now: Instant) {
        let token_ranges = [IpNet::V4(self.config.token_range), IpNet::V6(self.config.token_range_v6)];
        let mut plan = Plan::new(&inventory, &self.config.exclude, &token_ranges);
        if !self.config.pods.is_empty() {
            plan.route_pods(&inventory, &token_ranges, &self.config.pods);
        }
        // An edge node is never this host, whatever addresses it reports: its pods must not get at the other sites.
        let pods_here = inventory
            .nodes
            .iter()
            .filter(|node| !node.edge)
            .filter(|node| match &self.config.host {
                Some(name) => node.name == *name,
                None => node.addresses.iter().any(|address| host.contains(address)),
            })
            .flat_map(|node| node.pod_cidrs.iter().copied());
        let clients = self.config.clients.iter().copied().chain(pods_here).collect();

        let mut state = self.lock();
        let pods = plan.pods.iter().map(|(range, index)| pods_of(&inventory, *index, *range));
        let owners =
            plan.routed.iter().map(|address| owner(&inventory, &plan, *address)).chain(pods).collect();
        let assigned = state.tokens.assign(owners, now);

        let mut desired = Desired {
            ports: self.ports.load().tunnelled.clone(),
            excluded: std::mem::take(&mut plan.excluded),
            clients,
            ..Desired::default()
        };
        let mut routes_of: HashMap<NodeName, Vec<IpNet>> = HashMap::new();
        let mut tokens = HashMap::with_capacity(assigned.len());
        for address in std::mem::take(&mut plan.routed) {
            let token = assigned.get(&owner(&inventory, &plan, address)).copied().flatten();
            let mut up = false;
            match (token, &plan.holders[&address]) {
                (Some(token), Holder::One(index)) => {
                    let name = &inventory.nodes[*index].name;
                    up = state.live.contains(name);
                    routes_of.entry(name.clone()).or_default().push(IpNet::from(address));
                    tokens.insert(token, (*index, address));
                }
                // Leads nowhere, down for good: a connect that fails beats one that reaches the wrong site.
                (Some(_), Holder::Several(_)) => {}
                (None, Holder::One(index)) => {
                    let index = *index;
                    plan.conflict(ConflictKind::NoToken, Some(address), &inventory, &[index]);
                }
                (None, Holder::Several(indices)) => {
                    let indices = indices.clone();
                    plan.conflict(ConflictKind::NoToken, Some(address), &inventory, &indices);
                }
            }
            let token = token.unwrap_or_else(|| state.tokens.nowhere(address));
            desired.routes.insert(IpNet::from(address), RouteTarget { token, up, any_port: false });
        }
        let mut blocks = BTreeMap::new();
        for (range, index) in std::mem::take(&mut plan.pods) {
            let name = &inventory.nodes[index].name;
            let Some(token) = assigned.get(&pods_of(&inventory, index, range)).copied().flatten() else {
                plan.conflict(ConflictKind::NoTokenBlock, Some(range.network()), &inventory, &[index]);
                continue;
            };
            let up = state.live.contains(name);
            routes_of.entry(name.clone()).or_default().push(range);
            desired.routes.insert(range, RouteTarget { token, up, any_port: true });
            if let Ok(block) = IpNet::new(token, range.prefix_len()) {
                blocks.insert(token, (block, index, range));
            }
        }

        self.report(&state.conflicts, &plan.conflicts);
        let names = inventory.nodes.iter().enumerate().filter(|(_, node)| node.edge);
        let names = names.map(|(index, node)| (node.name.clone(), index)).collect();
        let conflicts = plan.conflicts.iter().cloned().collect();
        self.snapshot.store(Arc::new(Snapshot {
            inventory,
            names,
            holders: plan.holders,
            tokens,
            blocks,
            conflicts,
        }));
        state.conflicts = plan.conflicts;
        state.routes_of = routes_of;
        if state.desired != desired {
            state.desired = desired;
            self.bump();
        }
    }

    /// Whether some server holds a tunnel to the node. Its routes follow; the cost does not depend on the number of
    /// nodes. A node that the inventory does not have yet is remembered.
    pub fn set_live(&self, node: &NodeName, live: bool) {
        let mut state = self.lock();
        let changed = if live { state.live.insert(node.clone()) } else { state.live.remove(node) };
        if !changed {
            return;
        }
        let State { routes_of, desired, .. } = &mut *state;
        let mut any = false;
        for net in routes_of.get(node).into_iter().flatten() {
            if let Some(target) = desired.routes.get_mut(net) {
                target.up = live;
                any = true;
            }
        }
        if any {
            self.bump();
        }
    }

    /// Replaces the ports that are tunnelled besides the configured ones, and those that agents dial on their node's
    /// loopback.
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

    /// What the agent shall dial for a connection to `port` of `address`, which is its node's.
    pub fn target(&self, address: IpAddr, port: u16) -> SocketAddr {
        // What listens on a node's loopback only is on 127.0.0.1, whatever the node's own address family.
        let loopback = self.ports.load().loopback.contains(&port);
        SocketAddr::new(if loopback { Ipv4Addr::LOCALHOST.into() } else { address }, port)
    }

    /// The routes at this moment, without a lock.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// What the kernel should know; a copy, so call it once per [`Router::changed`], not per event.
    pub fn desired(&self) -> Desired {
        self.lock().desired.clone()
    }

    /// Grows whenever [`Router::desired`] differs from before. A receiver sees many changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    fn bump(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    fn report(&self, before: &BTreeSet<Conflict>, now: &BTreeSet<Conflict>) {
        for kind in ConflictKind::ALL {
            let count = now.iter().filter(|conflict| conflict.kind == kind).count();
            self.conflicts.get_or_create(&[("kind", kind.as_str())]).set(count as i64);
        }
        let mut new = now.difference(before);
        for conflict in new.by_ref().take(MAX_LOGGED) {
            tracing::warn!(kind = conflict.kind.as_str(), "inventory: {conflict}");
        }
        let more = new.count();
        if more > 0 {
            tracing::warn!("inventory: {more} more conflicts; tunnel-server status -o json lists them");
        }
        let gone = before.difference(now).count();
        if gone > 0 {
            tracing::info!("inventory: {gone} conflicts are gone, {} remain", now.len());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is computed before it is stored, so a panic leaves nothing half-done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_host(&self) -> MutexGuard<'_, HashSet<IpAddr>> {
        // It is replaced whole.
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn owner(inventory: &Inventory, plan: &Plan, address: IpAddr) -> Owner {
    match &plan.holders[&address] {
        Holder::One(index) => Owner::Node(inventory.nodes[*index].name.clone(), address),
        Holder::Several(_) => Owner::Nobody(address),
    }
}

fn pods_of(inventory: &Inventory, index: usize, range: IpNet) -> Owner {
    Owner::Pods(inventory.nodes[index].name.clone(), range)
}

/// Every address that an interface of this host has at this moment and that tells it from other hosts: loopback and
/// link-local addresses do not. None when the kernel does not list them.
pub fn host_addresses() -> Option<HashSet<IpAddr>> {
    let interfaces = match nix::ifaddrs::getifaddrs() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            tracing::warn!(%error, "cannot list this host's addresses; those known before stay in use");
            return None;
        }
    };
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    Some(addresses.filter(|address| names_one_host(*address)).collect())
}

fn names_one_host(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_loopback() || link_local || address.is_unspecified())
}

//! From changes of the inventory to changes of the routes, with what has to be remembered from one to the next. Knows nothing
//! of tunnels.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tunnel_core::identity::NodeName;

use super::capacity::{Capacity, Shortage};
use super::claims::Claims;
use super::config::RouterConfig;
use super::conflict::{Conflict, ConflictKind};
use super::conflicts::Subject;
use super::key::Key;
use super::plan::Plan;
use super::report::Reports;
use super::rules::Rules;
use super::snapshot::{PodBlock, PodRange, Snapshot};
use super::tokens::{Lack, Owner, Tokens};
use crate::inventory::{Inventory, InventoryNode};
use crate::redirect::MAX_ROUTES;
use crate::shared_map::{SharedMap, SharedSet};

/// The widest range of this host's pods that may use the redirect. A Node may name 0.0.0.0/0, in which every neighbour is.
fn widest_clients(range: IpNet) -> u8 {
    if range.addr().is_ipv4() { 8 } else { 32 }
}

/// Delays that end within this time are handled in one computation.
const DEBOUNCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Planner {
    pub(super) tokens: Tokens,
    plan: Plan,
    /// This host's addresses as last known.
    host: Arc<HashSet<IpAddr>>,
    /// The API server and the Services.
    foreign: Vec<IpNet>,
    /// What the plan follows from.
    inventory: Arc<Inventory>,
    entries: BTreeMap<Key, Entry>,
    table: Capacity,
    /// Those of `entries` without a token.
    lacking: BTreeMap<Key, Lack>,
    by_token: SharedMap<IpAddr, (NodeName, IpAddr)>,
    blocks: SharedMap<IpAddr, PodBlock>,
    pods: SharedMap<IpAddr, PodRange>,
    clients: BTreeSet<IpNet>,
    /// The node that a route follows, and the routes that follow a node.
    follower: HashMap<IpNet, NodeName>,
    following: HashMap<NodeName, BTreeSet<IpNet>>,
    reports: Reports,
    /// The last plan is not in effect, or is half of one: there was a panic, and the next begins anew. Owners get their tokens
    /// back.
    broken: bool,
}

/// A network that leads to somebody.
#[derive(Debug)]
struct Entry {
    owner: Owner,
    token: Option<IpAddr>,
}

/// The route of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) token: IpAddr,
    pub(super) any_port: bool,
    /// It is up while the node has a tunnel; None: never.
    pub(super) node: Option<NodeName>,
}

/// What follows from a change.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) excluded: SharedSet<IpNet>,
    pub(super) clients: BTreeSet<IpNet>,
    /// Each network whose route may be another now.
    pub(super) routes: BTreeMap<IpNet, Option<Route>>,
    /// Of each node that others follow now, all of them.
    pub(super) following: Vec<(NodeName, Vec<IpNet>)>,
    /// Every route that is not in `routes` has gone.
    pub(super) anew: bool,
    /// When the same inventory yields something else.
    pub(super) due: Option<Instant>,
    /// Whether [`Planner::claims`] are others than before.
    pub(super) claims_changed: bool,
}

impl Planner {
    pub(super) fn new(config: &RouterConfig, registry: &mut Registry) -> Self {
        Self {
            tokens: Tokens::new(config.token_range, config.token_range_v6),
            plan: Plan::default(),
            host: Arc::default(),
            foreign: config.foreign.clone(),
            inventory: Arc::default(),
            entries: BTreeMap::new(),
            table: Capacity::new(MAX_ROUTES),
            lacking: BTreeMap::new(),
            by_token: SharedMap::new(),
            blocks: SharedMap::new(),
            pods: SharedMap::new(),
            clients: BTreeSet::new(),
            follower: HashMap::new(),
            following: HashMap::new(),
            reports: Reports::register(registry),
            broken: true,
        }
    }

    pub(super) fn claims(&self) -> &Claims {
        &self.plan.claims
    }

    pub(super) fn set_claims(&mut self, claims: Claims) {
        self.plan.claims = claims;
    }

    /// The last plan is in effect.
    pub(super) fn done(&mut self) {
        self.broken = false;
    }

    #[cfg(test)]
    pub(super) fn distrust(&mut self) {
        self.broken = true;
    }

    /// True when the ranges are others than before.
    pub(super) fn set_services(&mut self, config: &RouterConfig, ranges: Vec<IpNet>) -> bool {
        let foreign: Vec<IpNet> = config.foreign.iter().copied().chain(ranges).collect();
        let changed = foreign != self.foreign;
        self.foreign = foreign;
        changed
    }

    /// The ranges that were set last.
    pub(super) fn services(&self, config: &RouterConfig) -> Vec<IpNet> {
        self.foreign.get(config.foreign.len()..).unwrap_or_default().to_vec()
    }

    /// Reads this host's addresses again; true when something follows from what has changed.
    pub(super) fn refresh_host(&mut self, config: &RouterConfig) -> bool {
        let Some(addresses) = (config.host_addresses)() else { return false };
        let mut changed = self.host.symmetric_difference(&addresses);
        let matters = changed.any(|address| self.plan.concerns(*address, &config.pods));
        if *self.host != addresses {
            self.host = Arc::new(addresses);
        }
        matters
    }

    /// This host's addresses as last known.
    pub(super) fn host(&self) -> &Arc<HashSet<IpAddr>> {
        &self.host
    }

    /// Call [`Self::done`] once it is in effect. `all`: the rules are others than before.
    pub(super) fn plan(
        &mut self,
        config: &RouterConfig,
        inventory: Arc<Inventory>,
        all: bool,
        now: Instant,
    ) -> Planned {
        let token_ranges = config.token_ranges();
        let rules = Rules {
            edge_addresses: &config.edge_addresses,
            exclude: &config.exclude,
            token_ranges: &token_ranges,
            foreign: &self.foreign,
            pods: &config.pods,
            host: &self.host,
        };
        let freed = self.tokens.advance(now);
        // An empty inventory says nothing about who had an address first.
        let anew = self.broken || inventory.is_empty();
        if anew {
            self.plan.clear(&rules);
            self.inventory = Arc::default();
            self.lacking.clear();
            self.table.clear();
            (self.by_token, self.blocks) = (SharedMap::new(), SharedMap::new());
            self.pods = SharedMap::new();
            self.follower.clear();
            self.following.clear();
            for entry in std::mem::take(&mut self.entries).into_values() {
                self.tokens.release(&entry.owner, now);
            }
        }
        self.broken = true;
        let before = std::mem::replace(&mut self.inventory, inventory.clone());
        let changes = inventory.changes_since(&before);
        let wanted = match inventory.is_empty() {
            true => Vec::new(),
            false => self.plan.update(&inventory, &changes, &rules, all, now),
        };
        let cloud = |node: Option<&Arc<InventoryNode>>| node.is_some_and(|node| !node.edge);
        if anew || all || changes.iter().any(|change| cloud(change.before) || cloud(change.now)) {
            self.clients = config.clients.iter().copied().chain(self.pods_here(config)).collect();
        }
        let changed = self.route(wanted, freed, now);
        let routes: BTreeMap<_, _> = changed.into_iter().map(|net| (net, self.route_of(net))).collect();
        let following = self.follow(&routes);

        let free = if self.lacking.is_empty() { None } else { self.tokens.due(now) };
        let due = self.plan.claims.due(now).into_iter().chain(free).min().map(|at| at.max(now + DEBOUNCE));
        let conflicts = self.plan.conflicts.all().clone();
        self.reports.report(conflicts.clone(), now);
        self.reports.shortage(self.shortage(), &token_ranges);
        let snapshot = Snapshot {
            inventory,
            holders: self.plan.holders.clone(),
            tokens: self.by_token.clone(),
            blocks: self.blocks.clone(),
            pods: self.pods.clone(),
            conflicts,
        };
        Planned {
            snapshot: Arc::new(snapshot),
            excluded: self.plan.excluded.clone(),
            clients: self.clients.clone(),
            routes,
            following,
            anew,
            due,
            claims_changed: self.plan.claims.take_changed(),
        }
    }

    /// Gives networks their places in the kernel's table, and their tokens. Returns those whose routes may have changed.
    fn route(&mut self, wanted: Vec<(Key, Option<Owner>)>, freed: bool, now: Instant) -> BTreeSet<IpNet> {
        let mut changed = BTreeSet::new();
        let (mut bare, mut without_place) = (BTreeSet::new(), Vec::new());
        for (key, owner) in wanted {
            if self.entries.get(&key).map(|entry| &entry.owner) == owner.as_ref() {
                continue;
            }
            changed.insert(key.net);
            self.forget(key, now);
            match owner {
                Some(owner) => {
                    self.entries.insert(key, Entry { owner, token: None });
                    if self.table.enter(key) {
                        bare.insert(key);
                    } else {
                        without_place.push(key);
                    }
                }
                None => self.table.leave(key),
            }
        }
        bare.extend(self.table.admit());
        for key in without_place.into_iter().filter(|key| self.table.waits(*key)) {
            let left_out = self.conflict(ConflictKind::NoRoom, key);
            self.plan.conflicts.replace(Subject::Route(key), left_out.into_iter().collect());
        }
        // Those that get theirs back come before those that need others.
        let mut needy = if freed { self.lacking.keys().copied().collect() } else { BTreeSet::new() };
        for key in bare {
            changed.insert(key.net);
            let Some(entry) = self.entries.get(&key) else { continue };
            match self.tokens.restore(&entry.owner) {
                Some(token) => self.give(key, Ok(token)),
                None => _ = needy.insert(key),
            }
        }
        let mut used_up = HashSet::new();
        for key in needy {
            let size = (key.is_ipv4(), key.net.prefix_len());
            if used_up.contains(&size) && self.lacking.get(&key) == Some(&Lack::Range) {
                continue;
            }
            let Some(entry) = self.entries.get(&key) else { continue };
            let token = self.tokens.acquire(&entry.owner);
            if token == Err(Lack::Range) {
                used_up.insert(size);
            }
            if token.is_ok() || !self.lacking.contains_key(&key) {
                changed.insert(key.net);
            }
            self.give(key, token);
        }
        changed
    }

    /// Takes back what an entry has, but for its place in the table.
    fn forget(&mut self, key: Key, now: Instant) {
        let Some(entry) = self.entries.remove(&key) else { return };
        self.lacking.remove(&key);
        self.tokens.release(&entry.owner, now);
        if let Some(token) = entry.token {
            self.by_token.remove(&token);
            self.blocks.remove(&token);
        }
        if let Owner::Pods(_, range) = &entry.owner {
            self.pods.remove(&range.network());
        }
        self.plan.conflicts.replace(Subject::Route(key), Vec::new());
    }

    fn give(&mut self, key: Key, token: Result<IpAddr, Lack>) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.token = token.ok();
        let kind = if key.pods { ConflictKind::NoTokenBlock } else { ConflictKind::NoToken };
        let mut conflict = None;
        match (token, &entry.owner) {
            (Ok(token), Owner::Node(node, address)) => {
                self.by_token.insert(token, (node.clone(), *address));
            }
            (Ok(token), Owner::Pods(node, range)) => {
                if let Ok(block) = IpNet::new(token, range.prefix_len()) {
                    self.blocks.insert(token, (block, node.clone(), *range));
                    self.pods.insert(range.network(), (*range, node.clone()));
                }
            }
            // Always down: a connect that fails is better than one that reaches the wrong site.
            (Ok(_), Owner::Contested(_)) => {}
            (Err(_), _) => conflict = self.conflict(kind, key),
        }
        match token {
            Ok(_) => self.lacking.remove(&key),
            Err(lack) => self.lacking.insert(key, lack),
        };
        self.plan.conflicts.replace(Subject::Route(key), conflict.into_iter().collect());
    }

    /// A conflict about a route.
    fn conflict(&self, kind: ConflictKind, key: Key) -> Option<Conflict> {
        let address = key.net.network();
        let nodes = match &self.entries.get(&key)?.owner {
            Owner::Pods(node, _) => vec![node.clone()],
            Owner::Node(..) | Owner::Contested(_) => self.plan.holders.get(&address)?.nodes().to_vec(),
        };
        Some(Conflict { kind, address: Some(address), nodes, holder: None })
    }

    /// The route of a network, if it has one.
    fn route_of(&self, net: IpNet) -> Option<Route> {
        let of = |pods: bool| {
            let key = Key { pods, net };
            let entry = self.entries.get(&key).filter(|_| !self.table.waits(key))?;
            let node = match &entry.owner {
                Owner::Node(node, _) | Owner::Pods(node, _) => entry.token.map(|_| node.clone()),
                Owner::Contested(_) => None,
            };
            // A connect fails for want of a token; to a pod it goes where it went before.
            let token = entry.token.or_else(|| (!pods).then(|| self.tokens.unassigned(net.network())))?;
            Some(Route { token, any_port: pods, node })
        };
        of(true).or_else(|| of(false))
    }

    /// Takes over which node each of these routes follows; returns the nodes for which that changes something.
    fn follow(&mut self, routes: &BTreeMap<IpNet, Option<Route>>) -> Vec<(NodeName, Vec<IpNet>)> {
        let mut touched = BTreeSet::new();
        for (net, route) in routes {
            let node = route.as_ref().and_then(|route| route.node.clone());
            let before = match node.clone() {
                Some(node) => self.follower.insert(*net, node),
                None => self.follower.remove(net),
            };
            if before == node {
                continue;
            }
            if let Some(before) = before {
                if let Some(nets) = self.following.get_mut(&before) {
                    nets.remove(net);
                }
                touched.insert(before);
            }
            if let Some(node) = node {
                self.following.entry(node.clone()).or_default().insert(*net);
                touched.insert(node);
            }
        }
        let of = |node: NodeName| {
            let nets: Vec<_> = self.following.get(&node).into_iter().flatten().copied().collect();
            if nets.is_empty() {
                self.following.remove(&node);
            }
            (node, nets)
        };
        touched.into_iter().map(of).collect()
    }

    /// The pods of the node that this host is. An edge node is never this host, whatever addresses it reports: its pods
    /// must not reach the other sites. For the same reason a node that names this host's address after another is not.
    fn pods_here(&self, config: &RouterConfig) -> Vec<IpNet> {
        let here: BTreeSet<&NodeName> = match &config.host {
            Some(name) => std::iter::once(name).collect(),
            None => {
                let claims = &self.plan.claims;
                let named = self.host.iter().flat_map(|address| {
                    claims.cloud_nodes(*address).filter(move |node| claims.was_first(node, *address))
                });
                named.collect()
            }
        };
        let nodes = here.into_iter().filter_map(|name| self.inventory.get(name.as_str()));
        let ranges = nodes.filter(|node| !node.edge).flat_map(|node| node.pod_cidrs.iter().copied());
        ranges.filter(|range| range.prefix_len() >= widest_clients(*range)).collect()
    }

    /// What there is too little of.
    fn shortage(&self) -> Shortage {
        let mut tokens = [[0; 2]; 2];
        for (key, _) in self.lacking.iter().filter(|(_, lack)| **lack == Lack::Range) {
            tokens[usize::from(!key.is_ipv4())][usize::from(key.pods)] += 1;
        }
        Shortage { routes: self.table.waiting(), tokens }
    }

    #[cfg(test)]
    pub(super) fn set_room(&mut self, most: usize) {
        self.table = Capacity::new(most);
    }
}

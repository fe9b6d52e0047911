//! From an inventory to routes, with what has to be remembered from one inventory to the next. Knows nothing of tunnels.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tunnel_core::identity::NodeName;

use super::claims::Claims;
use super::config::RouterConfig;
use super::conflict::ConflictKind;
use super::plan::{Holder, Plan, Rules};
use super::report::Reports;
use super::snapshot::Snapshot;
use super::tokens::{Owner, Tokens};
use crate::inventory::Inventory;
use crate::redirect::{MAX_ROUTES, RouteTarget};

/// Delays that end within this time are handled in one computation.
const DEBOUNCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Planner {
    pub(super) tokens: Tokens,
    pub(super) claims: Claims,
    /// This host's addresses as last known.
    host: HashSet<IpAddr>,
    /// The API server and the Services.
    foreign: Vec<IpNet>,
    reports: Reports,
}

/// What follows from an inventory.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) excluded: BTreeSet<IpNet>,
    pub(super) clients: BTreeSet<IpNet>,
    /// All of them down.
    pub(super) routes: BTreeMap<IpNet, RouteTarget>,
    /// The keys in `routes` whose `up` follows the node.
    pub(super) routes_of: HashMap<NodeName, Vec<IpNet>>,
    /// When the same inventory yields something else.
    pub(super) due: Option<Instant>,
    /// Whether [`Planner::claims`] are others than before.
    pub(super) claims_changed: bool,
}

impl Planner {
    pub(super) fn new(config: &RouterConfig, registry: &mut Registry) -> Self {
        Self {
            tokens: Tokens::new(config.token_range, config.token_range_v6),
            claims: Claims::default(),
            host: HashSet::new(),
            foreign: config.foreign.clone(),
            reports: Reports::register(registry),
        }
    }

    /// True when the ranges are others than before.
    pub(super) fn set_services(&mut self, config: &RouterConfig, ranges: Vec<IpNet>) -> bool {
        let foreign: Vec<IpNet> = config.foreign.iter().copied().chain(ranges).collect();
        let changed = foreign != self.foreign;
        self.foreign = foreign;
        changed
    }

    /// Reads this host's addresses again; true when they have changed.
    pub(super) fn refresh_host(&mut self, config: &RouterConfig) -> bool {
        match (config.host_addresses)() {
            Some(addresses) if addresses != self.host => {
                self.host = addresses;
                true
            }
            _ => false,
        }
    }

    pub(super) fn plan(&mut self, config: &RouterConfig, inventory: Arc<Inventory>, now: Instant) -> Planned {
        let token_ranges = config.token_ranges();
        let rules = Rules {
            edge_addresses: &config.edge_addresses,
            exclude: &config.exclude,
            token_ranges: &token_ranges,
            foreign: &self.foreign,
            pods: &config.pods,
            host: &self.host,
        };
        let mut plan = Plan::new(&inventory, &rules, &self.claims, now);
        if !config.pods.is_empty() {
            plan.route_pods(&inventory, &token_ranges, &config.pods);
        }
        self.fit(&mut plan, &inventory, MAX_ROUTES);
        let pods = plan.pods.iter().map(|(range, index)| pods_of(&inventory, *index, *range));
        let owners =
            plan.routed.iter().map(|address| owner(&inventory, &plan, *address)).chain(pods).collect();
        let assigned = self.tokens.assign(owners, now);

        let mut routes = BTreeMap::new();
        let mut routes_of: HashMap<NodeName, Vec<IpNet>> = HashMap::new();
        let mut tokens = HashMap::with_capacity(assigned.len());
        let mut lacking = false;
        for address in std::mem::take(&mut plan.routed) {
            let token = assigned.get(&owner(&inventory, &plan, address)).copied().flatten();
            match (token, &plan.holders[&address]) {
                (Some(token), Holder::One(index)) => {
                    let name = &inventory.nodes[*index].name;
                    routes_of.entry(name.clone()).or_default().push(IpNet::from(address));
                    tokens.insert(token, (*index, address));
                }
                // Always down: a connect that fails is better than one that reaches the wrong site.
                (Some(_), Holder::Several(_)) => {}
                (None, holder) => {
                    let indices = holder.indices();
                    plan.conflict(ConflictKind::NoToken, Some(address), &inventory, &indices);
                    lacking = true;
                }
            }
            let token = token.unwrap_or_else(|| self.tokens.unassigned(address));
            routes.insert(IpNet::from(address), RouteTarget { token, up: false, any_port: false });
        }
        let mut blocks = BTreeMap::new();
        for (range, index) in std::mem::take(&mut plan.pods) {
            let Some(token) = assigned.get(&pods_of(&inventory, index, range)).copied().flatten() else {
                plan.conflict(ConflictKind::NoTokenBlock, Some(range.network()), &inventory, &[index]);
                lacking = true;
                continue;
            };
            routes_of.entry(inventory.nodes[index].name.clone()).or_default().push(range);
            routes.insert(range, RouteTarget { token, up: false, any_port: true });
            if let Ok(block) = IpNet::new(token, range.prefix_len()) {
                blocks.insert(token, (block, index, range));
            }
        }

        let clients = config.clients.iter().copied().chain(self.pods_here(config, &inventory, &plan.claims));
        let clients = clients.collect();
        let free = if lacking { self.tokens.due(now) } else { None };
        let due = plan.claims.due(now).into_iter().chain(free).min().map(|at| at.max(now + DEBOUNCE));
        let names = inventory.nodes.iter().enumerate().filter(|(_, node)| node.edge);
        let names = names.map(|(index, node)| (node.name.clone(), index)).collect();
        let conflicts = plan.conflicts.iter().cloned().collect();
        self.reports.report(plan.conflicts, now);
        let claims_changed = self.claims != plan.claims;
        self.claims = plan.claims;
        let snapshot = Snapshot { inventory, names, holders: plan.holders, tokens, blocks, conflicts };
        let (snapshot, excluded) = (Arc::new(snapshot), plan.excluded);
        Planned { snapshot, excluded, clients, routes, routes_of, due, claims_changed }
    }

    /// The pods of the node that this host is. An edge node is never this host, whatever addresses it reports: its pods
    /// must not reach the other sites. For the same reason a node that names this host's address after another is not.
    fn pods_here<'a>(
        &'a self,
        config: &'a RouterConfig,
        inventory: &'a Inventory,
        claims: &'a Claims,
    ) -> impl Iterator<Item = IpNet> + 'a {
        let cloud = inventory.nodes.iter().filter(|node| !node.edge);
        let here = cloud.filter(move |node| match &config.host {
            Some(name) => node.name == *name,
            None => {
                let mut shared = node.addresses.iter().filter(|address| self.host.contains(address));
                shared.any(|address| claims.was_first(&node.name, *address))
            }
        });
        here.flat_map(|node| node.pod_cidrs.iter().copied())
    }

    /// Leaves out the routes for which the kernel's tables, of `most` each, have no room; those that are there already
    /// stay.
    fn fit(&self, plan: &mut Plan, inventory: &Inventory, most: usize) {
        for ipv4 in [true, false] {
            let addresses = plan.routed.iter().filter(|address| address.is_ipv4() == ipv4);
            let pods = plan.pods.keys().filter(|range| range.network().is_ipv4() == ipv4);
            if addresses.clone().count() + pods.clone().count() <= most {
                continue;
            }
            let addresses = addresses.map(|address| {
                (self.tokens.has(&owner(inventory, plan, *address)), IpNet::from(*address), false)
            });
            let pods = plan.pods.iter().filter(|(range, _)| range.network().is_ipv4() == ipv4);
            let pods = pods
                .map(|(range, index)| (self.tokens.has(&pods_of(inventory, *index, *range)), *range, true));
            let mut wanted: Vec<_> = addresses.chain(pods).collect();
            wanted.sort_by_key(|(known, ..)| !known);
            for (_, net, pods) in wanted.split_off(most) {
                let address = net.network();
                let indices = if pods {
                    plan.pods.remove(&net).into_iter().collect()
                } else {
                    plan.routed.remove(&address);
                    plan.holders[&address].indices()
                };
                plan.conflict(ConflictKind::NoRoom, Some(address), inventory, &indices);
            }
        }
    }
}

fn owner(inventory: &Inventory, plan: &Plan, address: IpAddr) -> Owner {
    match &plan.holders[&address] {
        Holder::One(index) => Owner::Node(inventory.nodes[*index].name.clone(), address),
        Holder::Several(_) => Owner::Contested(address),
    }
}

fn pods_of(inventory: &Inventory, index: usize, range: IpNet) -> Owner {
    Owner::Pods(inventory.nodes[index].name.clone(), range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::InventoryNode;
    use crate::route::Conflict;

    #[test]
    fn addresses_and_pods_share_a_table_and_what_is_there_stays() {
        let node = |name: &str, addresses: &[&str], pods: &[&str]| InventoryNode {
            name: name.parse().unwrap(),
            edge: true,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            left_out: 0,
            kubelet_port: 10250,
            pod_cidrs: pods.iter().map(|range| range.parse().unwrap()).collect(),
            created: None,
        };
        let mut planner = Planner {
            tokens: Tokens::new("198.18.0.0/15".parse().unwrap(), "fd00:706f::/64".parse().unwrap()),
            claims: Claims::default(),
            host: HashSet::new(),
            foreign: Vec::new(),
            reports: Reports::register(&mut Registry::default()),
        };
        let nodes = vec![
            node("edge-1", &["10.8.0.1", "fd00:8::1"], &["10.244.1.0/24"]),
            node("edge-2", &["10.8.0.2"], &[]),
            node("edge-3", &["10.8.0.3"], &[]),
        ];
        let inventory = Inventory { nodes };
        let there = Owner::Node("edge-2".parse().unwrap(), "10.8.0.2".parse().unwrap());
        planner.tokens.assign(vec![there], Instant::now());
        let (allowed, host) = (["10.244.0.0/16".parse().unwrap()], HashSet::new());
        let rules = Rules {
            edge_addresses: &[],
            exclude: &[],
            token_ranges: &[],
            foreign: &[],
            pods: &allowed,
            host: &host,
        };
        let fitted = |most: usize| {
            let mut plan = Plan::new(&inventory, &rules, &Claims::default(), Instant::now());
            plan.route_pods(&inventory, &[], &allowed);
            planner.fit(&mut plan, &inventory, most);
            let left: Vec<_> = plan.conflicts.into_iter().collect();
            let nets = plan.routed.into_iter().map(IpNet::from).chain(plan.pods.into_keys());
            (nets.map(|net| net.to_string()).collect::<Vec<_>>(), left)
        };
        let all = ["10.8.0.1/32", "10.8.0.2/32", "10.8.0.3/32", "fd00:8::1/128", "10.244.1.0/24"];
        assert_eq!(fitted(4), (all.map(str::to_owned).to_vec(), Vec::new()));
        let left = |address: &str, node: &str| Conflict {
            kind: ConflictKind::NoRoom,
            address: Some(address.parse().unwrap()),
            nodes: vec![node.parse().unwrap()],
            holder: None,
        };
        let pods = left("10.244.1.0", "edge-1");
        // The table of IPv6 routes has room.
        assert_eq!(fitted(3), (all[..4].iter().map(ToString::to_string).collect(), vec![pods.clone()]));
        let (routed, conflicts) = fitted(1);
        assert_eq!(routed, ["10.8.0.2/32", "fd00:8::1/128"]);
        assert_eq!(conflicts, [left("10.8.0.1", "edge-1"), left("10.8.0.3", "edge-3"), pods]);
    }
}

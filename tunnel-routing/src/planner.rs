//! Turns inventories into routes, with the state kept from one inventory to the next. Independent of tunnels.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use prometheus_client::registry::Registry;

use super::claims::Claims;
use super::config::RouterConfig;
use super::conflict::ConflictKind;
use super::desired::{MAX_ROUTES, Route, Table};
use super::plan::{AddressHolder, Plan, Rules};
use super::report::{Reports, Shortage};
use super::snapshot::{PodBlock, Snapshot};
use super::virtual_addresses::{Lack, Owner, VirtualAddresses};
use crate::inventory::Inventory;

/// Shortest prefix of this host's pod ranges that may use the redirect. A Node may name 0.0.0.0/0, which contains every
/// neighbour.
fn widest_clients(range: IpNet) -> u8 {
    if range.addr().is_ipv4() { 8 } else { 32 }
}

/// Delays that end within this time are handled in one computation.
const DEBOUNCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Planner {
    pub(super) virtual_addresses: VirtualAddresses,
    pub(super) claims: Claims,
    /// This host's addresses as last known, and with their networks.
    pub(super) host: Arc<HashSet<IpAddr>>,
    networks: HashSet<IpNet>,
    /// The API server and the Services.
    foreign: Vec<IpNet>,
    /// The last plan's table, whose routes keep their room in the kernel.
    table: Arc<Table>,
    /// Maximum number of routes of each family in the kernel.
    room: usize,
    reports: Reports,
}

/// The result for an inventory.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) table: Arc<Table>,
    /// Time at which the same inventory has another result.
    pub(super) due: Option<Instant>,
    /// True if [`Planner::claims`] changed.
    pub(super) claims_changed: bool,
}

impl Planner {
    pub(super) fn new(config: &RouterConfig, registry: &mut Registry) -> Self {
        Self {
            virtual_addresses: VirtualAddresses::new(config.redirect_range, config.redirect_range_v6),
            claims: Claims::default(),
            host: Arc::default(),
            networks: HashSet::new(),
            foreign: config.foreign.clone(),
            table: Arc::default(),
            room: MAX_ROUTES,
            reports: Reports::register(registry),
        }
    }

    /// Returns true if the ranges changed.
    pub(super) fn set_services(&mut self, config: &RouterConfig, ranges: Vec<IpNet>) -> bool {
        let foreign: Vec<IpNet> = config.foreign.iter().copied().chain(ranges).collect();
        let changed = foreign != self.foreign;
        self.foreign = foreign;
        changed
    }

    /// The ranges last set by `set_services`.
    pub(super) fn services(&self, config: &RouterConfig) -> Vec<IpNet> {
        self.foreign.get(config.foreign.len()..).unwrap_or_default().to_vec()
    }

    /// Rereads this host's addresses; returns true if they changed.
    pub(super) fn refresh_host(&mut self, config: &RouterConfig) -> bool {
        match (config.host_addresses)() {
            Some(networks) if networks != self.networks => {
                self.host = Arc::new(networks.iter().map(IpNet::addr).collect());
                self.networks = networks;
                true
            }
            _ => false,
        }
    }

    pub(super) fn plan(&mut self, config: &RouterConfig, inventory: Arc<Inventory>, now: Instant) -> Planned {
        let redirect_ranges = config.redirect_ranges();
        let rules = Rules {
            edge_addresses: &config.edge_addresses,
            exclude: &config.exclude,
            redirect_ranges: &redirect_ranges,
            foreign: &self.foreign,
            pods: &config.pods,
            host: &self.host,
            networks: &self.networks,
        };
        let mut plan = Plan::new(&inventory, &rules, &self.claims, now);
        let left_out = self.fit(&mut plan, &inventory);
        let pods = plan.pods.iter().map(|(range, node)| (*range, inventory[*node].name.clone()));
        plan.claims.pods = pods.collect();
        let given = self.assign(&mut plan, &inventory, now);
        let clients = config.clients.iter().copied().chain(self.pods_here(config, &inventory, &plan.claims));
        let nodes = inventory.iter().map(|node| (node.name.clone(), Vec::new())).collect();
        let edge = inventory.iter().map(|node| node.edge).collect();
        let (excluded, clients) = (std::mem::take(&mut plan.excluded), clients.collect());
        let mut table = Table { excluded, clients, routes: given.routes, nodes, edge };
        for (net, route) in &table.routes {
            if let Some(node) = route.node {
                table.nodes[node].1.push(*net);
            }
        }
        if *self.table != table {
            self.table = Arc::new(table);
        }

        let free = if given.lacking { self.virtual_addresses.due(now) } else { None };
        let due = plan.claims.due(now).into_iter().chain(free).min().map(|at| at.max(now + DEBOUNCE));
        let conflicts = Arc::new(plan.conflicts);
        self.reports.report(&conflicts, now);
        self.reports
            .shortage(Shortage { routes: left_out, virtual_addresses: given.used_up }, &redirect_ranges);
        let claims_changed = self.claims != plan.claims;
        self.claims = plan.claims;
        let Given { virtual_addresses, blocks, pods, .. } = given;
        let snapshot =
            Snapshot { inventory, holders: plan.holders, virtual_addresses, blocks, pods, conflicts };
        Planned { snapshot: Arc::new(snapshot), table: self.table.clone(), due, claims_changed }
    }

    /// Leaves out the routes for which the kernel has no room, preferring to keep those already there. Returns the
    /// number left out, IPv4 first.
    fn fit(&self, plan: &mut Plan, inventory: &Inventory) -> [usize; 2] {
        [true, false].map(|ipv4| {
            let addresses = plan.routed.iter().map(|address| (IpNet::from(*address), false));
            let pods = plan.pods.keys().map(|range| (*range, true));
            let of_family = addresses.chain(pods).filter(|(net, _)| net.network().is_ipv4() == ipv4);
            let mut wanted: Vec<_> = of_family.collect();
            if wanted.len() <= self.room {
                return 0;
            }
            wanted.sort_by_key(|(net, any_port)| {
                self.table.routes.get(net).is_none_or(|route| route.any_port != *any_port)
            });
            let left_out = wanted.split_off(self.room);
            for (net, any_port) in &left_out {
                let address = net.network();
                let nodes = if *any_port {
                    plan.pods.remove(net).into_iter().collect()
                } else {
                    plan.routed.remove(&address);
                    plan.holders[&address].nodes().to_vec()
                };
                plan.conflict(ConflictKind::NoRoom, Some(address), inventory, &nodes);
            }
            left_out.len()
        })
    }

    /// Assigns virtual addresses to the routes of the plan.
    fn assign(&mut self, plan: &mut Plan, inventory: &Inventory, now: Instant) -> Given {
        let name = |node: &usize| inventory[*node].name.clone();
        let addresses = plan.routed.iter().map(|address| match &plan.holders[address] {
            AddressHolder::One(node) => Owner::Node(name(node), *address),
            AddressHolder::Several(_) => Owner::Contested(*address),
        });
        let pods = plan.pods.iter().map(|(range, node)| Owner::Pods(name(node), *range));
        let owners: Vec<_> = addresses.chain(pods).collect();
        let assigned = self.virtual_addresses.assign(&owners, now);
        let (of_addresses, of_pods) = assigned.split_at(plan.routed.len());
        let mut given =
            Given { virtual_addresses: HashMap::with_capacity(of_addresses.len()), ..Given::default() };
        let mut routes = Vec::with_capacity(assigned.len());
        for (address, virtual_address) in std::mem::take(&mut plan.routed).into_iter().zip(of_addresses) {
            let holder = &plan.holders[&address];
            let node = match (virtual_address, holder) {
                (Ok(virtual_address), AddressHolder::One(node)) => {
                    given.virtual_addresses.insert(*virtual_address, (*node, address));
                    Some(*node)
                }
                // Always down: a failed connect is better than one that reaches the wrong site.
                (Ok(_), AddressHolder::Several(_)) | (Err(_), _) => None,
            };
            if let Err(lack) = virtual_address {
                let nodes = holder.nodes().to_vec();
                plan.conflict(ConflictKind::NoVirtualAddress, Some(address), inventory, &nodes);
                given.lacks(*lack, address, false);
            }
            let virtual_address =
                virtual_address.unwrap_or_else(|_| self.virtual_addresses.unassigned(address));
            routes.push((IpNet::from(address), Route { virtual_address, any_port: false, node }));
        }
        for ((range, node), virtual_address) in std::mem::take(&mut plan.pods).into_iter().zip(of_pods) {
            let first = range.network();
            match virtual_address {
                Ok(virtual_address) => {
                    // Replaces a node's route for the same network: later entries win.
                    routes.push((
                        range,
                        Route { virtual_address: *virtual_address, any_port: true, node: Some(node) },
                    ));
                    if let Ok(block) = IpNet::new(*virtual_address, range.prefix_len()) {
                        given.blocks.insert(*virtual_address, (block, node, range));
                        given.pods.insert(first, (range, node));
                    }
                }
                Err(lack) => {
                    plan.conflict(ConflictKind::NoVirtualRange, Some(first), inventory, &[node]);
                    given.lacks(*lack, first, true);
                }
            }
        }
        given.routes = routes.into_iter().collect();
        given
    }

    /// The pods of this host's node. An edge node is never this host, whatever addresses it reports: its pods must not
    /// reach the other sites. For the same reason a node that claims this host's address after another node does not
    /// count.
    fn pods_here<'a>(
        &'a self,
        config: &'a RouterConfig,
        inventory: &'a Inventory,
        claims: &'a Claims,
    ) -> impl Iterator<Item = IpNet> + 'a {
        let here = inventory.iter().filter(|node| !node.edge).filter(move |node| match &config.host {
            Some(name) => node.name == *name,
            None => {
                let mut shared = node.addresses.iter().filter(|address| self.host.contains(address));
                shared.any(|address| claims.was_first(&node.name, *address))
            }
        });
        let ranges = here.flat_map(|node| node.pod_cidrs.iter().copied());
        ranges.filter(|range| range.prefix_len() >= widest_clients(*range))
    }
}

/// The routes of a plan with their virtual addresses, and the targets of the virtual addresses.
#[derive(Debug, Default)]
struct Given {
    routes: BTreeMap<IpNet, Route>,
    /// See [`Snapshot`] for this and the next two.
    virtual_addresses: HashMap<IpAddr, (usize, IpAddr)>,
    blocks: BTreeMap<IpAddr, PodBlock>,
    pods: BTreeMap<IpAddr, (IpNet, usize)>,
    /// True if anything is without a virtual address.
    lacking: bool,
    /// See [`Shortage::virtual_addresses`].
    used_up: [[usize; 2]; 2],
}

impl Given {
    fn lacks(&mut self, lack: Lack, address: IpAddr, pods: bool) {
        self.lacking = true;
        if lack == Lack::Range {
            self.used_up[usize::from(address.is_ipv6())][usize::from(pods)] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Conflict;
    use crate::inventory::InventoryNode;

    #[test]
    fn addresses_and_pods_share_a_table_and_what_is_there_stays() {
        let node = |name: &str, addresses: &[&str], pods: &[&str]| InventoryNode {
            edge: true,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            pod_cidrs: pods.iter().map(|range| range.parse().unwrap()).collect(),
            ..InventoryNode::new(name.parse().unwrap())
        };
        let nodes = [
            node("edge-1", &["10.8.0.1", "fd00:8::1"], &["10.244.1.0/24"]),
            node("edge-2", &["10.8.0.2"], &[]),
            node("edge-3", &["10.8.0.3"], &[]),
        ];
        let config = RouterConfig {
            pods: vec!["10.244.0.0/16".parse().unwrap()],
            ..RouterConfig::new("198.18.0.0/15".parse().unwrap(), "fd00:706f::/64".parse().unwrap(), [10250])
        };
        let left = |address: &str, node: &str| Conflict {
            kind: ConflictKind::NoRoom,
            address: Some(address.parse().unwrap()),
            nodes: vec![node.parse().unwrap()],
            holder: None,
        };
        let fitted = |room: usize| {
            let mut planner = Planner { room, ..Planner::new(&config, &mut Registry::default()) };
            // The second node's route is there already; an address that leaves makes room.
            let rounds = [&nodes[1..2], &nodes[..], &nodes[..2], &nodes[..]].map(|nodes| {
                let inventory = Arc::new(Inventory::from(nodes.to_vec()));
                let planned = planner.plan(&config, inventory, Instant::now());
                planned.snapshot.conflicts().iter().cloned().collect::<Vec<_>>()
            });
            let routed: Vec<_> = planner.table.routes.keys().map(ToString::to_string).collect();
            (routed, rounds)
        };
        let all = ["10.8.0.1/32", "10.8.0.2/32", "10.8.0.3/32", "10.244.1.0/24", "fd00:8::1/128"];
        assert_eq!(fitted(4), (all.map(str::to_owned).to_vec(), [(); 4].map(|()| Vec::new())));
        let pods = left("10.244.1.0", "edge-1");
        // The table of IPv6 routes has room. The pods get the room of the address that left, and keep it.
        let (routed, conflicts) = fitted(3);
        assert_eq!(routed, [all[0], all[1], all[3], all[4]]);
        assert_eq!(conflicts, [vec![], vec![pods.clone()], vec![], vec![left("10.8.0.3", "edge-3")]]);
        let (routed, conflicts) = fitted(1);
        assert_eq!(routed, [all[1], all[4]]);
        assert_eq!(conflicts[3], [left("10.8.0.1", "edge-1"), left("10.8.0.3", "edge-3"), pods]);
    }
}

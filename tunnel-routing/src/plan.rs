//! Computes the routes of an inventory from the rules and the earlier claims, without side effects.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::claims::Claims;
use super::conflict::{Conflict, ConflictKind};
use crate::inventory::{Inventory, InventoryNode};

/// Pod ranges of cloud nodes that are wider than these prefixes reserve no addresses: no node has so many pods, and a
/// kubelet reports its own range.
const WIDEST_CLOUD_PODS: (u8, u8) = (16, 64);

/// Rules for edge nodes' addresses, besides the cloud nodes' claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    /// Empty for any address of a host.
    pub(super) edge_addresses: &'a [IpNet],
    /// Ranges that the operator excluded: never redirected.
    pub(super) exclude: &'a [IpNet],
    pub(super) redirect_ranges: &'a [IpNet],
    /// The API server and the Services.
    pub(super) foreign: &'a [IpNet],
    /// Ranges in which edge nodes' pods are redirected too.
    pub(super) pods: &'a [IpNet],
    /// This host's addresses.
    pub(super) host: &'a HashSet<IpAddr>,
    /// The same with their networks.
    pub(super) networks: &'a HashSet<IpNet>,
}

/// The node or nodes that an address leads to, by their indexes in the inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddressHolder {
    One(usize),
    /// In ascending order.
    Several(Vec<usize>),
}

impl AddressHolder {
    pub(super) fn nodes(&self) -> &[usize] {
        match self {
            Self::One(node) => std::slice::from_ref(node),
            Self::Several(nodes) => nodes,
        }
    }
}

/// The result for an inventory. Nodes are given by their indexes in it.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The operator's ranges and the cloud nodes' addresses.
    pub(super) excluded: BTreeSet<IpNet>,
    /// Addresses of edge nodes; clients of the listeners that take names may use any of them.
    pub(super) holders: BTreeMap<IpAddr, AddressHolder>,
    /// The redirected ones of `holders`.
    pub(super) routed: BTreeSet<IpAddr>,
    /// Redirected ranges of edge nodes' pods. They do not overlap.
    pub(super) pods: BTreeMap<IpNet, usize>,
    pub(super) conflicts: BTreeSet<Conflict>,
    /// Claims that the next inventory follows.
    pub(super) claims: Claims,
}

impl Plan {
    /// `before` are the claims of the previous inventory.
    pub(super) fn new(inventory: &Inventory, rules: &Rules<'_>, before: &Claims, now: Instant) -> Self {
        if inventory.is_empty() {
            // An empty inventory does not show the first holder of any address.
            let excluded = rules.exclude.iter().copied().collect();
            return Self { excluded, claims: before.clone(), ..Self::default() };
        }
        let mut plan = Self { claims: before.followed_by(inventory, now), ..Self::default() };
        let mut named: Vec<(IpAddr, usize)> = Vec::with_capacity(inventory.len());
        for (place, node) in inventory.iter().enumerate() {
            if node.left_out > 0 {
                plan.conflict(ConflictKind::TooMany, None, inventory, &[place]);
            }
            if node.edge && node.addresses.is_empty() {
                plan.conflict(ConflictKind::NoAddress, None, inventory, &[place]);
            }
            if node.edge {
                named.extend(node.addresses.iter().map(|address| (*address, place)));
            }
        }
        named.sort_unstable();
        // A node that lists an address twice counts once.
        named.dedup();
        let reserved = Reserved::new(inventory, rules, &plan.claims, now);
        for same in named.chunk_by(|(one, _), (other, _)| one == other) {
            let nodes = same.iter().map(|(_, place)| *place).collect();
            plan.decide(same[0].0, nodes, inventory, rules, before, &reserved);
        }
        let cloud = plan.claims.excluded(now).filter(|address| !plan.claims.edge.contains_key(address));
        plan.excluded = rules.exclude.iter().copied().chain(cloud.map(IpNet::from)).collect();
        // Without ranges for redirected pods, pod ranges are not conflicts.
        if !rules.pods.is_empty() {
            plan.route_pods(inventory, rules);
        }
        plan
    }

    /// Decides about an address that these edge nodes name, which are ordered by name.
    fn decide(
        &mut self,
        address: IpAddr,
        nodes: Vec<usize>,
        inventory: &Inventory,
        rules: &Rules<'_>,
        before: &Claims,
        reserved: &Reserved,
    ) {
        let within = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        let first = before.edge.get(&address);
        let first =
            first.and_then(|first| nodes.iter().copied().find(|node| inventory[*node].name == *first));
        let refused = if !is_host(address) || within(rules.redirect_ranges) {
            Some(ConflictKind::Unroutable)
        } else if !rules.edge_addresses.is_empty() && !within(rules.edge_addresses) {
            Some(ConflictKind::NotEdge)
        } else if rules.host.contains(&address) || within(rules.foreign) {
            Some(ConflictKind::Foreign)
        } else if reserved.cloud.contains(&address)
            || first.is_none() && self.claims.cloud_nodes(address).next().is_some()
        {
            Some(ConflictKind::CloudAndEdge)
        } else if within(&reserved.own) {
            Some(ConflictKind::CloudNetwork)
        } else if first.is_some() {
            // Nothing else of a cloud node affects the node that has the address: it may be an edge node without its label.
            None
        } else if around(address).is_some_and(|net| reserved.around.contains(&net)) {
            Some(ConflictKind::CloudNetwork)
        } else if reserved.pods.of_another(address, &nodes) {
            Some(ConflictKind::Foreign)
        } else {
            None
        };
        if let Some(kind) = refused {
            // It has the address again once the network is gone: an interface may come and go.
            if let (ConflictKind::CloudNetwork, Some(first)) = (kind, first) {
                self.claims.edge.insert(address, inventory[first].name.clone());
            }
            return self.conflict(kind, Some(address), inventory, &nodes);
        }
        let holder = match first.or_else(|| oldest(inventory, &nodes)) {
            Some(holder) => {
                self.hold(address, holder, &nodes, inventory);
                AddressHolder::One(holder)
            }
            None => {
                self.conflict(ConflictKind::Ambiguous, Some(address), inventory, &nodes);
                AddressHolder::Several(nodes)
            }
        };
        if within(rules.exclude) {
            self.conflict(ConflictKind::Excluded, Some(address), inventory, holder.nodes());
        } else {
            self.routed.insert(address);
        }
        self.holders.insert(address, holder);
    }

    /// Records that the address is `holder`'s and not that of others that also name it.
    fn hold(&mut self, address: IpAddr, holder: usize, nodes: &[usize], inventory: &Inventory) {
        let name = inventory[holder].name.clone();
        let late = nodes.iter().filter(|node| **node != holder).map(|node| &inventory[*node].name);
        let mut late: Vec<_> = late.chain(self.claims.cloud_nodes(address)).cloned().collect();
        if !late.is_empty() {
            late.sort_unstable();
            let (kind, holder) = (ConflictKind::Taken, Some(name.clone()));
            self.conflicts.insert(Conflict { kind, address: Some(address), nodes: late, holder });
        }
        self.claims.edge.insert(address, name);
    }

    /// Routes the pods of edge nodes. Overlapping ranges are not routed, as the intended pod is unknown. Nor are ranges
    /// outside those that the operator gave to pods, nor those of this host, the API server or the Services: a kubelet
    /// can choose its own range, and must not take over the others.
    fn route_pods(&mut self, inventory: &Inventory, rules: &Rules<'_>) {
        let taken = rules.redirect_ranges.iter().chain(rules.foreign).copied();
        let taken = taken.chain(rules.host.iter().map(|address| IpNet::from(*address)));
        let mut claims: Vec<(IpNet, Claim)> = taken.map(|net| (net, Claim::Taken)).collect();
        claims.extend(self.excluded.iter().map(|net| (*net, Claim::Excluded)));
        for (place, node) in inventory.iter().enumerate() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc) {
                match node.edge {
                    true if within_pods(range, rules) => claims.push((range, Claim::Pods(place))),
                    // It affects its own node only, even if it is 0.0.0.0/0.
                    true => {
                        self.conflict(ConflictKind::PodRange, Some(range.network()), inventory, &[place]);
                    }
                    // Also with --edge-addresses, which is about nodes only.
                    false if is_one_nodes(range) => claims.push((range, Claim::Taken)),
                    false => {}
                }
            }
        }
        // This order puts a range right after those that contain it.
        claims.sort_by_key(|(net, _)| (net.network(), net.prefix_len()));
        let overlapping = overlapping(&claims);
        for ((net, claim), overlaps) in claims.into_iter().zip(overlapping) {
            let Claim::Pods(place) = claim else { continue };
            if overlaps || !is_host(net.network()) {
                self.conflict(ConflictKind::PodRange, Some(net.network()), inventory, &[place]);
            } else {
                self.pods.insert(net, place);
            }
        }
    }

    pub(super) fn conflict(
        &mut self,
        kind: ConflictKind,
        address: Option<IpAddr>,
        inventory: &Inventory,
        nodes: &[usize],
    ) {
        let nodes = nodes.iter().map(|node| inventory[*node].name.clone()).collect();
        self.conflicts.insert(Conflict { kind, address, nodes, holder: None });
    }
}

/// The owner of a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    Excluded,
    /// Virtual addresses, this host, the API server, the Services, or the pods of a cloud node.
    Taken,
    /// The pods of the edge node with this index.
    Pods(usize),
}

/// Marks the ranges that overlap another one. A range must come right after those that contain it.
fn overlapping(claims: &[(IpNet, Claim)]) -> Vec<bool> {
    let mut overlaps = vec![false; claims.len()];
    // Indexes of the ranges that contain the current one, widest first, and the number of them already marked.
    let (mut around, mut known): (Vec<usize>, usize) = (Vec::new(), 0);
    for (place, (net, claim)) in claims.iter().enumerate() {
        while around.pop_if(|outer| !claims[*outer].0.contains(net)).is_some() {}
        known = known.min(around.len());
        // An excluded part leaves the rest of a range usable: exclusion takes precedence at connect().
        if *claim != Claim::Excluded && !around.is_empty() {
            around[known..].iter().for_each(|outer| overlaps[*outer] = true);
            overlaps[place] = true;
            known = around.len() + 1;
        }
        around.push(place);
    }
    overlaps
}

/// The node that was created before all others; None if unknown. A single node needs no age.
fn oldest(inventory: &Inventory, nodes: &[usize]) -> Option<usize> {
    if let [node] = nodes {
        return Some(*node);
    }
    let mut ages = Vec::with_capacity(nodes.len());
    for node in nodes {
        ages.push((inventory[*node].created?, *node));
    }
    ages.sort_unstable();
    match ages[..] {
        [first, second, ..] if first.0 < second.0 => Some(first.1),
        _ => None,
    }
}

/// Addresses that edge nodes do not get.
struct Reserved {
    /// Of cloud nodes, whoever had them before.
    cloud: HashSet<IpAddr>,
    /// This host's networks; empty with --edge-addresses, by which the operator says what is an edge node's.
    own: Vec<IpNet>,
    /// Networks around the addresses of cloud nodes, where others may follow; empty with --edge-addresses.
    around: HashSet<IpNet>,
    pods: PodRanges,
}

impl Reserved {
    fn new(inventory: &Inventory, rules: &Rules<'_>, claims: &Claims, now: Instant) -> Self {
        let (mut own, mut near) = (Vec::new(), HashSet::new());
        if rules.edge_addresses.is_empty() {
            let wide = |net: &&IpNet| net.prefix_len() < net.max_prefix_len();
            own.extend(rules.networks.iter().filter(wide).map(IpNet::trunc));
            let cloud = inventory.iter().filter(|node| node.always_cloud());
            let addresses = cloud.flat_map(|node| &node.addresses).filter(|address| is_host(**address));
            near.extend(addresses.filter_map(|address| around(*address)));
        }
        let pods = PodRanges::new(inventory, rules);
        Self { cloud: claims.of_cloud(inventory, now), own, around: near, pods }
    }
}

/// The usual network of a host with this address.
fn around(address: IpAddr) -> Option<IpNet> {
    IpNet::new(address, if address.is_ipv4() { 24 } else { 64 }).ok().map(|net| net.trunc())
}

/// Pod ranges that reserve addresses from other nodes: those of edge nodes that may be redirected, and those of cloud
/// nodes. With --edge-addresses the latter do not count, as the operator named the edge nodes' addresses.
struct PodRanges {
    /// The first node with each range.
    ranges: HashMap<IpNet, usize>,
    prefixes: BTreeSet<u8>,
}

impl PodRanges {
    fn new(inventory: &Inventory, rules: &Rules<'_>) -> Self {
        let counts = |node: &InventoryNode, range: IpNet| match node.edge {
            true => within_pods(range, rules),
            false => rules.edge_addresses.is_empty() && node.always_cloud() && is_one_nodes(range),
        };
        let mut ranges = HashMap::new();
        for (place, node) in inventory.iter().enumerate() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc).filter(|range| counts(node, *range)) {
                ranges.entry(range).or_insert(place);
            }
        }
        let prefixes = ranges.keys().map(IpNet::prefix_len).collect();
        Self { ranges, prefixes }
    }

    /// Reports whether the address is in a pod range of another node than the only one that names it.
    fn of_another(&self, address: IpAddr, nodes: &[usize]) -> bool {
        self.prefixes.iter().any(|prefix| {
            let around = IpNet::new(address, *prefix).ok().and_then(|net| self.ranges.get(&net.trunc()));
            around.is_some_and(|owner| nodes != [*owner])
        })
    }
}

fn within_pods(range: IpNet, rules: &Rules<'_>) -> bool {
    rules.pods.iter().any(|pods| pods.contains(&range))
}

/// Reports whether the range is small enough for one cloud node's pods.
fn is_one_nodes(range: IpNet) -> bool {
    let widest = if range.addr().is_ipv4() { WIDEST_CLOUD_PODS.0 } else { WIDEST_CLOUD_PODS.1 };
    range.prefix_len() >= widest
}

/// Reports whether an address can be that of one host on a network that others reach.
pub(super) fn is_host(address: IpAddr) -> bool {
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return false;
    }
    match address {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && v6.to_ipv4_mapped().is_none(),
    }
}

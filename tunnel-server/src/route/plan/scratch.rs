//! What an inventory routes, computed as a whole: short, slow, and what [`Plan`](super::Plan) has to agree with.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

use crate::inventory::InventoryNode;
use crate::route::claims::CLOUD_CLAIM_DELAY;
use crate::route::conflict::{Conflict, ConflictKind};
use crate::route::rules::{Rules, is_host};

const WIDEST_CLOUD_PODS: (u8, u8) = (16, 64);

/// Nodes sorted by name.
pub(in crate::route) type Nodes = Vec<InventoryNode>;

/// What follows from earlier inventories.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::route) struct Claims {
    /// Whether there was an inventory with nodes; before the first, no node is late.
    pub(in crate::route) known: bool,
    /// The edge node that has an address.
    pub(in crate::route) edge: HashMap<IpAddr, NodeName>,
    /// Cloud nodes that name an address, and when it begins to be excluded.
    cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>>,
}

impl Claims {
    /// These claims with the cloud nodes of `inventory`, and still without edge nodes.
    pub(in crate::route) fn followed_by(&self, inventory: &Nodes, now: Instant) -> Self {
        let mut cloud: HashMap<IpAddr, Vec<(NodeName, Instant)>> = HashMap::new();
        for node in inventory.iter().filter(|node| !node.edge) {
            for address in &node.addresses {
                let before = self.cloud.get(address).into_iter().flatten();
                let before = before.into_iter().find(|(name, _)| *name == node.name).map(|(_, from)| *from);
                let from = before.unwrap_or(if self.known { now + CLOUD_CLAIM_DELAY } else { now });
                let claims = cloud.entry(*address).or_default();
                // A node that lists an address twice is not two nodes.
                if claims.last().is_none_or(|(name, _)| *name != node.name) {
                    claims.push((node.name.clone(), from));
                }
            }
        }
        Self { known: true, edge: HashMap::with_capacity(self.edge.len()), cloud }
    }

    /// Addresses that cloud nodes name.
    pub(in crate::route) fn cloud(&self) -> impl Iterator<Item = &IpAddr> {
        self.cloud.keys()
    }

    pub(in crate::route) fn cloud_nodes(&self, address: IpAddr) -> impl Iterator<Item = &NodeName> {
        self.cloud.get(&address).into_iter().flatten().map(|(name, _)| name)
    }

    /// Whether a cloud node has had the address for long enough.
    pub(in crate::route) fn is_excluded(&self, address: IpAddr, now: Instant) -> bool {
        self.cloud.get(&address).is_some_and(|claims| claims.iter().any(|(_, from)| *from <= now))
    }

    /// Whether no other cloud node named the address before `node` did.
    pub(in crate::route) fn was_first(&self, node: &NodeName, address: IpAddr) -> bool {
        let claims = self.cloud.get(&address).map(Vec::as_slice).unwrap_or_default();
        let first = claims.iter().map(|(_, from)| *from).min();
        claims.iter().any(|(name, from)| name == node && Some(*from) == first)
    }

    /// When the next address begins to be excluded.
    pub(in crate::route) fn due(&self, now: Instant) -> Option<Instant> {
        self.cloud.values().flatten().map(|(_, from)| *from).filter(|from| *from > now).min()
    }
}

/// Which of the inventory's nodes an address leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::route) enum Holder {
    /// Index into the inventory.
    One(usize),
    Several(Vec<usize>),
}

impl Holder {
    /// Sorted.
    pub(in crate::route) fn names(&self, nodes: &Nodes) -> Vec<NodeName> {
        let indices = match self {
            Self::One(index) => std::slice::from_ref(index),
            Self::Several(indices) => indices,
        };
        let mut names: Vec<_> = indices.iter().map(|index| nodes[*index].name.clone()).collect();
        names.sort_unstable();
        names
    }
}

/// What a range of addresses belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    Excluded,
    /// Tokens, or the pods of a cloud node.
    Taken,
    /// The pods of the edge node with this index.
    Pods(usize),
}

/// What follows from an inventory.
#[derive(Debug, Default)]
pub(in crate::route) struct Plan {
    /// The operator's ranges and the cloud nodes' addresses.
    pub(in crate::route) excluded: BTreeSet<IpNet>,
    /// Addresses of edge nodes; clients of the name doors may use any of them.
    pub(in crate::route) holders: HashMap<IpAddr, Holder>,
    /// Those that the redirect routes; the key is in `holders`.
    pub(in crate::route) routed: BTreeSet<IpAddr>,
    /// Ranges of edge nodes' pods that the redirect routes, each with its node's index.
    pub(in crate::route) pods: BTreeMap<IpNet, usize>,
    pub(in crate::route) conflicts: BTreeSet<Conflict>,
    /// What the next inventory follows.
    pub(in crate::route) claims: Claims,
}

impl Plan {
    /// `before` are the claims of the inventory before this one.
    pub(in crate::route) fn new(inventory: &Nodes, rules: &Rules<'_>, before: &Claims, now: Instant) -> Self {
        if inventory.is_empty() {
            // It says nothing about who had an address first.
            return Self {
                excluded: rules.exclude.iter().copied().collect(),
                claims: before.clone(),
                ..Self::default()
            };
        }
        let mut plan = Self { claims: before.followed_by(inventory, now), ..Self::default() };
        let mut wanted: BTreeMap<IpAddr, Vec<usize>> = BTreeMap::new();
        for (index, node) in inventory.iter().enumerate() {
            if node.left_out > 0 {
                plan.conflict(ConflictKind::TooMany, None, inventory, &[index]);
            }
            if !node.edge {
                continue;
            }
            if node.addresses.is_empty() {
                plan.conflict(ConflictKind::NoAddress, None, inventory, &[index]);
            }
            for address in &node.addresses {
                let nodes = wanted.entry(*address).or_default();
                // A node that lists an address twice is not two nodes.
                if nodes.last() != Some(&index) {
                    nodes.push(index);
                }
            }
        }
        let pods = Pods::new(inventory, rules);
        for (address, nodes) in wanted {
            plan.add(address, &nodes, inventory, rules, before, &pods);
        }
        let cloud = plan.claims.cloud().copied();
        let excluded = cloud.filter(|address| {
            !plan.claims.edge.contains_key(address) && plan.claims.is_excluded(*address, now)
        });
        plan.excluded = rules.exclude.iter().copied().chain(excluded.map(IpNet::from)).collect();
        plan
    }

    /// Decides about an address that edge nodes want.
    fn add(
        &mut self,
        address: IpAddr,
        nodes: &[usize],
        inventory: &Nodes,
        rules: &Rules<'_>,
        before: &Claims,
        pods: &Pods,
    ) {
        let within = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        let holder = before.edge.get(&address);
        let holder = nodes.iter().copied().find(|index| Some(&inventory[*index].name) == holder);
        let refused = if !is_host(address) || within(rules.token_ranges) {
            Some(ConflictKind::Unroutable)
        } else if !rules.edge_addresses.is_empty() && !within(rules.edge_addresses) {
            Some(ConflictKind::NotEdge)
        } else if rules.host.contains(&address) || within(rules.foreign) {
            Some(ConflictKind::Foreign)
        } else if holder.is_some() {
            // What cloud nodes say takes nothing from the node that has the address.
            None
        } else if self.claims.cloud_nodes(address).next().is_some() {
            Some(ConflictKind::CloudAndEdge)
        } else if pods.of_another(address, nodes) {
            Some(ConflictKind::Foreign)
        } else {
            None
        };
        if let Some(kind) = refused {
            return self.conflict(kind, Some(address), inventory, nodes);
        }
        let Some(holder) = holder.or_else(|| oldest(inventory, nodes)) else {
            self.conflict(ConflictKind::Ambiguous, Some(address), inventory, nodes);
            self.route(address, Holder::Several(nodes.to_vec()), inventory, rules, nodes);
            return;
        };
        let mut late: Vec<_> = nodes.iter().filter(|index| **index != holder).collect();
        late.sort_unstable();
        let name = &inventory[holder].name;
        let late = late.into_iter().map(|index| &inventory[*index].name);
        let mut late: Vec<_> = late.chain(self.claims.cloud_nodes(address)).cloned().collect();
        if !late.is_empty() {
            late.sort_unstable();
            let (kind, holder) = (ConflictKind::Taken, Some(name.clone()));
            self.conflicts.insert(Conflict { kind, address: Some(address), nodes: late, holder });
        }
        self.claims.edge.insert(address, name.clone());
        self.route(address, Holder::One(holder), inventory, rules, &[holder]);
    }

    fn route(
        &mut self,
        address: IpAddr,
        holder: Holder,
        inventory: &Nodes,
        rules: &Rules<'_>,
        nodes: &[usize],
    ) {
        self.holders.insert(address, holder);
        if rules.exclude.iter().any(|range| range.contains(&address)) {
            self.conflict(ConflictKind::Excluded, Some(address), inventory, nodes);
        } else {
            self.routed.insert(address);
        }
    }

    /// Adds the pods of edge nodes. Ranges that overlap are not routed: it cannot be known which pod was meant. Nor are
    /// ranges outside `allowed`: a kubelet can choose its own, and must not take over the cluster's Services.
    pub(in crate::route) fn route_pods(&mut self, inventory: &Nodes, rules: &Rules<'_>) {
        let allowed = |range: &IpNet| rules.pods.iter().any(|pods| pods.contains(range));
        let excluded = self.excluded.iter().map(|net| (*net, Claim::Excluded));
        let foreign = rules.token_ranges.iter().chain(rules.foreign).copied();
        let foreign = foreign.chain(rules.host.iter().map(|address| IpNet::from(*address)));
        let mut claims: Vec<(IpNet, Claim)> =
            excluded.chain(foreign.map(|net| (net, Claim::Taken))).collect();
        for (index, node) in inventory.iter().enumerate() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc) {
                let widest = if range.addr().is_ipv4() { WIDEST_CLOUD_PODS.0 } else { WIDEST_CLOUD_PODS.1 };
                match node.edge {
                    true if allowed(&range) => claims.push((range, Claim::Pods(index))),
                    true => self.conflict(ConflictKind::PodRange, Some(range.network()), inventory, &[index]),
                    false if range.prefix_len() >= widest => claims.push((range, Claim::Taken)),
                    false => {}
                }
            }
        }
        // In this order a range comes right after those that contain it.
        claims.sort_by_key(|(net, _)| (net.network(), net.prefix_len()));
        let mut bad = HashSet::new();
        let mut around: Vec<usize> = Vec::new();
        for (position, (net, claim)) in claims.iter().enumerate() {
            while around.last().is_some_and(|outer| !claims[*outer].0.contains(net)) {
                around.pop();
            }
            // An excluded part leaves the rest of a range usable: exclusion wins at connect().
            if *claim != Claim::Excluded && !around.is_empty() {
                bad.insert(position);
                bad.extend(around.iter().copied());
            }
            around.push(position);
        }
        for (position, (net, claim)) in claims.into_iter().enumerate() {
            let Claim::Pods(index) = claim else { continue };
            if bad.contains(&position) || !is_host(net.network()) {
                self.conflict(ConflictKind::PodRange, Some(net.network()), inventory, &[index]);
            } else {
                self.pods.insert(net, index);
            }
        }
    }

    pub(in crate::route) fn conflict(
        &mut self,
        kind: ConflictKind,
        address: Option<IpAddr>,
        inventory: &Nodes,
        nodes: &[usize],
    ) {
        let mut nodes: Vec<_> = nodes.iter().map(|index| inventory[*index].name.clone()).collect();
        nodes.sort_unstable();
        self.conflicts.insert(Conflict { kind, address, nodes, holder: None });
    }
}

/// The node that was created before the others; None when that is not known. The only one needs no age.
fn oldest(inventory: &Nodes, nodes: &[usize]) -> Option<usize> {
    if let [index] = nodes {
        return Some(*index);
    }
    let mut ages = Vec::with_capacity(nodes.len());
    for index in nodes {
        ages.push((inventory[*index].created?, *index));
    }
    ages.sort_unstable();
    match ages[..] {
        [first, second, ..] if first.0 < second.0 => Some(first.1),
        _ => None,
    }
}

/// The ranges of pods: those of edge nodes as far as they may be redirected, and those of cloud nodes, which do not count
/// with --edge-addresses: the operator said what is the edge nodes'.
struct Pods {
    /// The first node that has the range.
    ranges: HashMap<IpNet, usize>,
    prefixes: BTreeSet<u8>,
}

impl Pods {
    fn new(inventory: &Nodes, rules: &Rules<'_>) -> Self {
        let counts = |edge: bool, range: &IpNet| match range {
            _ if edge => rules.pods.iter().any(|pods| pods.contains(range)),
            _ if !rules.edge_addresses.is_empty() => false,
            IpNet::V4(range) => range.prefix_len() >= WIDEST_CLOUD_PODS.0,
            IpNet::V6(range) => range.prefix_len() >= WIDEST_CLOUD_PODS.1,
        };
        let mut ranges = HashMap::new();
        for (index, node) in inventory.iter().enumerate() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc).filter(|range| counts(node.edge, range)) {
                ranges.entry(range).or_insert(index);
            }
        }
        let prefixes = ranges.keys().map(IpNet::prefix_len).collect();
        Self { ranges, prefixes }
    }

    /// Whether the address is a pod's of another node than the only one that wants it.
    fn of_another(&self, address: IpAddr, nodes: &[usize]) -> bool {
        self.prefixes.iter().any(|prefix| {
            let around = IpNet::new(address, *prefix).ok().and_then(|net| self.ranges.get(&net.trunc()));
            around.is_some_and(|owner| nodes != [*owner])
        })
    }
}

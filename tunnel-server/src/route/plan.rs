//! Decides what an inventory routes: a pure function, so that a test can compare it with a naive model.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::claims::Claims;
use super::conflict::{Conflict, ConflictKind};
use crate::inventory::Inventory;

/// Pod ranges of cloud nodes that are wider than these prefixes keep no address from the edge nodes: no node's pods need
/// so many, and a kubelet reports its own.
const WIDEST_CLOUD_PODS: (u8, u8) = (16, 64);

/// What may be an edge node's address, besides what the cloud nodes have.
#[derive(Debug)]
pub(super) struct Rules<'a> {
    /// Empty: any address of a host.
    pub(super) edge_addresses: &'a [IpNet],
    /// What the operator excluded: never redirected.
    pub(super) exclude: &'a [IpNet],
    pub(super) token_ranges: &'a [IpNet],
    /// The API server and the Services.
    pub(super) foreign: &'a [IpNet],
    /// Where edge nodes' pods are redirected too.
    pub(super) pods: &'a [IpNet],
    /// This host's addresses.
    pub(super) host: &'a HashSet<IpAddr>,
}

/// Which of the inventory's nodes an address leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Index into the inventory.
    One(usize),
    Several(Vec<usize>),
}

impl Holder {
    pub(super) fn indices(&self) -> Vec<usize> {
        match self {
            Self::One(index) => vec![*index],
            Self::Several(indices) => indices.clone(),
        }
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
pub(super) struct Plan {
    /// The operator's ranges and the cloud nodes' addresses.
    pub(super) excluded: BTreeSet<IpNet>,
    /// Addresses of edge nodes; clients of the name doors may use any of them.
    pub(super) holders: HashMap<IpAddr, Holder>,
    /// Those that the redirect routes; the key is in `holders`.
    pub(super) routed: BTreeSet<IpAddr>,
    /// Ranges of edge nodes' pods that the redirect routes, each with its node's index.
    pub(super) pods: BTreeMap<IpNet, usize>,
    pub(super) conflicts: BTreeSet<Conflict>,
    /// What the next inventory follows.
    pub(super) claims: Claims,
}

impl Plan {
    /// `before` are the claims of the inventory before this one.
    pub(super) fn new(inventory: &Inventory, rules: &Rules<'_>, before: &Claims, now: Instant) -> Self {
        if inventory.nodes.is_empty() {
            // It says nothing about who had an address first.
            return Self {
                excluded: rules.exclude.iter().copied().collect(),
                claims: before.clone(),
                ..Self::default()
            };
        }
        let mut plan = Self { claims: before.followed_by(inventory, now), ..Self::default() };
        let mut wanted: BTreeMap<IpAddr, Vec<usize>> = BTreeMap::new();
        for (index, node) in inventory.nodes.iter().enumerate() {
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
        inventory: &Inventory,
        rules: &Rules<'_>,
        before: &Claims,
        pods: &Pods,
    ) {
        let within = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        let holder = before.edge.get(&address);
        let holder = nodes.iter().copied().find(|index| Some(&inventory.nodes[*index].name) == holder);
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
        let name = &inventory.nodes[holder].name;
        let late = late.into_iter().map(|index| &inventory.nodes[*index].name);
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
        inventory: &Inventory,
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
    pub(super) fn route_pods(&mut self, inventory: &Inventory, token_ranges: &[IpNet], allowed: &[IpNet]) {
        let excluded = self.excluded.iter().map(|net| (*net, Claim::Excluded));
        let tokens = token_ranges.iter().map(|net| (*net, Claim::Taken));
        let mut claims: Vec<(IpNet, Claim)> = excluded.chain(tokens).collect();
        for (index, node) in inventory.nodes.iter().enumerate() {
            let claim = if node.edge { Claim::Pods(index) } else { Claim::Taken };
            claims.extend(node.pod_cidrs.iter().map(|range| (range.trunc(), claim)));
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
            let within = allowed.iter().any(|range| range.contains(&net));
            if bad.contains(&position) || !within || !is_host(net.network()) {
                self.conflict(ConflictKind::PodRange, Some(net.network()), inventory, &[index]);
            } else {
                self.pods.insert(net, index);
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
        let mut nodes: Vec<_> = nodes.iter().map(|index| inventory.nodes[*index].name.clone()).collect();
        nodes.sort_unstable();
        self.conflicts.insert(Conflict { kind, address, nodes, holder: None });
    }
}

/// The node that was created before the others; None when that is not known. The only one needs no age.
fn oldest(inventory: &Inventory, nodes: &[usize]) -> Option<usize> {
    if let [index] = nodes {
        return Some(*index);
    }
    let mut ages = Vec::with_capacity(nodes.len());
    for index in nodes {
        ages.push((inventory.nodes[*index].created?, *index));
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
    fn new(inventory: &Inventory, rules: &Rules<'_>) -> Self {
        let counts = |edge: bool, range: &IpNet| match range {
            _ if edge => rules.pods.iter().any(|pods| pods.contains(range)),
            _ if !rules.edge_addresses.is_empty() => false,
            IpNet::V4(range) => range.prefix_len() >= WIDEST_CLOUD_PODS.0,
            IpNet::V6(range) => range.prefix_len() >= WIDEST_CLOUD_PODS.1,
        };
        let mut ranges = HashMap::new();
        for (index, node) in inventory.nodes.iter().enumerate() {
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

/// Whether an address can be that of one host on a network that others reach.
fn is_host(address: IpAddr) -> bool {
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return false;
    }
    match address {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && v6.to_ipv4_mapped().is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::InventoryNode;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn node(name: &str, edge: bool, pods: &[&str]) -> InventoryNode {
        InventoryNode {
            name: name.parse().unwrap(),
            edge,
            addresses: Vec::new(),
            left_out: 0,
            kubelet_port: 10250,
            pod_cidrs: pods.iter().map(|range| net(range)).collect(),
            created: None,
        }
    }

    #[test]
    fn only_a_host_on_a_network_has_such_an_address() {
        for host in
            ["10.8.0.7", "169.253.255.255", "169.255.0.1", "223.255.255.255", "fd00::1", "2001:db8::1"]
        {
            assert!(is_host(ip(host)), "{host}");
        }
        for other in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "169.254.1.1",
            "255.255.255.255",
            "::",
            "::1",
            "ff02::1",
            "fe80::1",
            "::ffff:10.8.0.7",
        ] {
            assert!(!is_host(ip(other)), "{other}");
        }
    }

    #[test]
    fn pods_keep_their_addresses_from_other_nodes() {
        let cloud = ["10.16.0.0/16", "10.18.0.0/15", "fd00:1::/64", "fd00:2::/63"];
        let nodes = vec![
            node("edge-1", true, &[]),
            node("cloud-1", false, &cloud),
            node("edge-2", true, &["10.244.2.0/24", "10.99.2.0/24"]),
        ];
        let inventory = Inventory { nodes };
        let (host, pods, edge) = (HashSet::new(), [net("10.244.0.0/16")], [net("10.0.0.0/8")]);
        let rules = |edge_addresses| Rules {
            edge_addresses,
            exclude: &[],
            token_ranges: &[],
            foreign: &[],
            pods: &pods,
            host: &host,
        };
        let taken = Pods::new(&inventory, &rules(&[]));
        for (address, nodes, of_another) in [
            ("10.16.0.1", &[0][..], true),
            ("fd00:1::1", &[0], true),
            ("10.244.2.5", &[0], true),
            ("10.244.2.5", &[0, 2], true),
            ("10.244.2.5", &[2], false),
            // Wider than any node's.
            ("10.18.0.1", &[0], false),
            ("fd00:2::1", &[0], false),
            // Not redirected.
            ("10.99.2.5", &[0], false),
        ] {
            assert_eq!(taken.of_another(ip(address), nodes), of_another, "{address} for {nodes:?}");
        }
        // The operator said which addresses are edge nodes'.
        let taken = Pods::new(&inventory, &rules(&edge));
        assert!(!taken.of_another(ip("10.16.0.1"), &[0]) && taken.of_another(ip("10.244.2.5"), &[0]));
    }

    #[test]
    fn a_node_with_too_many_addresses_is_a_conflict() {
        let inventory = Inventory {
            nodes: vec![
                node("cloud-1", false, &[]),
                InventoryNode { left_out: 2, ..node("cloud-2", false, &[]) },
            ],
        };
        let host = HashSet::new();
        let rules = Rules {
            edge_addresses: &[],
            exclude: &[],
            token_ranges: &[],
            foreign: &[],
            pods: &[],
            host: &host,
        };
        let plan = Plan::new(&inventory, &rules, &Claims::default(), Instant::now());
        let nodes = vec!["cloud-2".parse().unwrap()];
        let conflict = Conflict { kind: ConflictKind::TooMany, address: None, nodes, holder: None };
        assert_eq!(plan.conflicts, BTreeSet::from([conflict]));
    }
}

//! The nodes' ranges of pods: which of them are redirected, and which addresses they keep from other nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

use super::rules::{Rules, is_host};
use crate::inventory::InventoryNode;

/// Pod ranges of cloud nodes that are wider than these prefixes keep no address from the edge nodes: no node's pods need
/// so many, and a kubelet reports its own.
const WIDEST_CLOUD_PODS: (u8, u8) = (16, 64);

/// Every node's ranges of pods.
#[derive(Debug, Default)]
pub(super) struct PodRanges {
    /// Who names a range, sorted by name; a node may name one twice.
    claimed: BTreeMap<IpNet, Vec<Claimant>>,
    /// How many ranges have a prefix.
    prefixes: BTreeMap<u8, usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claimant {
    node: NodeName,
    edge: bool,
}

/// What becomes of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodRoute {
    /// It is redirected to the node.
    To(NodeName),
    /// These edge nodes name it, and it is redirected to none of them.
    Refused(Vec<NodeName>),
    /// No edge node's.
    Nobody,
}

impl PodRanges {
    /// Replaces a node's ranges; returns those for which that may matter.
    pub(super) fn replace(
        &mut self,
        before: Option<&InventoryNode>,
        now: Option<&InventoryNode>,
    ) -> BTreeSet<IpNet> {
        let same = |one: &InventoryNode, other: &InventoryNode| {
            (one.edge, &one.pod_cidrs) == (other.edge, &other.pod_cidrs)
        };
        let mut touched = BTreeSet::new();
        if before.zip(now).is_some_and(|(before, now)| same(before, now)) {
            return touched;
        }
        for node in before.into_iter() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc) {
                self.remove(range, node);
                touched.insert(range);
            }
        }
        for node in now.into_iter() {
            for range in node.pod_cidrs.iter().map(IpNet::trunc) {
                self.add(range, node);
                touched.insert(range);
            }
        }
        touched
    }

    fn add(&mut self, range: IpNet, node: &InventoryNode) {
        let claimants = self.claimed.entry(range).or_insert_with(|| {
            *self.prefixes.entry(range.prefix_len()).or_default() += 1;
            Vec::new()
        });
        let claimant = Claimant { node: node.name.clone(), edge: node.edge };
        let at = claimants.partition_point(|other| *other < claimant);
        claimants.insert(at, claimant);
    }

    fn remove(&mut self, range: IpNet, node: &InventoryNode) {
        let Some(claimants) = self.claimed.get_mut(&range) else { return };
        if let Some(at) = claimants.iter().position(|claimant| claimant.node == node.name) {
            claimants.remove(at);
        }
        if claimants.is_empty() {
            self.claimed.remove(&range);
            if let Some(count) = self.prefixes.get_mut(&range.prefix_len()) {
                *count -= 1;
                if *count == 0 {
                    self.prefixes.remove(&range.prefix_len());
                }
            }
        }
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = IpNet> {
        self.claimed.keys().copied()
    }

    /// The other ranges within which it lies, or that lie within it.
    pub(super) fn overlapping(&self, range: IpNet) -> Vec<IpNet> {
        let mut found: Vec<_> = self.around(range).collect();
        found.extend(self.within(range));
        found
    }

    fn around(&self, range: IpNet) -> impl Iterator<Item = IpNet> {
        let wider = self.prefixes.range(..range.prefix_len()).map(|(prefix, _)| *prefix);
        let wider = wider.filter_map(move |prefix| IpNet::new(range.network(), prefix).ok());
        wider.map(|net| net.trunc()).filter(|net| self.claimed.contains_key(net))
    }

    /// In the order of networks a range comes right before those that it contains.
    fn within(&self, range: IpNet) -> impl Iterator<Item = IpNet> {
        let following = self.claimed.range(range..).map(|(net, _)| *net);
        following.skip_while(move |net| *net == range).take_while(move |net| range.contains(net))
    }

    /// The redirect of an edge node's range. Ranges that overlap are not routed: it cannot be known which pod was meant. Nor
    /// are ranges outside those that the operator gave to pods, nor what is this host's, the API server's or the Services': a
    /// kubelet can choose its own range, and must not take that over. `excluded`: whether a cloud node's address is.
    pub(super) fn route(
        &self,
        range: IpNet,
        rules: &Rules<'_>,
        excluded: impl Fn(IpNet) -> bool,
    ) -> PodRoute {
        let claimants = self.claimed.get(&range).map(Vec::as_slice).unwrap_or_default();
        let mut edge =
            claimants.iter().filter(|claimant| claimant.edge).map(|claimant| claimant.node.clone());
        let Some(first) = edge.next() else { return PodRoute::Nobody };
        let overlaps = |other: &IpNet| other.contains(&range) || range.contains(other);
        // An excluded part leaves the rest of a range usable: exclusion wins at connect().
        let usable = self.contenders(range, rules) == 1
            && rules.pods.iter().any(|allowed| allowed.contains(&range))
            && is_host(range.network())
            && !rules.exclude.iter().any(|net| net.contains(&range))
            && !excluded(range)
            && !rules.token_ranges.iter().chain(rules.foreign).any(overlaps)
            && !rules.host.iter().any(|address| range.contains(address))
            && !self.around(range).chain(self.within(range)).any(|other| self.contenders(other, rules) > 0);
        if usable {
            PodRoute::To(first)
        } else {
            PodRoute::Refused(std::iter::once(first).chain(edge).collect())
        }
    }

    /// How many nodes keep what overlaps the range from being routed. A range that leads nowhere itself harms its own node only,
    /// even if it is 0.0.0.0/0.
    fn contenders(&self, range: IpNet, rules: &Rules<'_>) -> usize {
        let claimants = self.claimed.get(&range).map(Vec::as_slice).unwrap_or_default();
        let contends = |claimant: &Claimant| match claimant.edge {
            true => counts(range, true, rules),
            // With --edge-addresses too: those are about nodes.
            false => is_one_nodes(range),
        };
        claimants.iter().filter(|claimant| contends(claimant)).count()
    }

    /// Whether an edge node may have a pod with this address, where pods are redirected in these ranges.
    pub(super) fn of_edge(&self, address: IpAddr, pods: &[IpNet]) -> bool {
        self.prefixes.keys().any(|prefix| {
            let around = IpNet::new(address, *prefix).ok().map(|net| net.trunc());
            let around = around.filter(|range| pods.iter().any(|pods| pods.contains(range)));
            let claimants = around.and_then(|range| self.claimed.get(&range));
            claimants.is_some_and(|claimants| claimants.iter().any(|claimant| claimant.edge))
        })
    }

    /// Whether the address is a pod's of another node than the only one that wants it. Ranges of edge nodes count as far as
    /// they may be redirected; those of cloud nodes do not count with --edge-addresses: the operator said what is the edge
    /// nodes'.
    pub(super) fn of_another(&self, address: IpAddr, nodes: &[NodeName], rules: &Rules<'_>) -> bool {
        self.prefixes.keys().any(|prefix| {
            let around = IpNet::new(address, *prefix).ok().map(|net| net.trunc());
            let claimants = around.and_then(|range| Some((range, self.claimed.get(&range)?)));
            let owner = claimants.and_then(|(range, claimants)| {
                claimants.iter().find(|claimant| counts(range, claimant.edge, rules))
            });
            owner.is_some_and(|owner| nodes != [owner.node.clone()])
        })
    }
}

/// Whether a range keeps addresses from other nodes.
pub(super) fn counts(range: IpNet, edge: bool, rules: &Rules<'_>) -> bool {
    if edge {
        return rules.pods.iter().any(|pods| pods.contains(&range));
    }
    rules.edge_addresses.is_empty() && is_one_nodes(range)
}

/// Whether a cloud node can have so many pods.
fn is_one_nodes(range: IpNet) -> bool {
    let widest = if range.addr().is_ipv4() { WIDEST_CLOUD_PODS.0 } else { WIDEST_CLOUD_PODS.1 };
    range.prefix_len() >= widest
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn pods_keep_their_addresses_from_other_nodes() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let node = |name: &str, edge: bool, pods: &[&str]| InventoryNode {
            edge,
            pod_cidrs: pods.iter().map(|range| net(range)).collect(),
            ..InventoryNode::without_addresses(name)
        };
        let cloud = ["10.16.0.0/16", "10.18.0.0/15", "fd00:1::/64", "fd00:2::/63"];
        let mut taken = PodRanges::default();
        for node in [
            node("edge-1", true, &[]),
            node("cloud-1", false, &cloud),
            node("edge-2", true, &["10.244.2.0/24", "10.99.2.0/24"]),
        ] {
            taken.replace(None, Some(&node));
        }
        let (host, pods, edge) = (HashSet::new(), [net("10.244.0.0/16")], [net("10.0.0.0/8")]);
        let rules = |edge_addresses| Rules {
            edge_addresses,
            exclude: &[],
            token_ranges: &[],
            foreign: &[],
            pods: &pods,
            host: &host,
        };
        let names =
            |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<NodeName>>();
        for (address, nodes, of_another) in [
            ("10.16.0.1", &["edge-1"][..], true),
            ("fd00:1::1", &["edge-1"], true),
            ("10.244.2.5", &["edge-1"], true),
            ("10.244.2.5", &["edge-1", "edge-2"], true),
            ("10.244.2.5", &["edge-2"], false),
            // Wider than any node's.
            ("10.18.0.1", &["edge-1"], false),
            ("fd00:2::1", &["edge-1"], false),
            // Not redirected.
            ("10.99.2.5", &["edge-1"], false),
        ] {
            let found = taken.of_another(address.parse().unwrap(), &names(nodes), &rules(&[]));
            assert_eq!(found, of_another, "{address} for {nodes:?}");
        }
        // The operator said which addresses are edge nodes'.
        let of_another =
            |address: &str| taken.of_another(address.parse().unwrap(), &names(&["edge-1"]), &rules(&edge));
        assert!(!of_another("10.16.0.1") && of_another("10.244.2.5"));
    }
}

//! Decides what an inventory routes: a pure function, so that a test can compare it with a naive model.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;

/// A contradiction in the inventory. Everything else is routed all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Conflict {
    pub kind: ConflictKind,
    /// None only for [`ConflictKind::NoAddress`].
    pub address: Option<IpAddr>,
    /// Sorted; the edge nodes for [`ConflictKind::CloudAndEdge`].
    pub nodes: Vec<NodeName>,
}

/// What is wrong; also the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConflictKind {
    /// Several edge nodes have the address: connecting to it fails, each is reachable by its name.
    Ambiguous,
    /// A cloud node has the address too: it is never redirected.
    CloudAndEdge,
    /// The operator excluded the address: it is never redirected.
    Excluded,
    /// Not the address of a host on a network (loopback, multicast, link-local, …), or one of the token range.
    Unroutable,
    /// An edge node without any address.
    NoAddress,
    /// The token range is used up: connecting to the address fails.
    NoToken,
    /// A range of pods that overlaps another node's or the token range, is excluded, or lies outside the ranges that the
    /// operator gave to pods: it is not redirected.
    PodRange,
    /// The token range has no room for a range of pods: it is not redirected.
    NoTokenBlock,
}

impl ConflictKind {
    pub const ALL: [Self; 8] = [
        Self::Ambiguous,
        Self::CloudAndEdge,
        Self::Excluded,
        Self::Unroutable,
        Self::NoAddress,
        Self::NoToken,
        Self::PodRange,
        Self::NoTokenBlock,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ambiguous => "ambiguous",
            Self::CloudAndEdge => "cloud_and_edge",
            Self::Excluded => "excluded",
            Self::Unroutable => "unroutable",
            Self::NoAddress => "no_address",
            Self::NoToken => "no_token",
            Self::PodRange => "pod_range",
            Self::NoTokenBlock => "no_token_block",
        }
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.address {
            write!(f, "address {address} of ")?;
        }
        for (i, node) in self.nodes.iter().enumerate() {
            write!(f, "{}{node}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(match self.kind {
            ConflictKind::Ambiguous => {
                ": several edge nodes have it; connections to it fail, use their names"
            }
            ConflictKind::CloudAndEdge => ": a cloud node has it too; it is not redirected",
            ConflictKind::Excluded => ": it lies in --exclude; it is not redirected",
            ConflictKind::Unroutable => {
                ": it is not the address of a host on a network; it is not redirected"
            }
            ConflictKind::NoAddress => ": the node has no address; only others can be reached",
            ConflictKind::NoToken => {
                ": the token range is used up; connections to it fail (widen --token-range)"
            }
            ConflictKind::PodRange => {
                ": the pod range that begins there overlaps another node's or the token range, lies in \
                 --exclude, or outside of --edge-pod-routes; \
                 it is not redirected"
            }
            ConflictKind::NoTokenBlock => {
                ": the token range has no room for the pod range that begins there; it is not redirected (widen \
                 --token-range, or --token-range-v6 up to a /64: a block of tokens is as large as the range)"
            }
        })
    }
}

/// Which of the inventory's nodes an address leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Index into the inventory.
    One(usize),
    Several(Vec<usize>),
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
}

impl Plan {
    pub(super) fn new(inventory: &Inventory, exclude: &[IpNet], token_ranges: &[IpNet]) -> Self {
        let cloud: HashSet<IpAddr> = inventory
            .nodes
            .iter()
            .filter(|node| !node.edge)
            .flat_map(|node| node.addresses.iter().copied())
            .collect();
        let mut plan = Self {
            excluded: exclude.iter().copied().chain(cloud.iter().copied().map(IpNet::from)).collect(),
            ..Self::default()
        };
        let mut claims: BTreeMap<IpAddr, Vec<usize>> = BTreeMap::new();
        for (index, node) in inventory.nodes.iter().enumerate().filter(|(_, node)| node.edge) {
            if node.addresses.is_empty() {
                plan.conflict(ConflictKind::NoAddress, None, inventory, &[index]);
            }
            for address in &node.addresses {
                let claim = claims.entry(*address).or_default();
                // A node that lists an address twice is not two nodes.
                if claim.last() != Some(&index) {
                    claim.push(index);
                }
            }
        }
        for (address, claim) in claims {
            if !is_host(address) || token_ranges.iter().any(|range| range.contains(&address)) {
                plan.conflict(ConflictKind::Unroutable, Some(address), inventory, &claim);
                continue;
            }
            if cloud.contains(&address) {
                plan.conflict(ConflictKind::CloudAndEdge, Some(address), inventory, &claim);
                continue;
            }
            if claim.len() > 1 {
                plan.conflict(ConflictKind::Ambiguous, Some(address), inventory, &claim);
            }
            if exclude.iter().any(|range| range.contains(&address)) {
                plan.conflict(ConflictKind::Excluded, Some(address), inventory, &claim);
            } else {
                plan.routed.insert(address);
            }
            let holder = if let [index] = claim[..] { Holder::One(index) } else { Holder::Several(claim) };
            plan.holders.insert(address, holder);
        }
        plan
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
        self.conflicts.insert(Conflict { kind, address, nodes });
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

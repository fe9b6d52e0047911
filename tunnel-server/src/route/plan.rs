//! Decides what the inventory routes, by the rules and by who had an address first. Of a changed node only its own addresses
//! and ranges, and those that others share with it, are decided again.

#[cfg(test)]
pub(super) mod scratch;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

use super::claims::Claims;
use super::conflict::{Conflict, ConflictKind};
use super::conflicts::{Conflicts, Subject};
use super::key::Key;
use super::pods::{PodRanges, PodRoute, counts};
use super::rules::{Rules, is_host};
use super::tokens::Owner;
use crate::inventory::{Inventory, InventoryNode};
use crate::shared_map::{Difference, SharedMap, SharedSet};

/// Which node an address leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    One(NodeName),
    /// Sorted.
    Several(Vec<NodeName>),
}

/// To whom a network leads; None for nobody.
pub(super) type Wanted = (Key, Option<Owner>);

/// What follows from the inventory.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// What the next inventory follows.
    pub(super) claims: Claims,
    /// The operator's ranges and the cloud nodes' addresses.
    pub(super) excluded: SharedSet<IpNet>,
    /// Addresses of edge nodes; clients of the name doors may use any of them.
    pub(super) holders: SharedMap<IpAddr, Holder>,
    pub(super) conflicts: Conflicts,
    /// The edge nodes that name an address, sorted.
    named: BTreeMap<IpAddr, Vec<NodeName>>,
    pods: PodRanges,
    /// Whether there are nodes.
    filled: bool,
}

/// What is to be decided again.
#[derive(Debug, Default)]
struct Dirty {
    addresses: BTreeSet<IpAddr>,
    pods: BTreeSet<IpNet>,
}

/// What was decided about an address.
#[derive(Debug, Default)]
struct Decision {
    holder: Option<Holder>,
    routed: bool,
    conflicts: Vec<Conflict>,
}

impl Plan {
    /// Forgets what follows from the nodes; what the next inventory follows stays.
    pub(super) fn clear(&mut self, rules: &Rules<'_>) {
        let claims = std::mem::take(&mut self.claims);
        *self = Self { claims, excluded: rules.exclude.iter().copied().collect(), ..Self::default() };
    }

    /// Follows the changes that lead to `inventory`, which is not empty. Returns what may have changed for the redirect.
    /// `all`: decide everything again, for the rules are others.
    pub(super) fn update(
        &mut self,
        inventory: &Inventory,
        changes: &[Difference<'_, NodeName, Arc<InventoryNode>>],
        rules: &Rules<'_>,
        all: bool,
        now: Instant,
    ) -> Vec<Wanted> {
        let mut dirty = Dirty::default();
        if !self.filled {
            self.claims.follow_anew(inventory);
            dirty.addresses.extend(self.claims.addresses());
        }
        for change in changes {
            let (before, now_is) = (change.before.map(Arc::as_ref), change.now.map(Arc::as_ref));
            self.follow(before, now_is, rules, now, &mut dirty);
        }
        self.filled = true;
        self.claims.known = true;
        if all {
            dirty.addresses.extend(self.named.keys().copied().chain(self.claims.addresses()));
            dirty.pods.extend(self.pods.ranges());
        }
        dirty.addresses.extend(self.claims.ripe(now));

        let mut wanted = Vec::new();
        for address in dirty.addresses {
            let decision = self.decide(address, inventory, rules);
            wanted.push((Key { pods: false, net: address.into() }, decision.owner(address)));
            self.apply(address, decision);
            if self.exclude(address, rules, now) {
                dirty.pods.insert(IpNet::from(address));
            }
        }
        // Without such ranges nothing is said about any.
        if !rules.pods.is_empty() {
            for range in dirty.pods {
                wanted.push((Key { pods: true, net: range }, self.route_pods(range, rules)));
            }
        }
        wanted
    }

    /// Whether something follows from this host's having the address: a node names it, or an edge node's pod may have it. Of all
    /// others there are many, and they change often: kube-proxy in its IPVS mode gives every Service's address to an interface.
    pub(super) fn concerns(&self, address: IpAddr, pods: &[IpNet]) -> bool {
        self.named.contains_key(&address)
            || self.claims.cloud_nodes(address).next().is_some()
            || self.pods.of_edge(address, pods)
    }

    /// Takes over what a node says.
    fn follow(
        &mut self,
        before: Option<&InventoryNode>,
        after: Option<&InventoryNode>,
        rules: &Rules<'_>,
        now: Instant,
        dirty: &mut Dirty,
    ) {
        let Some(name) = after.or(before).map(|node| &node.name) else { return };
        let addresses = |node: Option<&InventoryNode>, edge: bool| {
            let node = node.filter(|node| node.edge == edge);
            node.map(|node| node.addresses.iter().copied().collect::<BTreeSet<_>>()).unwrap_or_default()
        };
        for edge in [true, false] {
            let (old, new) = (addresses(before, edge), addresses(after, edge));
            for address in old.difference(&new) {
                match edge {
                    true => self.forget(*address, name),
                    false => self.claims.unname(*address, name),
                }
            }
            for address in new.difference(&old) {
                match edge {
                    true => self.remember(*address, name),
                    false => self.claims.name(*address, name, now),
                }
            }
            dirty.addresses.extend(old.into_iter().chain(new));
        }
        for range in self.pods.replace(before, after) {
            if [true, false].into_iter().any(|edge| counts(range, edge, rules)) {
                let within = self.named.range(range.network()..=range.broadcast());
                dirty.addresses.extend(within.map(|(address, _)| *address));
            }
            dirty.pods.insert(range);
            dirty.pods.extend(self.pods.overlapping(range));
        }
        let mut conflicts = Vec::new();
        let conflict = |kind| Conflict { kind, address: None, nodes: vec![name.clone()], holder: None };
        if let Some(node) = after {
            conflicts.extend((node.left_out > 0).then(|| conflict(ConflictKind::TooMany)));
            let none = node.edge && node.addresses.is_empty();
            conflicts.extend(none.then(|| conflict(ConflictKind::NoAddress)));
        }
        self.conflicts.replace(Subject::Node(name.clone()), conflicts);
    }

    fn remember(&mut self, address: IpAddr, node: &NodeName) {
        let names = self.named.entry(address).or_default();
        if let Err(at) = names.binary_search(node) {
            names.insert(at, node.clone());
        }
    }

    fn forget(&mut self, address: IpAddr, node: &NodeName) {
        let Some(names) = self.named.get_mut(&address) else { return };
        if let Ok(at) = names.binary_search(node) {
            names.remove(at);
        }
        if names.is_empty() {
            self.named.remove(&address);
        }
    }

    /// Decides about an address.
    fn decide(&self, address: IpAddr, inventory: &Inventory, rules: &Rules<'_>) -> Decision {
        let Some(nodes) = self.named.get(&address) else { return Decision::default() };
        let within = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        let conflict = |kind, nodes: &[NodeName]| Conflict {
            kind,
            address: Some(address),
            nodes: nodes.to_vec(),
            holder: None,
        };
        let holder = self.claims.holder(address).filter(|holder| nodes.contains(holder));
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
        } else if self.pods.of_another(address, nodes, rules) {
            Some(ConflictKind::Foreign)
        } else {
            None
        };
        if let Some(kind) = refused {
            return Decision { conflicts: vec![conflict(kind, nodes)], ..Decision::default() };
        }
        let excluded = within(rules.exclude);
        let mut conflicts = Vec::new();
        let Some(holder) = holder.or_else(|| oldest(inventory, nodes)) else {
            conflicts.push(conflict(ConflictKind::Ambiguous, nodes));
            conflicts.extend(excluded.then(|| conflict(ConflictKind::Excluded, nodes)));
            return Decision { holder: Some(Holder::Several(nodes.clone())), routed: !excluded, conflicts };
        };
        let late = nodes.iter().filter(|node| *node != holder);
        let mut late: Vec<_> = late.chain(self.claims.cloud_nodes(address)).cloned().collect();
        if !late.is_empty() {
            late.sort_unstable();
            let taken = conflict(ConflictKind::Taken, &late);
            conflicts.push(Conflict { holder: Some(holder.clone()), ..taken });
        }
        conflicts.extend(excluded.then(|| conflict(ConflictKind::Excluded, std::slice::from_ref(holder))));
        Decision { holder: Some(Holder::One(holder.clone())), routed: !excluded, conflicts }
    }

    fn apply(&mut self, address: IpAddr, decision: Decision) {
        let Decision { holder, conflicts, .. } = decision;
        self.claims.set_holder(address, holder.as_ref().and_then(Holder::one));
        if self.holders.get(&address) != holder.as_ref() {
            match holder {
                Some(holder) => self.holders.insert(address, holder),
                None => self.holders.remove(&address),
            };
        }
        self.conflicts.replace(Subject::Address(address), conflicts);
    }

    /// Excludes the address, or no longer; whether that is a change. What an edge node has is not excluded.
    fn exclude(&mut self, address: IpAddr, rules: &Rules<'_>, now: Instant) -> bool {
        let net = IpNet::from(address);
        let cloud = self.claims.holder(address).is_none() && self.claims.is_excluded(address, now);
        if cloud || rules.exclude.contains(&net) {
            self.excluded.insert(net)
        } else {
            self.excluded.remove(&net)
        }
    }

    fn route_pods(&mut self, range: IpNet, rules: &Rules<'_>) -> Option<Owner> {
        let excluded = &self.excluded;
        let (owner, refused) = match self.pods.route(range, rules, |net| excluded.contains(&net)) {
            PodRoute::To(node) => (Some(Owner::Pods(node, range)), Vec::new()),
            PodRoute::Refused(nodes) => (None, nodes),
            PodRoute::Nobody => (None, Vec::new()),
        };
        let address = Some(range.network());
        let conflict =
            |node| Conflict { kind: ConflictKind::PodRange, address, nodes: vec![node], holder: None };
        self.conflicts.replace(Subject::Pods(range), refused.into_iter().map(conflict).collect());
        owner
    }
}

impl Decision {
    fn owner(&self, address: IpAddr) -> Option<Owner> {
        match self.holder.as_ref().filter(|_| self.routed)? {
            Holder::One(node) => Some(Owner::Node(node.clone(), address)),
            Holder::Several(_) => Some(Owner::Contested(address)),
        }
    }
}

impl Holder {
    fn one(&self) -> Option<&NodeName> {
        match self {
            Self::One(node) => Some(node),
            Self::Several(_) => None,
        }
    }

    pub(super) fn nodes(&self) -> &[NodeName] {
        match self {
            Self::One(node) => std::slice::from_ref(node),
            Self::Several(nodes) => nodes,
        }
    }
}

/// The node that was created before the others; None when that is not known. The only one needs no age.
fn oldest<'a>(inventory: &Inventory, nodes: &'a [NodeName]) -> Option<&'a NodeName> {
    if let [node] = nodes {
        return Some(node);
    }
    let mut ages = Vec::with_capacity(nodes.len());
    for node in nodes {
        ages.push((inventory.get(node.as_str())?.created?, node));
    }
    ages.sort_unstable();
    match ages[..] {
        [first, second, ..] if first.0 < second.0 => Some(first.1),
        _ => None,
    }
}

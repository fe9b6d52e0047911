//! The routes as connections read them: built as a whole, then immutable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tunnel_runtime::NodeName;

use super::conflict::Conflict;
use super::plan::{AddressHolder, is_host};
use crate::inventory::{Inventory, InventoryNode};

/// An address of an edge node, or of a pod on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    pub node: NodeName,
    pub address: IpAddr,
    pub kubelet_port: u16,
    /// True for a pod's address: every port of it is tunnelled.
    pub pod: bool,
}

/// The edge node or nodes with an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByAddress {
    Unique(NodeAddress),
    /// Several edge nodes have it; their names, sorted.
    Ambiguous(Vec<NodeName>),
    Unknown,
}

/// A block of virtual addresses, its node's index, and the pod range that the block stands for.
pub(super) type PodBlock = (IpNet, usize, IpNet);

/// Nodes are given by their indexes in the inventory.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub(super) inventory: Arc<Inventory>,
    pub(super) holders: BTreeMap<IpAddr, AddressHolder>,
    pub(super) virtual_addresses: HashMap<IpAddr, (usize, IpAddr)>,
    /// Blocks of virtual addresses by their first address.
    pub(super) blocks: BTreeMap<IpAddr, PodBlock>,
    /// The pod ranges of `blocks` by their first address; they do not overlap.
    pub(super) pods: BTreeMap<IpAddr, (IpNet, usize)>,
    pub(super) conflicts: Arc<BTreeSet<Conflict>>,
}

impl Snapshot {
    /// The node or pod address behind a virtual address.
    pub fn by_virtual_address(&self, virtual_address: IpAddr) -> Option<NodeAddress> {
        if let Some((node, address)) = self.virtual_addresses.get(&virtual_address) {
            return Some(self.node_address(&self.inventory[*node], *address));
        }
        let (_, (block, node, pods)) = self.blocks.range(..=virtual_address).next_back()?;
        let address = block.contains(&virtual_address).then(|| translate(virtual_address, *pods))??;
        Some(NodeAddress { pod: true, ..self.node_address(&self.inventory[*node], address) })
    }

    /// The edge node with this name, at its first address that is reachable on a network, or at its first. None also if
    /// it has no address.
    pub fn by_name(&self, name: &str) -> Option<NodeAddress> {
        let node = self.inventory.get(name).filter(|node| node.edge)?;
        let reached = node.addresses.iter().find(|address| is_host(**address));
        Some(self.node_address(node, *reached.or(node.addresses.first())?))
    }

    /// The edge node with the address. Unknown if a cloud node has it too, unless the edge node had it first.
    pub fn by_address(&self, address: IpAddr) -> ByAddress {
        let address = address.to_canonical();
        match self.holders.get(&address) {
            Some(AddressHolder::One(node)) => {
                ByAddress::Unique(self.node_address(&self.inventory[*node], address))
            }
            Some(holder @ AddressHolder::Several(_)) => {
                ByAddress::Ambiguous(self.names_of(holder).cloned().collect())
            }
            None => ByAddress::Unknown,
        }
    }

    /// The edge node that has the pod with this address, if connections to its pods are redirected.
    pub fn by_pod(&self, address: IpAddr) -> Option<NodeAddress> {
        let address = address.to_canonical();
        let (_, (range, node)) = self.pods.range(..=address).next_back()?;
        let found = range.contains(&address).then(|| self.node_address(&self.inventory[*node], address))?;
        Some(NodeAddress { pod: true, ..found })
    }

    /// An address on the node, or of a pod there if the node does not name it. Only for who knows from elsewhere that it is
    /// there.
    pub fn at(&self, node: &InventoryNode, address: IpAddr) -> NodeAddress {
        NodeAddress { pod: !node.addresses.contains(&address), ..self.node_address(node, address) }
    }

    /// Reports whether the node's inventory entry names the address, even if another node has it too.
    pub fn names(&self, node: &NodeName, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.inventory.get(node.as_str()).is_some_and(|node| node.addresses.contains(&address))
    }

    /// Reports whether the node names the address, even if another node does too, or has a pod with it.
    pub fn has(&self, node: &NodeName, address: IpAddr) -> bool {
        self.names(node, address) || self.by_pod(address).is_some_and(|pod| pod.node == *node)
    }

    /// The only edge node that has the address, or a pod with it.
    pub fn holder(&self, address: IpAddr) -> Option<NodeAddress> {
        match self.by_address(address) {
            ByAddress::Unique(found) => Some(found),
            ByAddress::Ambiguous(_) => None,
            ByAddress::Unknown => self.by_pod(address),
        }
    }

    /// Reports whether an address or a pod range has another node than in `before`.
    pub fn holders_differ(&self, before: &Self) -> bool {
        let name = |of: &Self, node: usize| of.inventory[node].name.clone();
        let same_pods = |((range, node), (before_range, before_node)): (&(IpNet, usize), &(IpNet, usize))| {
            range == before_range && name(self, *node) == name(before, *before_node)
        };
        let same_holder = |((address, holder), (before_address, before_holder)): (
            (&IpAddr, &AddressHolder),
            (&IpAddr, &AddressHolder),
        )| {
            address == before_address && self.names_of(holder).eq(before.names_of(before_holder))
        };
        self.holders.len() != before.holders.len()
            || self.pods.len() != before.pods.len()
            || !self.holders.iter().zip(&before.holders).all(same_holder)
            || !self.pods.values().zip(before.pods.values()).all(same_pods)
    }

    /// The edge nodes, ordered by name.
    pub fn nodes(&self) -> impl Iterator<Item = &InventoryNode> {
        self.inventory.iter().map(Arc::as_ref).filter(|node| node.edge)
    }

    /// Edge and cloud nodes.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Contradictions in the inventory, sorted.
    pub fn conflicts(&self) -> &BTreeSet<Conflict> {
        &self.conflicts
    }

    fn names_of(&self, holder: &AddressHolder) -> impl Iterator<Item = &NodeName> {
        holder.nodes().iter().map(|node| &self.inventory[*node].name)
    }

    fn node_address(&self, node: &InventoryNode, address: IpAddr) -> NodeAddress {
        NodeAddress { node: node.name.clone(), address, kubelet_port: node.kubelet_port, pod: false }
    }
}

/// Combines the network of `range` with the host bits of `virtual_address`; None if the families differ.
fn translate(virtual_address: IpAddr, range: IpNet) -> Option<IpAddr> {
    match (virtual_address, range) {
        (IpAddr::V4(virtual_address), IpNet::V4(range)) => {
            Some(IpAddr::V4(range.network() | (virtual_address & range.hostmask())))
        }
        (IpAddr::V6(virtual_address), IpNet::V6(range)) => {
            Some(IpAddr::V6(range.network() | (virtual_address & range.hostmask())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_address_stands_for_the_address_with_its_host_bits() {
        for (virtual_address, range, address) in [
            ("198.18.4.77", "10.244.3.0/24", Some("10.244.3.77")),
            ("198.18.4.77", "10.240.0.0/12", Some("10.242.4.77")),
            ("fd00:706f::4:77", "fd00:9:0:1::/112", Some("fd00:9:0:1::77")),
            ("fd00:706f::4:77", "fd00:9:0:1::/96", Some("fd00:9:0:1::4:77")),
            ("fd00:706f::4:77", "10.244.3.0/24", None),
        ] {
            let translated = translate(virtual_address.parse().unwrap(), range.parse().unwrap());
            assert_eq!(translated, address.map(|text| text.parse().unwrap()), "{virtual_address} in {range}");
        }
    }
}

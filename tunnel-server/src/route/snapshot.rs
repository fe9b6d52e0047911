//! The routes as connections read them: built as a whole on each change, then only read.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

use super::conflict::Conflict;
use super::plan::Holder;
use crate::inventory::{Inventory, InventoryNode};

/// An address of an edge node, or of a pod on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    pub node: NodeName,
    pub address: IpAddr,
    pub kubelet_port: u16,
    /// A pod's address: every port of it is tunnelled.
    pub pod: bool,
}

/// Which edge node has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByAddress {
    Unique(NodeAddress),
    /// Several edge nodes have it; their names, sorted.
    Ambiguous(Vec<NodeName>),
    Unknown,
}

#[derive(Debug, Default)]
pub struct Snapshot {
    pub(super) inventory: Arc<Inventory>,
    /// Edge nodes by name; indices into the inventory.
    pub(super) names: HashMap<NodeName, usize>,
    pub(super) holders: HashMap<IpAddr, Holder>,
    pub(super) tokens: HashMap<IpAddr, (usize, IpAddr)>,
    /// Blocks of tokens by their first: the block, and the node and the range of pods that it stands for.
    pub(super) blocks: BTreeMap<IpAddr, (IpNet, usize, IpNet)>,
    pub(super) conflicts: Vec<Conflict>,
}

impl Snapshot {
    /// The address that a token stands for.
    pub fn by_token(&self, token: IpAddr) -> Option<NodeAddress> {
        if let Some((index, address)) = self.tokens.get(&token) {
            return Some(self.node_address(*index, *address));
        }
        let (_, (block, index, pods)) = self.blocks.range(..=token).next_back()?;
        let address = block.contains(&token).then(|| translate(token, *pods))??;
        Some(NodeAddress { pod: true, ..self.node_address(*index, address) })
    }

    /// An edge node, at its first address. None also when it has none.
    pub fn by_name(&self, name: &str) -> Option<NodeAddress> {
        let index = *self.names.get(name)?;
        let address = *self.inventory.nodes[index].addresses.first()?;
        Some(self.node_address(index, address))
    }

    /// The edge node that has the address. An address that a cloud node has too is unknown.
    pub fn by_address(&self, address: IpAddr) -> ByAddress {
        let address = address.to_canonical();
        match self.holders.get(&address) {
            Some(Holder::One(index)) => ByAddress::Unique(self.node_address(*index, address)),
            Some(Holder::Several(indices)) => {
                let mut names: Vec<_> =
                    indices.iter().map(|i| self.inventory.nodes[*i].name.clone()).collect();
                names.sort_unstable();
                ByAddress::Ambiguous(names)
            }
            None => ByAddress::Unknown,
        }
    }

    /// The edge nodes, in the inventory's order.
    pub fn nodes(&self) -> impl Iterator<Item = &InventoryNode> {
        self.inventory.nodes.iter().filter(|node| node.edge)
    }

    /// Edge and cloud nodes.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// What is wrong with the inventory, sorted.
    pub fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    fn node_address(&self, index: usize, address: IpAddr) -> NodeAddress {
        let node = &self.inventory.nodes[index];
        NodeAddress { node: node.name.clone(), address, kubelet_port: node.kubelet_port, pod: false }
    }
}

/// The address of `range` that has the host bits of `token`.
fn translate(token: IpAddr, range: IpNet) -> Option<IpAddr> {
    match (token, range) {
        (IpAddr::V4(token), IpNet::V4(range)) => {
            Some(IpAddr::V4(range.network() | (token & range.hostmask())))
        }
        (IpAddr::V6(token), IpNet::V6(range)) => {
            Some(IpAddr::V6(range.network() | (token & range.hostmask())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_stands_for_the_address_with_its_host_bits() {
        for (token, range, address) in [
            ("198.18.4.77", "10.244.3.0/24", Some("10.244.3.77")),
            ("198.18.4.77", "10.240.0.0/12", Some("10.242.4.77")),
            ("fd00:706f::4:77", "fd00:9:0:1::/112", Some("fd00:9:0:1::77")),
            ("fd00:706f::4:77", "fd00:9:0:1::/96", Some("fd00:9:0:1::4:77")),
            ("fd00:706f::4:77", "10.244.3.0/24", None),
        ] {
            let translated = translate(token.parse().unwrap(), range.parse().unwrap());
            assert_eq!(translated, address.map(|text| text.parse().unwrap()), "{token} in {range}");
        }
    }
}

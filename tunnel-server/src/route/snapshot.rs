//! What a connection looks up: made whole on each change, then only read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use tunnel_core::identity::NodeName;

use super::plan::{Conflict, Holder};
use crate::inventory::{Inventory, InventoryNode};

/// Where a connection goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    pub node: NodeName,
    /// What the agent is asked to dial.
    pub address: IpAddr,
    pub kubelet_port: u16,
}

/// Whom an address belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByAddress {
    Unique(Destination),
    /// Several edge nodes have it; their names, sorted.
    Ambiguous(Vec<NodeName>),
    Unknown,
}

/// The routes at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub(super) inventory: Arc<Inventory>,
    /// Edge nodes by name; indices into the inventory.
    pub(super) names: HashMap<NodeName, usize>,
    pub(super) holders: HashMap<IpAddr, Holder>,
    pub(super) tokens: HashMap<IpAddr, (usize, IpAddr)>,
    pub(super) conflicts: Vec<Conflict>,
}

impl Snapshot {
    /// The destination that a token stands for.
    pub fn by_token(&self, token: IpAddr) -> Option<Destination> {
        let (index, address) = self.tokens.get(&token)?;
        Some(self.destination(*index, *address))
    }

    /// An edge node, at its first address. None also when it has none.
    pub fn by_name(&self, name: &str) -> Option<Destination> {
        let index = *self.names.get(name)?;
        let address = *self.inventory.nodes[index].addresses.first()?;
        Some(self.destination(index, address))
    }

    /// The edge node that has the address. An address that a cloud node has too is unknown.
    pub fn by_address(&self, address: IpAddr) -> ByAddress {
        let address = address.to_canonical();
        match self.holders.get(&address) {
            Some(Holder::One(index)) => ByAddress::Unique(self.destination(*index, address)),
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

    fn destination(&self, index: usize, address: IpAddr) -> Destination {
        let node = &self.inventory.nodes[index];
        Destination { node: node.name.clone(), address, kubelet_port: node.kubelet_port }
    }
}

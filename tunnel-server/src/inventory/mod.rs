//! The nodes of the cluster, and how a file lists them: a NodeList as kubectl prints it.

mod file;
mod file_watch;
mod node;
mod parse;
mod selector;

#[cfg(test)]
mod parse_tests;

pub use file::{FileSource, SourceStatus};
pub(crate) use file_watch::FileWatch;
pub use node::{DEFAULT_KUBELET_PORT, MAX_ADDRESSES, NodeSpec, NodeStatus, read_node};
pub use parse::{InventoryError, MAX_BYTES, parse};
pub use selector::{DEFAULT_EDGE_SELECTOR, Selector, SelectorError};

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::SystemTime;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

/// Every node, edge or cloud.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    pub nodes: Vec<InventoryNode>,
}

/// A node as far as the tunnel is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryNode {
    pub name: NodeName,
    /// Reached through the tunnel; otherwise never redirected.
    pub edge: bool,
    /// InternalIPs first, then ExternalIPs; IPv4 not as v4-mapped IPv6. At most [`MAX_ADDRESSES`].
    pub addresses: Vec<IpAddr>,
    /// How many more it names.
    pub left_out: usize,
    pub kubelet_port: u16,
    pub pod_cidrs: Vec<IpNet>,
    /// When the Node was created: one that is created again under the same name is another one. None where that is not
    /// certain, as in a file.
    pub created: Option<SystemTime>,
}

impl Inventory {
    /// Numbers of edge and of cloud nodes.
    pub fn counts(&self) -> (usize, usize) {
        let edge = self.nodes.iter().filter(|node| node.edge).count();
        (edge, self.nodes.len() - edge)
    }

    /// The nodes' names, and when each was created.
    pub fn creation_times(&self) -> HashMap<NodeName, Option<SystemTime>> {
        self.nodes.iter().map(|node| (node.name.clone(), node.created)).collect()
    }
}

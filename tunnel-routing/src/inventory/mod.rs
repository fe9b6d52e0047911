//! The nodes of the cluster, and the file format that lists them: a NodeList as printed by kubectl.

mod log_budget;
mod node;
mod nodes;
mod parse;
mod selector;

#[cfg(test)]
mod parse_tests;

pub use log_budget::LogBudget;
pub use node::{
    DEFAULT_KUBELET_PORT, InventoryNode, MAX_ADDRESSES, NodeSpec, NodeStatus, READ_ONLY_KUBELET_PORT,
    read_node,
};
pub use nodes::Inventory;
pub use parse::{MAX_BYTES, parse};
pub use selector::{DEFAULT_EDGE_SELECTOR, Selector, SelectorError};

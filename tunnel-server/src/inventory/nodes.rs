//! All nodes. Copies share what they have in common, so that one node's change does not copy the others.

use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};
use tunnel_core::identity::NodeName;

use super::InventoryNode;
use crate::shared_map::{Difference, SharedMap};

/// Every node, edge or cloud, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Vec<InventoryNode>")]
pub struct Inventory {
    nodes: SharedMap<NodeName, Arc<InventoryNode>>,
    /// How many of them are edge nodes.
    edge: usize,
}

impl Inventory {
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// In the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<InventoryNode>> {
        self.nodes.values()
    }

    pub fn get(&self, name: &str) -> Option<&Arc<InventoryNode>> {
        self.nodes.get(name)
    }

    /// Numbers of edge and of cloud nodes.
    pub fn counts(&self) -> (usize, usize) {
        (self.edge, self.nodes.len() - self.edge)
    }

    /// Adds a node, or replaces the one of its name. Whether that is a change.
    pub fn insert(&mut self, node: InventoryNode) -> bool {
        if self.get(node.name.as_str()).is_some_and(|before| **before == node) {
            return false;
        }
        self.edge += usize::from(node.edge);
        let before = self.nodes.insert(node.name.clone(), Arc::new(node));
        self.edge -= usize::from(before.is_some_and(|before| before.edge));
        true
    }

    /// Whether the node was there.
    pub fn remove(&mut self, name: &str) -> bool {
        let Some(before) = self.nodes.remove(name) else { return false };
        self.edge -= usize::from(before.edge);
        true
    }

    /// The nodes that differ from `before`.
    pub fn changes_since<'a>(
        &'a self,
        before: &'a Self,
    ) -> Vec<Difference<'a, NodeName, Arc<InventoryNode>>> {
        self.nodes.changes_since(&before.nodes)
    }
}

impl Serialize for Inventory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(|node| &**node))
    }
}

impl FromIterator<InventoryNode> for Inventory {
    fn from_iter<I: IntoIterator<Item = InventoryNode>>(nodes: I) -> Self {
        let nodes: SharedMap<NodeName, Arc<InventoryNode>> =
            nodes.into_iter().map(|node| (node.name.clone(), Arc::new(node))).collect();
        let edge = nodes.values().filter(|node| node.edge).count();
        Self { nodes, edge }
    }
}

impl From<Vec<InventoryNode>> for Inventory {
    fn from(nodes: Vec<InventoryNode>) -> Self {
        nodes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edge_and_cloud_nodes_are_counted() {
        let node = |name: &str, edge: bool| InventoryNode { edge, ..InventoryNode::without_addresses(name) };
        let mut nodes = Inventory::from(vec![node("b", true), node("a", false), node("c", true)]);
        let before = nodes.clone();
        assert_eq!(nodes.counts(), (2, 1));
        assert!(
            !nodes.insert(node("b", true)) && nodes.insert(node("b", false)) && nodes.insert(node("d", true))
        );
        assert!(nodes.remove("c") && !nodes.remove("c"));
        assert_eq!((nodes.counts(), nodes.len()), ((1, 2), 3));
        let changed: Vec<_> =
            nodes.changes_since(&before).iter().map(|change| change.key.to_string()).collect();
        assert_eq!(changed, ["b", "c", "d"]);
        assert_eq!(nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
    }
}

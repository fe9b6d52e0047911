//! The list of all nodes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Index;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};
use tunnel_runtime::NodeName;

use super::InventoryNode;

/// All nodes, edge and cloud. Clones share the nodes; changing one of them copies the list first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Vec<InventoryNode>")]
pub struct Inventory {
    /// Sorted by name.
    nodes: Arc<Vec<Arc<InventoryNode>>>,
}

impl Inventory {
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Iterates in the order of names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<InventoryNode>> {
        self.nodes.iter()
    }

    pub fn get(&self, name: &str) -> Option<&Arc<InventoryNode>> {
        self.nodes.get(self.find(name).ok()?)
    }

    /// The node's index in the order of names, or the index at which it would be inserted.
    fn find(&self, name: &str) -> Result<usize, usize> {
        self.nodes.binary_search_by(|node| node.name.as_str().cmp(name))
    }

    /// Number of edge nodes and of cloud nodes.
    pub fn counts(&self) -> (usize, usize) {
        let edge = self.iter().filter(|node| node.edge).count();
        (edge, self.len() - edge)
    }

    /// Adds a node, or replaces the one of the same name. Returns true if that is a change.
    pub fn insert(&mut self, node: InventoryNode) -> bool {
        match self.find(node.name.as_str()) {
            Ok(place) if *self.nodes[place] == node => return false,
            Ok(place) => Arc::make_mut(&mut self.nodes)[place] = Arc::new(node),
            Err(place) => Arc::make_mut(&mut self.nodes).insert(place, Arc::new(node)),
        }
        true
    }

    /// Removes a node. Returns true if it existed.
    pub fn remove(&mut self, name: &str) -> bool {
        let Ok(place) = self.find(name) else { return false };
        Arc::make_mut(&mut self.nodes).remove(place);
        true
    }

    /// Names of the nodes that were added, removed or changed since `before`, in order.
    pub fn changed_since(&self, before: &Self) -> Vec<NodeName> {
        let (mut old, mut new) = (before.iter().peekable(), self.iter().peekable());
        let mut changed = Vec::new();
        loop {
            let order = match (old.peek(), new.peek()) {
                (Some(old), Some(new)) => old.name.cmp(&new.name),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => return changed,
            };
            let was = if order.is_le() { old.next() } else { None };
            let is = if order.is_ge() { new.next() } else { None };
            if was != is {
                changed.extend(is.or(was).map(|node| node.name.clone()));
            }
        }
    }
}

/// By index in the order of names.
impl Index<usize> for Inventory {
    type Output = Arc<InventoryNode>;

    fn index(&self, place: usize) -> &Self::Output {
        &self.nodes[place]
    }
}

impl Serialize for Inventory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(|node| &**node))
    }
}

impl FromIterator<InventoryNode> for Inventory {
    fn from_iter<I: IntoIterator<Item = InventoryNode>>(nodes: I) -> Self {
        let nodes: BTreeMap<NodeName, Arc<InventoryNode>> =
            nodes.into_iter().map(|node| (node.name.clone(), Arc::new(node))).collect();
        Self { nodes: Arc::new(nodes.into_values().collect()) }
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
    fn nodes_come_and_go_in_the_order_of_their_names() {
        let node =
            |name: &str, edge: bool| InventoryNode { edge, ..InventoryNode::new(name.parse().unwrap()) };
        let mut nodes = Inventory::from(vec![node("b", true), node("a", false), node("c", true)]);
        let before = nodes.clone();
        assert_eq!(nodes.counts(), (2, 1));
        assert!(
            !nodes.insert(node("b", true)) && nodes.insert(node("b", false)) && nodes.insert(node("d", true))
        );
        assert!(nodes.remove("c") && !nodes.remove("c"));
        assert_eq!((nodes.counts(), nodes.len()), ((1, 2), 3));
        let changed: Vec<_> = nodes.changed_since(&before).iter().map(ToString::to_string).collect();
        assert_eq!(changed, ["b", "c", "d"]);
        assert_eq!(nodes.changed_since(&nodes), []);
        assert_eq!(nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
        assert_eq!(before.counts(), (2, 1), "the copy stays as it was");
    }
}

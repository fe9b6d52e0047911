//! Sources from which agents have attached: their handshakes do not compete with those from unknown sources.

use std::collections::HashMap;
use std::net::IpAddr;

use parking_lot::Mutex;
use tunnel_runtime::NodeName;

use crate::admission::source_key;

/// Maximum number of remembered nodes.
const MOST_NODES: usize = 1 << 17;

/// The source of each node's last session, for as long as this process lives. There is one per node, so that an agent
/// with many addresses cannot push out the others.
#[derive(Debug, Default)]
pub(super) struct KnownSources(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    of_node: HashMap<NodeName, IpAddr>,
    /// Number of nodes of each source.
    nodes: HashMap<IpAddr, u32>,
}

impl KnownSources {
    pub(super) fn remember(&self, node: &NodeName, address: IpAddr) {
        let source = source_key(address);
        let mut known = self.0.lock();
        if known.of_node.get(node) == Some(&source) {
            return;
        }
        // Forgets any other node: among so many, one that competes with unknown sources once makes no difference.
        if known.of_node.len() >= MOST_NODES
            && !known.of_node.contains_key(node)
            && let Some(other) = known.of_node.keys().next().cloned()
        {
            known.forget(&other);
        }
        known.forget(node);
        known.of_node.insert(node.clone(), source);
        *known.nodes.entry(source).or_default() += 1;
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.0.lock().nodes.contains_key(&source_key(address))
    }
}

impl Known {
    fn forget(&mut self, node: &NodeName) {
        let Some(source) = self.of_node.remove(node) else { return };
        if let Some(count) = self.nodes.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.nodes.remove(&source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: usize) -> NodeName {
        format!("edge-{number}").parse().unwrap()
    }

    #[test]
    fn a_source_is_known_while_it_is_some_nodes_last_one() {
        let (known, site, other) = (KnownSources::default(), [10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        assert!(!known.contains(site));
        known.remember(&node(1), site);
        known.remember(&node(2), site);
        known.remember(&node(1), other);
        assert!(known.contains(site) && known.contains(other));
        known.remember(&node(2), other);
        assert!(!known.contains(site) && known.contains(other));
        assert!(known.contains("::ffff:10.0.0.2".parse().unwrap()));
    }

    #[test]
    fn memory_is_bounded_and_an_agent_with_many_addresses_pushes_nobody_out() {
        let known = KnownSources::default();
        known.remember(&node(0), [192, 0, 2, 1].into());
        for number in 0..10_000u32 {
            known.remember(&node(1), number.to_be_bytes().into());
        }
        assert!(known.contains([192, 0, 2, 1].into()));
        assert_eq!(known.0.lock().nodes.len(), 2);
        for number in 0..MOST_NODES + 10 {
            known.remember(&node(number), [192, 0, 2, 1].into());
        }
        let known = known.0.lock();
        assert_eq!((known.of_node.len(), known.nodes.len()), (MOST_NODES, 1));
    }
}

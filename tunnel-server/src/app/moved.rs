//! Ends connections whose target address has passed to another node.
//!
//! A client such as kube-apiserver keeps its connection to an address for the next request, which would otherwise reach
//! the node that had the address before.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tunnel_core::outcome::Outcome;

use crate::metrics::{Connection, Metrics};
use crate::route::{Router, Snapshot};

/// Ends such connections until `stop`. An address that no other node has yet ends nothing: it may come back to its
/// node.
pub(crate) async fn end_moved(router: Arc<Router>, metrics: Metrics, stop: CancellationToken) {
    let mut changed = router.changed();
    let mut before = router.snapshot();
    while let Some(Ok(())) = stop.run_until_cancelled(changed.changed()).await {
        let now = router.snapshot();
        // Most changes are sessions that come and go.
        if !Arc::ptr_eq(&now, &before) && now.holders_differ(&before) {
            for connection in metrics.connections().iter().filter(|connection| has_moved(connection, &now)) {
                if let Some(carried) = connection.carried.get() {
                    let reason = "the address of the target is another node's now";
                    carried.abort.trigger_for(Outcome::TargetReset, reason);
                }
            }
        }
        before = now;
    }
}

/// True if the target's address was its node's, and is another node's now. A target that its node did not have at the
/// beginning was meant to be dialled there, by a client that named both.
fn has_moved(connection: &Connection, now: &Snapshot) -> bool {
    let (Some(node), address) = (&connection.node, connection.target.ip()) else { return false };
    connection.of_node && !now.has(node, address) && now.holder(address).is_some_and(|holder| holder != *node)
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::inventory::{Inventory, InventoryNode};

    /// Sets nodes with these addresses.
    fn routes(router: &Router, nodes: &[(&str, &[&str])]) -> Arc<Snapshot> {
        let node = |(name, addresses): &(&str, &[&str])| InventoryNode {
            edge: true,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..InventoryNode::without_addresses(name)
        };
        router.set_inventory(nodes.iter().map(node).collect::<Inventory>());
        router.snapshot()
    }

    #[test]
    fn only_what_was_the_nodes_and_is_anothers_has_moved() {
        let router = Router::without_nodes(&mut Registry::default());
        let begin = routes(&router, &[("a", &["10.8.0.1", "10.8.0.9"]), ("b", &["10.8.0.2"])]);
        let connection = |node: &str, target: &str| {
            let (node, target) = (node.parse().unwrap(), target.parse::<std::net::SocketAddr>().unwrap());
            let of_node = begin.has(&node, target.ip());
            let client = "10.70.0.1:40000".parse().unwrap();
            Connection::new("redirect", client, Some(node), target).with_of_node(of_node)
        };
        let held = connection("a", "10.8.0.9:10250");
        let other = connection("a", "10.8.0.1:10250");
        let beyond = connection("b", "10.8.0.9:22");
        let moved = |now: &Snapshot| [&held, &other, &beyond].map(|connection| has_moved(connection, now));
        assert_eq!(moved(&begin), [false; 3]);
        let gone = routes(&router, &[("a", &["10.8.0.1"]), ("b", &["10.8.0.2"])]);
        assert!(gone.holders_differ(&begin));
        assert_eq!(moved(&gone), [false; 3], "no other node has it");
        let back = routes(&router, &[("a", &["10.8.0.1"]), ("b", &["10.8.0.2", "10.8.0.9"])]);
        assert!(back.holders_differ(&gone));
        assert_eq!(moved(&back), [true, false, false]);
        let both = routes(&router, &[("a", &["10.8.0.1", "10.8.0.9"]), ("b", &["10.8.0.2", "10.8.0.9"])]);
        assert_eq!(moved(&both), [false; 3], "its node names it too");
        assert!(!both.holders_differ(&both));
    }
}

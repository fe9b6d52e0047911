//! Ends connections whose target address has passed to another node.
//!
//! A client such as kube-apiserver keeps its connection to an address for the next request, which would otherwise reach
//! the node that had the address before.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tunnel_link::outcome::Outcome;
use tunnel_routing::{Router, Snapshot};

use crate::metrics::{Connection, Metrics};

/// Ends such connections until `stop`. An address that no other node has yet ends nothing: it may come back to its
/// node.
pub(crate) async fn end_moved(router: Arc<Router>, metrics: Metrics, stop: CancellationToken) {
    let mut changed = router.changed();
    let mut before = router.snapshot();
    while let Some(Ok(())) = stop.run_until_cancelled(changed.changed()).await {
        let now = router.snapshot();
        // Most changes are sessions that come and go.
        if !Arc::ptr_eq(&now, &before) && now.holders_differ(&before) {
            metrics.live.all().iter().for_each(|connection| end_if_moved(connection, &now));
        }
        before = now;
    }
}

/// Ends the connection, also one whose target is still being dialled, if its address has passed to another node.
pub(crate) fn end_if_moved(connection: &Connection, now: &Snapshot) {
    if has_moved(connection, now) {
        let reason = "the address of the target is another node's now";
        connection.abort.trigger_for(Outcome::TargetReset, reason);
    }
}

/// True if the address by which the node was found is another node's now.
fn has_moved(connection: &Connection, now: &Snapshot) -> bool {
    let (Some(node), Some(address)) = (&connection.node, connection.found_by) else { return false };
    !now.has(node, address) && now.holder(address).is_some_and(|holder| holder.node != *node)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use prometheus_client::registry::Registry;
    use tunnel_routing::ByAddress;
    use tunnel_routing::inventory::{Inventory, InventoryNode};

    use super::*;
    use crate::listener::{AccessLogGuard, ListenerContext, OpenRequest};

    /// Sets nodes with these addresses.
    fn routes(router: &Router, nodes: &[(&str, &[&str])]) -> Arc<Snapshot> {
        let node = |(name, addresses): &(&str, &[&str])| InventoryNode {
            edge: true,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..InventoryNode::new(name.parse().unwrap())
        };
        router.set_inventory(nodes.iter().map(node).collect::<Inventory>());
        router.snapshot()
    }

    #[test]
    fn only_what_was_found_by_an_address_that_is_anothers_has_moved() {
        let router = crate::runtime::without_nodes(&mut Registry::default());
        let begin = routes(&router, &[("a", &["10.8.0.1", "10.8.0.9"]), ("b", &["10.8.0.2"])]);
        let connection = |node: &str, target: &str, found_by: Option<&str>| {
            let (node, target) = (node.parse().unwrap(), target.parse().unwrap());
            let client = "10.70.0.1:40000".parse().unwrap();
            Connection::new("redirect", client, Some(node), target)
                .with_found_by(found_by.map(|address| address.parse().unwrap()))
        };
        let held = connection("a", "10.8.0.9:10250", Some("10.8.0.9"));
        let at_loopback = connection("a", "127.0.0.1:10250", Some("10.8.0.9"));
        let other = connection("a", "10.8.0.1:10250", Some("10.8.0.1"));
        let beyond = connection("b", "10.8.0.9:22", None);
        let moved = |now: &Snapshot| {
            [&held, &at_loopback, &other, &beyond].map(|connection| has_moved(connection, now))
        };
        assert_eq!(moved(&begin), [false; 4]);
        let gone = routes(&router, &[("a", &["10.8.0.1"]), ("b", &["10.8.0.2"])]);
        assert!(gone.holders_differ(&begin));
        assert_eq!(moved(&gone), [false; 4], "no other node has it");
        let back = routes(&router, &[("a", &["10.8.0.1"]), ("b", &["10.8.0.2", "10.8.0.9"])]);
        assert!(back.holders_differ(&gone));
        assert_eq!(moved(&back), [true, true, false, false]);
        let both = routes(&router, &[("a", &["10.8.0.1", "10.8.0.9"]), ("b", &["10.8.0.2", "10.8.0.9"])]);
        assert_eq!(moved(&both), [false; 4], "its node names it too");
        assert!(!both.holders_differ(&both));
    }

    #[tokio::test]
    async fn one_that_is_dialled_or_recorded_after_the_change_is_ended_too() {
        let context = ListenerContext::without_nodes();
        let before = routes(&context.router, &[("a", &["10.8.0.9"]), ("b", &["10.8.0.2"])]);
        let ByAddress::Unique(found) = before.by_address("10.8.0.9".parse().unwrap()) else { panic!() };
        let request = OpenRequest::to_found(found, "127.0.0.1:10250".parse().unwrap());
        let record = || AccessLogGuard::new("https", "10.70.0.1:40000".parse().unwrap(), &request, &context);
        let dialling = record();
        let stop = CancellationToken::new();
        let ending = tokio::spawn(end_moved(context.router.clone(), context.metrics.clone(), stop.clone()));
        tokio::task::yield_now().await;
        assert!(dialling.aborted().now_or_never().is_none());
        routes(&context.router, &[("a", &["10.8.0.1"]), ("b", &["10.8.0.2", "10.8.0.9"])]);
        let failed = tokio::time::timeout(Duration::from_secs(10), dialling.aborted()).await.unwrap();
        assert_eq!(failed.outcome, Outcome::TargetReset);
        assert!(record().aborted().now_or_never().is_some(), "found before the change");
        stop.cancel();
        ending.await.unwrap();
    }
}

//! The ranges of Service addresses.

use std::sync::Arc;
use std::time::Duration;

use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio::sync::watch;
use tunnel_routing::inventory::{Inventory, InventoryNode};
use tunnel_routing::{Router, update_services};
use tunnel_server::kube::read::service_ranges::{AGAIN, run};

use crate::fixture::{Inputs, context, inventory, router};

const RANGES: &str = "/apis/networking.k8s.io/v1/servicecidrs";

fn range(name: &str, cidrs: &[&str]) -> Value {
    json!({"metadata": {"name": name}, "spec": {"cidrs": cidrs}})
}

/// An edge node that claims these addresses.
fn claims(addresses: &[&str]) -> Inventory {
    let mut nodes = (*inventory(&["edge-1"], &[])).clone();
    let node = (**nodes.get("edge-1").unwrap()).clone();
    let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
    nodes.insert(InventoryNode { addresses, ..node });
    nodes
}

fn routed(router: &Router) -> Vec<String> {
    router.desired().table.routes.keys().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_services_address_is_nobodys() {
    let server = ApiServer::start();
    server.put(RANGES, range("kubernetes", &["10.96.0.0/12", "fd00:96::/112"]));
    let (context, _inputs): (_, Inputs) = context(&server, false).await;
    let (router, stop) = (Arc::new(router()), context.stop.clone().drop_guard());
    router.set_inventory(claims(&["192.168.50.2", "10.96.0.10", "10.200.0.1", "fd00:96::a"]));
    assert_eq!(routed(&router).len(), 4, "nothing is known yet");
    let (say, mut said) = watch::channel(Vec::new());
    tokio::spawn(run(context, say, AGAIN));
    let kept = router.clone();
    tokio::spawn(async move {
        while said.changed().await.is_ok() {
            let ranges = said.borrow_and_update().clone();
            update_services(kept.clone(), ranges).await;
        }
    });
    let until = async |what: &str, expected: &[&str]| {
        eventually(what, || (routed(&router) == expected).then_some(())).await;
    };
    until("the ranges", &["10.200.0.1/32", "192.168.50.2/32"]).await;
    server.put(RANGES, range("more", &["10.200.0.0/16", "nonsense"]));
    until("another range", &["192.168.50.2/32"]).await;
    // They stay while the API server is away.
    server.down();
    router.set_inventory(claims(&["192.168.50.2", "10.200.0.1"]));
    assert_eq!(routed(&router), ["192.168.50.2/32"]);
    server.up();
    server.remove(RANGES, "more");
    until("the range to be gone", &["10.200.0.1/32", "192.168.50.2/32"]).await;
    drop(stop);
}

#[tokio::test]
async fn an_api_server_without_them_is_asked_again_after_a_while() {
    let server = ApiServer::start();
    server.inject("list", "servicecidrs", Fault::Status(404), 3);
    server.put(RANGES, range("kubernetes", &["10.96.0.0/12"]));
    let (context, _inputs): (_, Inputs) = context(&server, false).await;
    let (health, _stop) = (context.health.clone(), context.stop.clone().drop_guard());
    let (say, said) = watch::channel(Vec::new());
    tokio::spawn(run(context, say, Duration::from_millis(500)));
    eventually("a question", || (server.requests("list", RANGES) > 0).then_some(())).await;
    assert!(health.report().is_empty(), "nothing is followed that cannot be");
    eventually("the ranges", || (!said.borrow().is_empty()).then_some(())).await;
    assert!(server.requests("list", RANGES) > 3);
}

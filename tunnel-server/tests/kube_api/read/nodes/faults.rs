//! Failures of the API server and of the network on the way to it.

use std::time::{Duration, Instant};

use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::json;
use tunnel_routing::inventory::Inventory;

use super::{Following, NODES, beat, find, has, node, truth};

type Injection = fn(&ApiServer);

/// Failures of the connection to the API server, and of its answers.
const FAULTS: &[(&str, Injection)] = &[
    ("refused", |server| server.down()),
    ("cut in the middle of a line", |server| server.cut_watches()),
    ("ended", |server| server.end_watches()),
    ("410 on an open watch", |server| {
        server.compact();
        server.expire_watches();
    }),
    ("410 as the answer to a watch", |server| {
        server.inject("watch", "nodes", Fault::Status(410), 1);
        server.end_watches();
    }),
    ("410 as an event", |server| {
        server.inject("watch", "nodes", Fault::GoneEvent, 1);
        server.end_watches();
    }),
    ("429", |server| {
        server.inject("*", "nodes", Fault::TooManyRequests { retry_after: 1 }, 2);
        server.cut_watches();
    }),
    ("500", |server| {
        server.inject("*", "nodes", Fault::Status(500), 2);
        server.end_watches();
    }),
    ("a list that fails after 410", |server| {
        server.inject("list", "nodes", Fault::Status(503), 1);
        server.inject("list", "nodes", Fault::Truncate, 1);
        server.inject("watch", "nodes", Fault::Status(410), 1);
        server.end_watches();
    }),
    ("watches that end immediately", |server| {
        server.inject("watch", "nodes", Fault::CloseAtOnce, 2);
        server.end_watches();
    }),
    ("watches that break immediately", |server| {
        server.inject("watch", "nodes", Fault::Truncate, 2);
        server.end_watches();
    }),
    ("slow answers", |server| {
        server.inject("*", "nodes", Fault::Delay(Duration::from_millis(700)), 1);
        server.cut_watches();
    }),
];

/// During each fault nodes are added, removed, moved and changed. The last inventory is right, and no inventory lacked a
/// node that existed all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_inventory_is_right_after_every_fault() {
    // Each on a server of its own, concurrently: it is mostly pauses.
    let all = FAULTS.iter().map(|(name, fault)| tokio::spawn(one_fault(name, *fault)));
    for test in all.collect::<Vec<_>>() {
        test.await.unwrap();
    }
}

async fn one_fault(name: &'static str, fault: Injection) {
    let server = ApiServer::start();
    let stable = |i: &Inventory| {
        (1..=600).all(|n| find(i, &format!("stable-{n:03}")).is_some()) && has(i, "cloud-1", "10.0.0.1")
    };
    server.put(NODES, node("cloud-1", "10.0.0.1", false));
    server.put_all(
        NODES,
        (1..=600)
            .map(|n| node(&format!("stable-{n:03}"), &format!("10.7.{}.{}", n / 200, n % 200 + 1), true)),
    );
    server.put_all(
        NODES,
        [node("a", "10.8.0.1", true), node("b", "10.8.0.2", true), node("c", "10.8.0.3", true)],
    );
    let following = Following::start(&server).await;
    following.until("the first inventory", Instant::now(), stable).await;
    following.synced().await;

    fault(&server);
    server.remove(NODES, "a");
    server.edit(NODES, "b", |node| node["status"]["addresses"][0]["address"] = json!("10.8.0.1"));
    server.edit(NODES, "c", |node| node["metadata"]["labels"]["openyurt.io/is-edge-worker"] = json!("false"));
    server.put(NODES, node("d", "10.8.0.2", true));
    for number in 0..5 {
        beat(&server, "stable-001", number);
    }
    if name == "refused" {
        eventually("the loss is noticed", || (!following.is_synced()).then_some(())).await;
        assert!(following.last_error().is_some_and(|error| error.contains("onnection refused")));
        server.up();
    }
    let (right, since) = (truth(&server), Instant::now());
    let took = following.until(name, since, |inventory| *inventory == right).await;
    println!("{name}: right again after {took:.1?}");
    eventually(&format!("every fault was used: {name}"), || server.faults_are_spent().then_some(())).await;
    following.synced().await;

    // Changes still arrive.
    server.put(NODES, node("e", "10.8.0.5", true));
    following.until(name, Instant::now(), |inventory| *inventory == truth(&server)).await;
    following.each(|inventory| assert!(stable(inventory), "{name}: a node was missing for a while"));
}

#[tokio::test]
async fn retry_after_is_respected() {
    let server = ApiServer::start();
    server.inject("list", "nodes", Fault::TooManyRequests { retry_after: 2 }, 1);
    let started = Instant::now();
    let following = Following::start(&server).await;
    following.until("the inventory", started, |_| true).await;
    assert!(started.elapsed() >= Duration::from_secs(2), "asked again after {:?}", started.elapsed());
    let error = following.last_error().unwrap();
    assert_eq!(error, "the API server asks to wait for 2 s (429 TooManyRequests)");
    following.has_metric("postern_kube_errors_total{resource=\"nodes\"} 1");
}

/// A restored API server counts from an older version.
#[tokio::test]
async fn an_unknown_version_leads_to_a_list() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    let following = Following::start(&server).await;
    following.synced().await;
    // Only a list ends it.
    server.inject("watch", "nodes", Fault::FutureVersion, usize::MAX);
    server.end_watches();
    eventually("a list", || (server.requests("list", NODES) >= 2).then_some(())).await;
    server.heal();
    following.synced().await;
}

/// Of 10,000 Nodes a list has 100 MB, and each server would ask for one.
#[tokio::test]
async fn an_overload_leads_to_no_list() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    let following = Following::start(&server).await;
    following.synced().await;
    server.inject("watch", "nodes", Fault::Status(503), 4);
    server.end_watches();
    eventually("every fault was used", || server.faults_are_spent().then_some(())).await;
    server.put(NODES, node("edge-2", "10.8.0.2", true));
    following.until("the new node", Instant::now(), |i| find(i, "edge-2").is_some()).await;
    assert_eq!(server.requests("list", NODES), 1);
}

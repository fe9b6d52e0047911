//! The inventory from the Nodes.

mod faults;
mod heartbeats;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use postern_fake_kube::{ApiServer, Fault, eventually};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Health, WatchHealth};
use tunnel_routing::inventory::{Inventory, InventoryNode, Selector};
use tunnel_server::kube::read::nodes;

use crate::fixture::{client, router};

const NODES: &str = "/api/v1/nodes";

/// A Node with its InternalIP.
fn node(name: &str, address: &str, edge: bool) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"openyurt.io/is-edge-worker": edge.to_string()}},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}],
        },
    })
}

fn beat(server: &ApiServer, name: &str, number: u64) {
    server.edit(NODES, name, |node| {
        node["status"]["conditions"][0]["lastHeartbeatTime"] =
            json!(format!("2026-01-01T00:{number:02}:00Z"));
    });
}

/// The nodes of a server, followed by the code under test.
struct Following {
    published: Arc<Mutex<Vec<(Instant, Inventory)>>>,
    health: Health,
    registry: Registry,
    _stop: tokio_util::sync::DropGuard,
}

impl Following {
    async fn start(server: &ApiServer) -> Self {
        let published = Arc::new(Mutex::new(Vec::new()));
        let mut registry = Registry::with_prefix("postern");
        let health = Health::register(&mut registry);
        let stop = CancellationToken::new();
        let publish = {
            let published = published.clone();
            move |inventory| published.lock().unwrap().push((Instant::now(), inventory))
        };
        let client = client(server).await;
        let none = std::future::ready(Inventory::default());
        let selector = Selector::default();
        tokio::spawn(nodes::run(client, selector, health.clone(), false, none, publish, stop.clone()));
        Self { published, health, registry, _stop: stop.drop_guard() }
    }

    /// Waits for an inventory in which `wanted` holds. Returns the time from `since` until it was published.
    async fn until(&self, what: &str, since: Instant, wanted: impl Fn(&Inventory) -> bool) -> Duration {
        let at = eventually(what, || {
            let published = self.published.lock().unwrap();
            published.last().filter(|(_, inventory)| wanted(inventory)).map(|(at, _)| *at)
        });
        at.await.saturating_duration_since(since)
    }

    /// Makes a change and waits for the one inventory with it. A superfluous one fails the next call.
    async fn once(&self, what: &str, change: impl FnOnce(), wanted: impl Fn(&Inventory) -> bool) {
        let (before, at) = (self.count(), Instant::now());
        change();
        let took = self.until(what, at, wanted).await;
        println!("{what}: published after {took:?}");
        assert_eq!(self.count(), before + 1, "{what}");
    }

    /// Number of inventories so far.
    fn count(&self) -> usize {
        self.published.lock().unwrap().len()
    }

    fn each(&self, mut check: impl FnMut(&Inventory)) {
        self.published.lock().unwrap().iter().for_each(|(_, inventory)| check(inventory));
    }

    /// None if it has not started yet.
    fn watch(&self) -> Option<WatchHealth> {
        self.health.report().into_iter().find(|watch| watch.resource == "nodes")
    }

    fn last_error(&self) -> Option<String> {
        self.watch()?.last_error
    }

    fn is_synced(&self) -> bool {
        self.watch().is_some_and(|watch| watch.synced)
    }

    async fn synced(&self) {
        eventually("the watch works", || self.is_synced().then_some(())).await;
    }

    #[track_caller]
    fn has_metric(&self, line: &str) {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        assert!(text.contains(line), "{text}");
    }
}

fn find<'a>(inventory: &'a Inventory, name: &str) -> Option<&'a InventoryNode> {
    inventory.get(name).map(|node| &**node)
}

fn has(inventory: &Inventory, name: &str, address: &str) -> bool {
    let address: std::net::IpAddr = address.parse().unwrap();
    find(inventory, name).is_some_and(|node| node.addresses == [address])
}

/// The API server's nodes as an inventory.
fn truth(server: &ApiServer) -> Inventory {
    let items = server.list(NODES);
    let list = json!({"kind": "List", "items": items});
    let truth = tunnel_routing::inventory::parse(&list.to_string(), &Selector::default()).unwrap();
    // A file does not have it.
    let created = |node: &InventoryNode| {
        let item = items.iter().find(|item| item["metadata"]["name"] == node.name.as_str()).unwrap();
        Some(time(item["metadata"]["creationTimestamp"].as_str().unwrap()))
    };
    // Nor does it know that this one was an edge node.
    let was_edge = |node: &InventoryNode| node.name.as_str() == "c" && !node.edge;
    let known = |node: &InventoryNode| InventoryNode {
        created: created(node),
        was_edge: was_edge(node),
        ..node.clone()
    };
    truth.iter().map(|node| known(node)).collect()
}

fn time(text: &str) -> SystemTime {
    text.parse::<jiff::Timestamp>().unwrap().into()
}

#[tokio::test]
async fn a_node_that_is_created_again_is_another_one() {
    let server = ApiServer::start();
    let created = |at: &str| {
        let mut node = node("edge-1", "10.8.0.1", true);
        node["metadata"]["creationTimestamp"] = json!(at);
        server.put(NODES, node);
    };
    let (first, second) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z");
    created(first);
    let following = Following::start(&server).await;
    let is = |at: &str| {
        let at = Some(time(at));
        move |inventory: &Inventory| find(inventory, "edge-1").is_some_and(|node| node.created == at)
    };
    following.until("the first", Instant::now(), is(first)).await;
    server.remove(NODES, "edge-1");
    created(second);
    following.until("the second", Instant::now(), is(second)).await;
}

#[tokio::test]
async fn every_change_is_published_exactly_once() {
    let server = ApiServer::start();
    server.put_all(
        NODES,
        [
            node("cloud-1", "10.0.0.1", false),
            node("edge-1", "10.8.0.1", true),
            node("edge-2", "10.8.0.2", true),
        ],
    );
    let following = Following::start(&server).await;
    following.until("the first inventory", Instant::now(), |inventory| inventory.counts() == (2, 1)).await;
    assert_eq!(following.count(), 1);
    following.synced().await;

    let set = |name: &'static str, address: &'static str| {
        server.edit(NODES, name, |node| node["status"]["addresses"][0]["address"] = json!(address));
    };
    let moved = || set("edge-1", "10.8.0.7");
    following.once("an address", moved, |i| has(i, "edge-1", "10.8.0.7")).await;

    let labelled = || {
        server.edit(NODES, "edge-1", |node| {
            node["metadata"]["labels"]["openyurt.io/is-edge-worker"] = json!("false");
        });
    };
    following.once("a label", labelled, |i| i.counts() == (1, 2)).await;
    following.once("a deletion", || server.remove(NODES, "edge-1"), |i| find(i, "edge-1").is_none()).await;
    let created = || drop(server.put(NODES, node("edge-1", "10.8.0.9", true)));
    following.once("a re-creation", created, |i| has(i, "edge-1", "10.8.0.9")).await;

    // Readiness of a cloud node is no change; the next change shows that it was seen.
    let unready = || {
        server.edit(NODES, "cloud-1", |node| node["status"]["conditions"][0]["status"] = json!("False"));
        server.put(NODES, node("edge-3", "10.8.0.10", true));
    };
    following.once("a new node", unready, |i| find(i, "edge-3").is_some()).await;
    following.each(|inventory| assert!(has(inventory, "cloud-1", "10.0.0.1"), "Ready or not"));

    // An address moves from one node to another: two changes, which are mostly published as one.
    let before = following.count();
    set("edge-1", "10.8.0.3");
    set("edge-2", "10.8.0.9");
    let moved = |i: &Inventory| has(i, "edge-2", "10.8.0.9") && has(i, "edge-1", "10.8.0.3");
    following.until("an address at another node", Instant::now(), moved).await;
    let published = following.count() - before;
    assert!((1..=2).contains(&published), "two changes in {published} inventories");
}

#[tokio::test]
async fn heartbeats_make_no_inventory() {
    let server = ApiServer::start();
    server.put_all(NODES, (1..=20).map(|n| node(&format!("edge-{n:02}"), &format!("10.8.0.{n}"), true)));
    let following = Following::start(&server).await;
    following.until("the first inventory", Instant::now(), |inventory| inventory.len() == 20).await;
    following.synced().await;
    for number in 0..30 {
        for n in 1..=20 {
            beat(&server, &format!("edge-{n:02}"), number);
        }
    }
    // The next change shows that they were seen.
    server.put(NODES, node("last", "10.8.0.99", true));
    following.until("the last node", Instant::now(), |inventory| inventory.len() == 21).await;
    assert_eq!(following.count(), 2);
}

#[tokio::test]
async fn large_lists_come_in_pages_and_are_one_inventory() {
    let server = ApiServer::start();
    server.put_all(
        NODES,
        (0..1203).map(|n| node(&format!("edge-{n:04}"), &format!("10.8.{}.{}", n / 250, n % 250 + 1), true)),
    );
    let following = Following::start(&server).await;
    following.until("the inventory", Instant::now(), |inventory| inventory.len() == 1203).await;
    assert_eq!((server.requests("list", NODES), server.requests("continue", NODES)), (1, 2));
    following.synced().await;

    // In the second list a node is gone and another is new; the first attempt at it fails between two pages.
    server.down();
    server.remove(NODES, "edge-0500");
    server.put(NODES, node("new", "10.9.0.1", true));
    server.compact();
    server.inject("continue", "nodes", Fault::Status(410), 1);
    server.inject("continue", "nodes", Fault::Truncate, 1);
    server.up();
    let wanted = |i: &Inventory| find(i, "new").is_some() && find(i, "edge-0500").is_none();
    following.until("the second inventory", Instant::now(), wanted).await;
    assert!(server.faults_are_spent());
    assert_eq!(following.count(), 2);
    following.each(|inventory| assert_eq!(inventory.len(), 1203));
}

#[tokio::test]
async fn an_empty_cluster_is_an_inventory_too() {
    let server = ApiServer::start();
    let following = Following::start(&server).await;
    following.until("the empty inventory", Instant::now(), |inventory| inventory.is_empty()).await;
}

#[tokio::test]
async fn nodes_that_vanish_all_at_once_stay() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    server.put(NODES, node("edge-2", "10.8.0.2", true));
    let following = Following::start(&server).await;
    following.until("the nodes", Instant::now(), |inventory| inventory.len() == 2).await;
    following.synced().await;
    // A list without nodes, as of an API server with an empty store.
    server.down();
    server.remove(NODES, "edge-1");
    server.remove(NODES, "edge-2");
    server.compact();
    let lists = server.requests("list", NODES);
    server.up();
    eventually("the list", || (server.requests("list", NODES) > lists).then_some(())).await;
    following.synced().await;
    // The next change shows that it was seen, and takes none away either.
    server.put(NODES, node("edge-3", "10.8.0.3", true));
    following.until("the new node", Instant::now(), |inventory| find(inventory, "edge-3").is_some()).await;
    following.each(|i| assert!(has(i, "edge-1", "10.8.0.1") && has(i, "edge-2", "10.8.0.2"), "{i:?}"));
    // A list with nodes is trusted again.
    server.down();
    server.put(NODES, node("edge-4", "10.8.0.4", true));
    server.compact();
    server.up();
    let listed = |i: &Inventory| i.len() == 2 && find(i, "edge-3").is_some() && find(i, "edge-4").is_some();
    following.until("what the list has", Instant::now(), listed).await;
}

/// Acts as the kubelet of edge-1 with its credentials: it may change its own Node.
#[tokio::test]
async fn a_node_that_names_50_000_addresses_changes_nobody_elses_routes() {
    let server = ApiServer::start();
    server.put(NODES, node("cloud-1", "10.0.0.1", false));
    server.put_all(NODES, (1..=3).map(|n| node(&format!("edge-{n}"), &format!("10.8.0.{n}"), true)));
    let following = Following::start(&server).await;
    following.until("the nodes", Instant::now(), |inventory| inventory.len() == 4).await;
    following.synced().await;
    let router = router();
    let last = || following.published.lock().unwrap().last().unwrap().1.clone();
    router.set_inventory(last());
    let before = router.desired();
    assert_eq!(before.table.routes.len(), 3);

    let address =
        |n: u32| json!({"type": "InternalIP", "address": std::net::Ipv4Addr::from(0x0a08_0001 + n)});
    let started = Instant::now();
    server.edit(NODES, "edge-1", |node| {
        // Its own, those of the other edge nodes, the cloud node's, and many more.
        let cloud = json!({"type": "InternalIP", "address": "10.0.0.1"});
        node["status"]["addresses"] =
            (0..3).map(address).chain([cloud]).chain((3..50_000).map(address)).collect();
    });
    let named = |i: &Inventory| find(i, "edge-1").is_some_and(|node| node.left_out > 49_000);
    let took = following.until("the addresses", started, named).await;
    println!("50,000 addresses: published after {took:?}");
    router.set_inventory(last());
    let (after, snapshot) = (router.desired(), router.snapshot());
    assert_eq!(after.table.excluded, before.table.excluded);
    for (net, target) in before.routes() {
        assert_eq!(after.route(net), Some(target), "{net}");
    }
    let (fewer, more) = (before.table.routes.len(), after.table.routes.len());
    assert!(more <= fewer + 12, "{more} routes");
    let kinds: Vec<_> = snapshot.conflicts().iter().map(|conflict| conflict.kind.as_str()).collect();
    assert_eq!(kinds, ["taken", "taken", "cloud_and_edge", "too_many"]);
}

#[tokio::test]
async fn unusable_fields_do_not_hide_the_rest() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    server.put(NODES, node("Not_A_Name", "10.8.0.2", true));
    let mut odd = node("edge-3", "10.8.0", true);
    odd["status"]["addresses"][1] = json!({"type": "ExternalIP", "address": "203.0.113.3"});
    odd["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = json!(70_000);
    server.put(NODES, odd);
    let following = Following::start(&server).await;
    let wanted =
        |i: &Inventory| i.len() == 2 && has(i, "edge-1", "10.8.0.1") && has(i, "edge-3", "203.0.113.3");
    following.until("the rest", Instant::now(), wanted).await;
}

#[tokio::test]
async fn an_api_server_may_start_later() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    server.down();
    let following = Following::start(&server).await;
    let error = eventually("an error", || following.last_error()).await;
    assert!(error.contains("onnection refused"), "{error}");
    following.has_metric("postern_kube_watch_synced{resource=\"nodes\"} 0");
    assert_eq!(following.count(), 0);
    server.up();
    following.until("the inventory", Instant::now(), |inventory| inventory.len() == 1).await;
    following.synced().await;
    following.has_metric("postern_kube_watch_synced{resource=\"nodes\"} 1");
}

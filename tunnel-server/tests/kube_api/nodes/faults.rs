//! What an API server and the network before it do to a watch.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use kube::Api;
use kube::runtime::watcher::{Config, Event};
use serde_json::json;
use tunnel_server::inventory::Inventory;
use tunnel_server::kube::nodes::SlimNode;
use tunnel_server::kube::watch::{Health, follow};

use super::{Following, NODES, beat, find, has, node, truth};
use crate::scripted::{ApiServer, Fault, eventually};

type Injection = fn(&ApiServer);

/// What happens to the connection to the API server, and to its answers.
const FAULTS: &[(&str, Injection)] = &[
    ("refused", |server| server.down()),
    ("cut in the middle of a line", ApiServer::cut_watches),
    ("ended", ApiServer::end_watches),
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
    ("watches that end at once", |server| {
        server.inject("watch", "nodes", Fault::CloseAtOnce, 2);
        server.end_watches();
    }),
    ("watches that break at once", |server| {
        server.inject("watch", "nodes", Fault::Truncate, 2);
        server.end_watches();
    }),
    ("slow answers", |server| {
        server.inject("*", "nodes", Fault::Delay(Duration::from_millis(700)), 1);
        server.cut_watches();
    }),
];

/// While each fault is there nodes come, go, move and change; what is known at the end is the truth, and nothing was ever
/// published that lacked a node which was there all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_inventory_is_right_after_every_fault() {
    // Each on a server of its own, all at once: it is mostly pauses.
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
    eventually(&format!("every fault was met: {name}"), || server.faults_are_spent().then_some(())).await;
    following.synced().await;

    // And on it goes.
    server.put(NODES, node("e", "10.8.0.5", true));
    following.until(name, Instant::now(), |inventory| *inventory == truth(&server)).await;
    following.each(|inventory| assert!(stable(inventory), "{name}: a node was missing for a while"));
}

#[tokio::test]
async fn the_api_servers_wish_to_wait_is_granted() {
    let server = ApiServer::start();
    server.inject("list", "nodes", Fault::TooManyRequests { retry_after: 2 }, 1);
    let started = Instant::now();
    let following = Following::start(&server).await;
    following.until("the inventory", started, |_| true).await;
    assert!(started.elapsed() >= Duration::from_secs(2), "asked again after {:?}", started.elapsed());
    let error = following.last_error().unwrap();
    assert_eq!(error, "the API server asks to wait for 2 s (429 TooManyRequests)");
    assert!(
        following.metrics().contains("postern_kube_errors_total{resource=\"nodes\"} 1"),
        "{}",
        following.metrics()
    );
}

/// A restored API server counts from an older version: the watch asks for one that is not there yet, and is told so with
/// an error like any other.
#[tokio::test]
async fn a_version_that_the_api_server_does_not_know_is_not_asked_for_for_ever() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    let following = Following::start(&server).await;
    following.synced().await;
    // As many as it takes: only a list ends it.
    server.inject("watch", "nodes", Fault::Status(504), usize::MAX);
    server.end_watches();
    eventually("a list", || (server.requests("list", NODES) >= 2).then_some(())).await;
    server.heal();
    following.synced().await;
}

/// Half-open connections and servers that have stopped say nothing at all.
#[tokio::test]
async fn a_watch_that_has_become_silent_is_opened_again() {
    let server = ApiServer::start();
    server.put(NODES, node("edge-1", "10.8.0.1", true));
    let health = Health::default();
    let api = Api::<SlimNode>::all(server.client().await);
    let mut events = Box::pin(follow(api, Config::default().timeout(2), "nodes", health.clone()));
    while !matches!(events.next().await, Some(Event::InitDone)) {}
    let next = async {
        loop {
            if let Some(Event::Apply(node)) = events.next().await {
                return node.name().to_owned();
            }
        }
    };
    let test = async {
        eventually("an open watch", || (server.open_watches(NODES) == 1).then_some(())).await;
        eventually("a watch in order", || health.report()[0].synced.then_some(())).await;
        server.freeze_watches();
        server.put(NODES, node("edge-2", "10.8.0.2", true));
    };
    let (name, ()) =
        tokio::time::timeout(Duration::from_secs(30), async { tokio::join!(next, test) }).await.unwrap();
    assert_eq!(name, "edge-2");
    let error = health.report()[0].last_error.clone().unwrap();
    assert_eq!(error, "the watch has been silent for 7 s");
}

/// A watch ends every so often; that is no outage, and what happened meanwhile is not lost.
#[tokio::test]
async fn the_usual_end_of_a_watch_is_not_an_outage() {
    let server = ApiServer::start();
    let health = Health::default();
    let api = Api::<SlimNode>::all(server.client().await);
    let mut events = Box::pin(follow(api, Config::default().timeout(1), "nodes", health.clone()));
    let reader = tokio::spawn(async move {
        let mut names = Vec::new();
        while names.len() < 40 {
            if let Some(Event::Apply(node)) = events.next().await {
                names.push(node.name().to_owned());
            }
        }
        // Whose end would end the report too.
        (names, events)
    });
    eventually("the watch", || (server.open_watches(NODES) == 1).then_some(())).await;
    let expected: Vec<String> = (0..40).map(|n| format!("edge-{n:02}")).collect();
    for (n, name) in expected.iter().enumerate() {
        // Spread over several watches.
        eventually("further watches", || (server.requests("watch", NODES) > n / 10).then_some(())).await;
        server.put(NODES, node(name, "10.8.0.1", true));
    }
    let (names, _events) = reader.await.unwrap();
    assert_eq!(names, expected);
    assert_eq!((server.requests("list", NODES), health.report()[0].last_error.clone()), (1, None));
}

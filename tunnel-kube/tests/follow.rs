//! Following objects of a fake API server, with the server's settings.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, ResourceExt as _};
use postern_fake_kube::{ApiServer, eventually};
use serde_json::json;
use tunnel_kube::{ClientSettings, Health, connect};

const NODES: &str = "/api/v1/nodes";

async fn nodes(server: &ApiServer) -> Api<Node> {
    Api::all(connect(Some(&server.kubeconfig()), None, &ClientSettings::SERVER).await.unwrap().0)
}

fn put(server: &ApiServer, name: &str) {
    server.put(NODES, json!({"metadata": {"name": name}}));
}

/// Half-open connections and stopped servers send nothing at all.
#[tokio::test]
async fn a_silent_watch_is_opened_again() {
    let server = ApiServer::start();
    put(&server, "edge-1");
    let health = Health::default();
    let mut events = Box::pin(health.follow(nodes(&server).await, Config::default().timeout(2), "nodes"));
    while !matches!(events.next().await, Some(Event::InitDone)) {}
    let next = async {
        loop {
            if let Some(Event::Apply(node)) = events.next().await {
                return node.name_any();
            }
        }
    };
    let test = async {
        eventually("an open watch", || (server.open_watches(NODES) == 1).then_some(())).await;
        eventually("a working watch", || health.report()[0].synced.then_some(())).await;
        server.freeze_watches();
        put(&server, "edge-2");
    };
    let (name, ()) =
        tokio::time::timeout(Duration::from_secs(30), async { tokio::join!(next, test) }).await.unwrap();
    assert_eq!(name, "edge-2");
    let error = health.report()[0].last_error.clone().unwrap();
    assert_eq!(error, "the watch has been silent for 7 s");
}

/// The API server ends a watch every so often. Changes in between are not lost.
#[tokio::test]
async fn the_usual_end_of_a_watch_is_not_an_outage() {
    let server = ApiServer::start();
    let health = Health::default();
    let mut events = Box::pin(health.follow(nodes(&server).await, Config::default().timeout(1), "nodes"));
    let reader = tokio::spawn(async move {
        let mut names = Vec::new();
        while names.len() < 40 {
            if let Some(Event::Apply(node)) = events.next().await {
                names.push(node.name_any());
            }
        }
        // The report ends with the events.
        (names, events)
    });
    eventually("the watch", || (server.open_watches(NODES) == 1).then_some(())).await;
    let expected: Vec<String> = (0..40).map(|n| format!("edge-{n:02}")).collect();
    for (n, name) in expected.iter().enumerate() {
        // Spread over several watches.
        eventually("further watches", || (server.requests("watch", NODES) > n / 10).then_some(())).await;
        put(&server, name);
    }
    let (names, _events) = reader.await.unwrap();
    assert_eq!(names, expected);
    assert_eq!((server.requests("list", NODES), health.report()[0].last_error.clone()), (1, None));
}

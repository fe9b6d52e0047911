//! The cluster's last known state, for a start while the API server is away.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use postern_fake_kube::{ApiServer, eventually};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tunnel_routing::Router;
use tunnel_routing::inventory::Inventory;
use tunnel_runtime::lifecycle::Readiness;
use tunnel_server::inventory::NodeCount;
use tunnel_server::kube::cache::{Age, ClusterCache};
use tunnel_server::kube::read::nodes;
use tunnel_server::kube::{Apply, KubeContext, Said, last_known};
use tunnel_server::runtime::settings::Settings;

use crate::fixture::{context, router};

const NODES: &str = "/api/v1/nodes";

/// The part of a server that follows the nodes.
struct Following {
    router: Arc<Router>,
    age: Age,
    readiness: Readiness,
    /// Ranges of Service addresses from the API server.
    ranges: watch::Sender<Vec<IpNet>>,
    /// The ports of the ConfigMap.
    ports: watch::Sender<Arc<Settings>>,
    /// The settings in effect.
    settings: watch::Receiver<Arc<Settings>>,
    tasks: TaskTracker,
    stop: DropGuard,
}

impl Following {
    async fn start(api: &ApiServer, state_dir: &Path) -> Self {
        let (KubeContext { client, health, .. }, _inputs) = context(api, false).await;
        let (router, age, readiness) = (Arc::new(router()), Age::default(), Readiness::default());
        let cache = ClusterCache::new(state_dir);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let (ports, ports_said) = watch::channel(Arc::<Settings>::default());
        let (settings, in_effect) = watch::channel(Arc::<Settings>::default());
        let (ranges, ranges_said) = watch::channel(Vec::new());
        let (inventory, nodes) = watch::channel(Arc::<Inventory>::default());
        let last_known = last_known(cache.clone(), router.clone());
        let apply = Apply {
            said: Said { nodes, ranges: ranges_said, ports: ports_said },
            router: router.clone(),
            settings,
            known_nodes: watch::Sender::default(),
            count: NodeCount::default(),
            cache,
            age: age.clone(),
            health: health.clone(),
            nodes_known: Some(readiness.pending("nodes")),
            ports_known: Some(Readiness::default().pending("ports")),
        };
        tasks.spawn(apply.run(stop.clone()));
        let publish = move |nodes| drop(inventory.send_replace(Arc::new(nodes)));
        let selector = "node-role.kubernetes.io/edge".parse().unwrap();
        tasks.spawn(nodes::run(client, selector, health, false, last_known, publish, stop.clone()));
        tasks.close();
        let stop = stop.drop_guard();
        Self { router, age, readiness, ranges, ports, settings: in_effect, tasks, stop }
    }

    async fn until_routed(&self, expected: &[&str]) {
        let routed =
            || self.router.desired().table.routes.keys().map(ToString::to_string).collect::<Vec<_>>();
        eventually(&format!("routes to {expected:?}"), || (routed() == expected).then_some(())).await;
    }

    async fn stop(self) {
        drop(self.stop);
        self.tasks.wait().await;
    }
}

/// Waits until the nodes are in the file: the router has them a moment earlier.
async fn until_saved(file: &Path) {
    eventually("the nodes to be in the file", || file.exists().then_some(())).await;
}

fn node(name: &str, address: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"node-role.kubernetes.io/edge": ""}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    })
}

fn an_hour_ago() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() - 3600
}

#[tokio::test]
async fn the_nodes_last_known_are_used_until_the_api_server_answers() {
    let api = ApiServer::start();
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("cluster.json");
    api.put(NODES, node("edge-1", "192.168.50.2"));
    api.put(NODES, node("edge-2", "10.96.0.10"));
    let first = Following::start(&api, state.path()).await;
    first.until_routed(&["10.96.0.10/32", "192.168.50.2/32"]).await;
    until_saved(&file).await;
    assert!(first.readiness.is_ready());
    let settings = Settings { tunnelled: [9100].into(), loopback: [10266].into(), ..Settings::default() };
    first.ports.send_replace(Arc::new(settings.clone()));
    let mut in_effect = first.settings.clone();
    in_effect.wait_for(|now| **now == settings).await.unwrap();
    first.ranges.send_replace(vec!["10.96.0.0/12".parse().unwrap()]);
    first.until_routed(&["192.168.50.2/32"]).await;
    first.stop().await;
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mut content: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    content["at"] = json!(an_hour_ago());
    std::fs::write(&file, content.to_string()).unwrap();

    api.down();
    let second = Following::start(&api, state.path()).await;
    // The file has the ranges of Service addresses too.
    second.until_routed(&["192.168.50.2/32"]).await;
    eventually("the start to be done", || second.readiness.is_ready().then_some(())).await;
    assert_eq!(**second.settings.borrow(), settings);
    let old = second.age.seconds().unwrap();
    assert!((3600..3700).contains(&old), "{old}");

    api.remove(NODES, "edge-1");
    api.put(NODES, node("edge-3", "192.168.52.2"));
    api.up();
    second.until_routed(&["192.168.52.2/32"]).await;
    eventually("the nodes to be current", || second.age.seconds().is_none().then_some(())).await;
    second.stop().await;
    let content: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(content["at"].as_u64().unwrap() > an_hour_ago(), "{content}");
    assert_eq!(content["nodes"].as_array().unwrap().len(), 2);
    // The ConfigMap was not read: its ports stay.
    assert_eq!(content["settings"]["tunnelled"], json!([9100]));
}

/// As with an API server that takes long to list many nodes, and had no ServiceCIDRs before it was upgraded.
#[tokio::test]
async fn ranges_that_the_api_server_has_said_are_not_those_of_the_file() {
    let api = ApiServer::start();
    let state = tempfile::tempdir().unwrap();
    api.put(NODES, node("edge-1", "192.168.50.2"));
    api.put(NODES, node("edge-2", "10.96.0.10"));
    let first = Following::start(&api, state.path()).await;
    first.until_routed(&["10.96.0.10/32", "192.168.50.2/32"]).await;
    until_saved(&state.path().join("cluster.json")).await;
    first.stop().await;

    api.down();
    let second = Following::start(&api, state.path()).await;
    second.ranges.send_replace(vec!["10.96.0.0/12".parse().unwrap()]);
    eventually("the file to be used", || second.age.seconds()).await;
    second.until_routed(&["192.168.50.2/32"]).await;
    second.stop().await;
}

/// As with an API server whose store is empty.
#[tokio::test]
async fn an_api_server_without_nodes_takes_none_from_a_server_that_starts() {
    let api = ApiServer::start();
    let state = tempfile::tempdir().unwrap();
    api.put(NODES, node("edge-1", "192.168.50.2"));
    let mut routed = vec!["192.168.50.2/32"];
    let first = Following::start(&api, state.path()).await;
    first.until_routed(&routed).await;
    until_saved(&state.path().join("cluster.json")).await;
    first.stop().await;
    api.remove(NODES, "edge-1");

    // It is away when the server starts, or answers at once. Then a node comes.
    for (away, name, address, route) in [
        (true, "edge-2", "192.168.51.2", "192.168.51.2/32"),
        (false, "edge-3", "192.168.52.2", "192.168.52.2/32"),
    ] {
        let watches = api.requests("watch", NODES);
        if away {
            api.down();
        }
        let following = Following::start(&api, state.path()).await;
        if away {
            following.until_routed(&routed).await;
            api.up();
        }
        // The list has come once there is a watch.
        eventually("a watch", || (api.requests("watch", NODES) > watches).then_some(())).await;
        following.until_routed(&routed).await;
        eventually("the start to be done", || following.readiness.is_ready().then_some(())).await;
        assert!(following.age.seconds().is_some(), "they are those of the file");
        api.put(NODES, node(name, address));
        routed.push(route);
        following.until_routed(&routed).await;
        eventually("the nodes to be current", || following.age.seconds().is_none().then_some(())).await;
        following.stop().await;
        api.remove(NODES, name);
        let content = std::fs::read(state.path().join("cluster.json")).unwrap();
        let content: Value = serde_json::from_slice(&content).unwrap();
        assert_eq!(content["nodes"].as_array().unwrap().len(), routed.len(), "{content}");
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_used_is_as_none() {
    let api = ApiServer::start();
    api.put(NODES, node("edge-1", "192.168.50.2"));
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("cluster.json");
    let first = Following::start(&api, state.path()).await;
    first.until_routed(&["192.168.50.2/32"]).await;
    until_saved(&file).await;
    first.stop().await;
    let cache = ClusterCache::new(state.path());
    assert!(cache.load().await.is_some());
    let good = std::fs::read_to_string(&file).unwrap();
    let other = good.replace("\"version\":1", "\"version\":2");
    assert_ne!(good, other);
    for content in ["", "{", "{\"version\":2}", "{\"version\":1,\"at\":1}", "[]", &other] {
        std::fs::write(&file, content).unwrap();
        assert!(cache.load().await.is_none(), "{content:?}");
    }
}

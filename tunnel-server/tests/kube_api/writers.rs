//! What the server writes to the cluster.

mod dns;
mod election;
mod events;
mod names;
mod service;
mod tunnels;

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_server::inventory::{DEFAULT_KUBELET_PORT, Inventory, InventoryNode};
use tunnel_server::kube::events::Events;
use tunnel_server::kube::settings::Settings;
use tunnel_server::kube::watch::Health;
use tunnel_server::kube::{Cluster, ObjectNames};

use crate::scripted::ApiServer;

const SERVICES: &str = "/api/v1/namespaces/kube-system/services";
const INTERNAL: &str = "x-tunnel-server-internal-svc";

/// A cluster whose leader, nodes and settings the test decides.
struct Fixture {
    api: ApiServer,
    cluster: Cluster,
    leader: watch::Sender<bool>,
    inventory: watch::Sender<Arc<Inventory>>,
    settings: watch::Sender<Arc<Settings>>,
}

impl Fixture {
    async fn new(leads: bool) -> Self {
        let api = ApiServer::start();
        let client = api.client().await;
        let stop = CancellationToken::new();
        let (leader, leads) = watch::channel(leads);
        let (inventory, nodes) = watch::channel(Arc::default());
        let (settings, ports) = watch::channel(Arc::default());
        let cluster = Cluster {
            events: Events::start(client.clone(), "server-a", stop.clone()),
            client,
            namespace: "kube-system".into(),
            names: Arc::new(ObjectNames::default()),
            identity: "server-a".into(),
            leader: leads,
            inventory: nodes,
            settings: ports,
            health: Health::default(),
            stop,
        };
        Self { api, cluster, leader, inventory, settings }
    }

    fn nodes(&self, edge: &[&str], cloud: &[&str]) {
        self.inventory.send_replace(inventory(edge, cloud));
    }

    /// Another server of the cluster, which does not lead.
    fn other(&self) -> (Cluster, watch::Sender<bool>, watch::Sender<Arc<Inventory>>) {
        let (leader, leads) = watch::channel(false);
        let (inventory, nodes) = watch::channel(Arc::default());
        let cluster = Cluster {
            identity: "server-b".into(),
            leader: leads,
            inventory: nodes,
            health: Health::default(),
            ..self.cluster.clone()
        };
        (cluster, leader, inventory)
    }

    fn internal_service(&self, cluster_ip: &str, ports: &Value) {
        let spec = json!({"clusterIP": cluster_ip, "ports": ports});
        self.api.put(SERVICES, json!({"metadata": {"name": INTERNAL}, "spec": spec}));
    }

    /// Notes of the Events with this reason about this object.
    fn events(&self, namespace: &str, reason: &str, name: &str) -> Vec<String> {
        let events = self.api.list(&format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"));
        events
            .into_iter()
            .filter(|event| event["reason"] == reason && event["regarding"]["name"] == name)
            .map(|event| event["note"].as_str().unwrap_or_default().to_owned())
            .collect()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.cluster.stop.cancel();
    }
}

/// Edge nodes, then cloud nodes with the addresses 10.0.0.1 and on.
fn inventory(edge: &[&str], cloud: &[&str]) -> Arc<Inventory> {
    let node = |name: &str, edge: bool, address: String| InventoryNode {
        name: name.parse().unwrap(),
        edge,
        addresses: vec![address.parse().unwrap()],
        kubelet_port: DEFAULT_KUBELET_PORT,
        pod_cidrs: Vec::new(),
    };
    let edge = edge.iter().map(|name| node(name, true, "192.168.50.2".into()));
    let cloud = (1..).zip(cloud).map(|(n, name)| node(name, false, format!("10.0.0.{n}")));
    Arc::new(Inventory { nodes: edge.chain(cloud).collect() })
}

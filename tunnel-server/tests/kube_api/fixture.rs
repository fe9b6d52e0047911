//! A fake API server, and a server's view of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use postern_fake_kube::ApiServer;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::inventory::{DEFAULT_KUBELET_PORT, Inventory, InventoryNode};
use tunnel_routing::{Router, RouterConfig};
use tunnel_server::kube::write::events::Events;
use tunnel_server::kube::{KubeContext, KubeOptions, ObjectNames};
use tunnel_server::runtime::settings::Settings;

pub(crate) const SERVICES: &str = "/api/v1/namespaces/kube-system/services";
pub(crate) const INTERNAL: &str = "x-tunnel-server-internal-svc";

pub(crate) fn options(server: &ApiServer) -> KubeOptions {
    KubeOptions { kubeconfig: Some(server.kubeconfig()), namespace: None, names: ObjectNames::default() }
}

pub(crate) async fn client(server: &ApiServer) -> kube::Client {
    options(server).connect().await.unwrap().0
}

/// The inputs of a server's view, which the test sets.
pub(crate) struct Inputs {
    pub(crate) leader: watch::Sender<bool>,
    pub(crate) inventory: watch::Sender<Arc<Inventory>>,
    pub(crate) settings: watch::Sender<Arc<Settings>>,
}

/// A server's view of the cluster.
pub(crate) async fn context(api: &ApiServer, leads: bool) -> (KubeContext, Inputs) {
    let (leader, leads) = watch::channel(leads);
    let (inventory, nodes) = watch::channel(Arc::default());
    let (settings, ports) = watch::channel(Arc::default());
    let context = KubeContext {
        client: client(api).await,
        namespace: "kube-system".into(),
        names: Arc::new(ObjectNames::default()),
        identity: "server-a".into(),
        leader: leads,
        inventory: nodes,
        settings: ports,
        health: Health::default(),
        stop: CancellationToken::new(),
    };
    (context, Inputs { leader, inventory, settings })
}

/// A cluster with one server.
pub(crate) struct Fixture {
    pub(crate) api: ApiServer,
    pub(crate) context: KubeContext,
    pub(crate) events: Events,
    pub(crate) inputs: Inputs,
}

impl Fixture {
    pub(crate) async fn new(leads: bool) -> Self {
        let api = ApiServer::start();
        let (context, inputs) = context(&api, leads).await;
        let events = Events::start(context.client.clone(), "server-a", context.stop.clone());
        Self { api, context, events, inputs }
    }

    pub(crate) fn nodes(&self, edge: &[&str], cloud: &[&str]) {
        self.inputs.inventory.send_replace(inventory(edge, cloud));
    }

    /// Another server of the cluster, which does not lead.
    pub(crate) async fn other(&self) -> (KubeContext, Inputs) {
        let (context, inputs) = context(&self.api, false).await;
        let stop = self.context.stop.clone();
        (KubeContext { identity: "server-b".into(), stop, ..context }, inputs)
    }

    pub(crate) fn internal_service(&self, cluster_ip: &str, ports: &Value) {
        let spec = json!({"clusterIP": cluster_ip, "ports": ports});
        self.api.put(SERVICES, json!({"metadata": {"name": INTERNAL}, "spec": spec}));
    }

    /// Notes of the Events with this reason about this object.
    pub(crate) fn notes(&self, namespace: &str, reason: &str, name: &str) -> Vec<String> {
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
        self.context.stop.cancel();
    }
}

/// Edge nodes, then cloud nodes with the addresses 10.0.0.1 and on.
pub(crate) fn inventory(edge: &[&str], cloud: &[&str]) -> Arc<Inventory> {
    let node = |name: &str, edge: bool, address: String| InventoryNode {
        name: name.parse().unwrap(),
        edge,
        addresses: vec![address.parse().unwrap()],
        left_out: 0,
        kubelet_port: DEFAULT_KUBELET_PORT,
        pod_cidrs: Vec::new(),
        created: None,
        was_edge: false,
        labels: BTreeMap::new(),
    };
    let edge = edge.iter().map(|name| node(name, true, "192.168.50.2".into()));
    let cloud = (1..).zip(cloud).map(|(n, name)| node(name, false, format!("10.0.0.{n}")));
    Arc::new(edge.chain(cloud).collect::<Inventory>())
}

/// A router without nodes.
pub(crate) fn router() -> Router {
    let config = RouterConfig::new(
        "198.18.0.0/15".parse().unwrap(),
        "fd9e:706f:7374:6572::/64".parse().unwrap(),
        [10250],
    );
    Router::new(config, &mut Registry::default())
}

//! All of the Kubernetes side, as a server starts it.

use std::collections::BTreeMap;
use std::sync::Arc;

use postern_fake_kube::{ApiServer, eventually};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;
use tunnel_kube::Health;
use tunnel_routing::inventory::Selector;
use tunnel_server::inventory::NodeCount;
use tunnel_server::kube::{Kube, Parts, Writes};
use tunnel_server::pki::{Lifetimes, PkiMetrics, Revocations, ServerCertificate, ServerNames, Standing};
use tunnel_server::runtime::Runtime;
use tunnel_server::runtime::settings::Listeners;
use tunnel_server::session::Workers;

use crate::fixture::{INTERNAL, SERVICES, options, router};

const NODES: &str = "/api/v1/nodes";
const CONFIGMAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const RECORDS: &str = "tunnel-nodes";
const LISTENERS: Listeners = Listeners { https: 10263, secure: BTreeMap::new(), http: 10264, pairs: 10264 };

/// Starts the only server of a cluster. It stops when the guard is dropped.
async fn start(api: &ApiServer, dns_records: bool) -> (Health, DropGuard) {
    let mut registry = Registry::default();
    let workers = Workers::here();
    let runtime = Runtime::new(Arc::new(router()), workers, &mut registry);
    let stop = runtime.stop.clone();
    let options = options(api);
    let cluster = options.connect().await.unwrap();
    let kube = Kube::new(cluster, options.names, NodeCount::default(), &mut registry);
    let state_dir = api.dir().join("server");
    let ca = kube.authority(&state_dir, Lifetimes::default(), &stop).await.unwrap();
    let (server_names, pki_metrics) = (ServerNames::default(), PkiMetrics::default());
    let (names, metrics) = (server_names.clone(), pki_metrics.clone());
    let certificate = ServerCertificate::start(ca, names, &runtime.server_id, metrics).unwrap();
    let health = kube.health.clone();
    let (known_nodes, nodes) = watch::channel(None);
    let (_, revocations) = watch::channel(Arc::<Revocations>::default());
    kube.start(Parts {
        runtime: &runtime,
        state_dir,
        listeners: LISTENERS,
        selector: Selector::default(),
        allow_empty: false,
        peers: watch::channel(Arc::default()).0,
        settings: watch::channel(Arc::default()).0,
        known_nodes,
        nodes_known: runtime.readiness.pending("nodes"),
        ports_known: runtime.readiness.pending("ports"),
        writes: Some(Writes {
            certificate: Arc::new(certificate),
            server_names,
            node_condition: false,
            dns_records: dns_records.then(Vec::new),
            pki_metrics,
            standing: Standing::new(revocations, nodes, true),
            eligible: watch::channel(true).1,
        }),
    });
    (health, stop.drop_guard())
}

#[tokio::test(flavor = "multi_thread")]
async fn dns_records_are_written_only_where_they_are_on() {
    for on in [true, false] {
        let api = ApiServer::start();
        let labels = json!({"node-role.kubernetes.io/edge": ""});
        let addresses = json!([{"type": "InternalIP", "address": "192.168.50.2"}]);
        let node =
            json!({"metadata": {"name": "edge-1", "labels": labels}, "status": {"addresses": addresses}});
        api.put(NODES, node);
        // A port that the leader removes.
        let https = json!({"name": "https", "port": 10250, "protocol": "TCP", "targetPort": 10263});
        let stale = json!({"name": "dnat-9100", "port": 9100, "protocol": "TCP", "targetPort": 10264});
        let spec = json!({"clusterIP": "10.96.0.9", "ports": [https, stale]});
        api.put(SERVICES, json!({"metadata": {"name": INTERNAL}, "spec": spec}));
        let (health, _stop) = start(&api, on).await;
        eventually("the server writes", || (api.writes(INTERNAL) > 0).then_some(())).await;
        if on {
            eventually("the records", || {
                let configmap = api.get(CONFIGMAPS, RECORDS)?;
                (configmap["data"][RECORDS] == "10.96.0.9\tedge-1").then_some(())
            })
            .await;
        }
        // The task that writes them does not run either: without this, they might only be late.
        let runs = health.report().iter().any(|watch| watch.resource == "configmaps/dns-records");
        assert_eq!((runs, api.writes(RECORDS) > 0), (on, on), "{:?}", api.all_requests());
    }
}

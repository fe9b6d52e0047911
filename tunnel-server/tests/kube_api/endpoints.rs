//! Addresses of Services' endpoints.

use postern_fake_kube::ApiServer;
use serde_json::json;
use tunnel_server::kube::Lookups;
use tunnel_server::listener::Cluster as _;

use crate::fixture::client;

const SERVICES: &str = "/api/v1/namespaces/monitoring/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/monitoring/endpointslices";

#[tokio::test]
async fn a_services_ready_endpoints_are_found() {
    let api = ApiServer::start();
    let services = Lookups::new(client(&api).await);
    let ports = json!([
        {"name": "web", "port": 80, "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]);
    api.put(SERVICES, json!({"metadata": {"name": "grafana"}, "spec": {"ports": ports}}));
    let slice = |name: &str, service: &str, port: u16, endpoints| {
        json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [{"name": "metrics", "port": 9, "protocol": "TCP"}, {"name": "web", "port": port, "protocol": "TCP"}],
            "endpoints": endpoints,
        })
    };
    let endpoints = json!([
        {"addresses": ["10.244.7.9"], "conditions": {"ready": true}},
        {"addresses": ["10.244.7.10"], "conditions": {"ready": false}},
        {"addresses": ["10.244.7.11"]},
        {"addresses": ["10.244.7.13"], "conditions": {"ready": false, "serving": true, "terminating": true}},
    ]);
    api.put(SLICES, slice("grafana-1", "grafana", 3000, endpoints));
    api.put(SLICES, slice("other-1", "other", 3000, json!([{"addresses": ["10.244.7.12"]}])));
    let found = services.endpoints("grafana", "monitoring", 80).await.unwrap().unwrap();
    let found: Vec<_> = found.iter().map(|endpoint| endpoint.address.to_string()).collect();
    assert_eq!(found, ["10.244.7.9:3000", "10.244.7.11:3000"]);

    for (name, port, reason) in [
        ("grafana", 53, "no Service grafana.monitoring with a TCP port 53"),
        ("grafana", 443, "no Service grafana.monitoring with a TCP port 443"),
        ("nothing", 80, "no Service nothing.monitoring"),
    ] {
        let error = services.endpoints(name, "monitoring", port).await.unwrap().unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let last = json!([
        {"addresses": ["10.244.7.13"], "conditions": {"ready": false, "serving": true, "terminating": true}},
        {"addresses": ["10.244.7.14"], "conditions": {"ready": false, "serving": false, "terminating": true}},
    ]);
    api.put(SLICES, slice("grafana-1", "grafana", 3000, last));
    let found = services.endpoints("grafana", "monitoring", 80).await.unwrap().unwrap();
    let found: Vec<_> = found.iter().map(|endpoint| endpoint.address.to_string()).collect();
    assert_eq!(found, ["10.244.7.13:3000"], "the last pod serves until the next one is ready");
    api.put(SLICES, slice("grafana-1", "grafana", 3000, json!([])));
    let error = services.endpoints("grafana", "monitoring", 80).await.unwrap().unwrap_err();
    assert_eq!(error, "the Service grafana.monitoring has no ready endpoint");
}

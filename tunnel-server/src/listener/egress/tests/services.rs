//! Services of a fake API server, whose endpoints are on this host.

use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;
use tunnel_kube::Health;

use super::*;
use crate::kube::read::cluster_ips;
use crate::kube::{KubeOptions, Lookups, ObjectNames};
use crate::listener::cluster::ClusterIps;

const SERVICES: &str = "/api/v1/namespaces/shop/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices";

/// Starts the listener, which follows the Services until the guard is dropped.
async fn open(api: &ApiServer) -> (Served, DropGuard) {
    let names = ObjectNames::default();
    let options = KubeOptions { kubeconfig: Some(api.kubeconfig()), namespace: None, names };
    let (client, _) = options.connect().await.unwrap();
    let (followed, services) = tokio::sync::watch::channel(ClusterIps::default());
    let stop = CancellationToken::new();
    tokio::spawn(cluster_ips::run(client.clone(), Health::default(), followed, stop.clone()));
    let services = ClusterServices::new(services, Arc::new(Lookups::new(client)));
    (Served::open_with(Some(services), 1000).await, stop.drop_guard())
}

fn service(api: &ApiServer, address: &str) {
    let ports = json!([{"name": "https", "port": 443, "protocol": "TCP"}]);
    let spec = json!({"clusterIP": address, "clusterIPs": [address], "ports": ports});
    api.put(SERVICES, json!({"metadata": {"name": "hook", "namespace": "shop"}, "spec": spec}));
}

/// Sets the ready endpoints, with this port.
fn endpoints(api: &ApiServer, addresses: &[&str], port: u16) {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address], "conditions": {"ready": true}}))
        .collect();
    let metadata = json!({"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}});
    let ports = json!([{"name": "https", "port": port, "protocol": "TCP"}]);
    api.put(
        SLICES,
        json!({"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": endpoints}),
    );
}

#[tokio::test]
async fn a_cluster_ip_leads_to_a_ready_endpoint() {
    let api = ApiServer::start();
    let (listener, address) = target().await;
    let port = address.parse::<SocketAddr>().unwrap().port();
    service(&api, "10.96.0.9");
    // Nothing listens on the second one, so half of the first attempts fail.
    endpoints(&api, &["127.0.0.1", "127.0.0.7"], port);
    let (served, _follows) = open(&api).await;
    let mut client = Client::open(&served.path()).await;
    let mut open = Vec::new();
    for random in 1..=8 {
        client.dial("10.96.0.9:443", random).await.unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        assert_eq!(socket.local_addr().unwrap().to_string(), address);
        open.push(socket);
    }
    assert_eq!(api.requests("list", SLICES), 1, "the endpoints are remembered for a while");
    let error = client.dial("10.96.0.9:80", 20).await.unwrap_err();
    assert_eq!(error, "Service hook.shop (10.96.0.9:80): it has no such TCP port");
    assert!(client.dial("10.96.0.8:443", 21).await.unwrap_err().contains("--egress-direct"));
    drop(client);
    served.empty().await;
}

#[tokio::test]
async fn errors_name_the_service() {
    let api = ApiServer::start();
    service(&api, "10.96.0.9");
    let (served, _follows) = open(&api).await;
    let mut client = Client::open(&served.path()).await;
    let error = client.dial("10.96.0.9:443", 1).await.unwrap_err();
    assert!(error.contains("Service hook.shop (10.96.0.9:443): it has no ready endpoint"), "{error}");
    assert!(error.contains("connection refused"), "as kube-proxy answers: {error}");
    endpoints(&api, &["10.72.1.5"], 9443);
    let error = until(&mut client, "--egress-direct").await;
    assert!(
        error.contains("Service hook.shop (10.96.0.9:443): its endpoint 10.72.1.5:9443 is not"),
        "{error}"
    );
    endpoints(&api, &["127.0.0.7"], 1);
    let error = until(&mut client, "127.0.0.7").await;
    assert!(error.contains("Service hook.shop (10.96.0.9:443): endpoint 127.0.0.7:1: "), "{error}");
    assert!(error.contains("connection refused"), "{error}");
    // The Service has another address now.
    service(&api, "10.96.0.10");
    let error = until(&mut client, "10.96.0.9 is not").await;
    assert!(!error.contains("hook"), "{error}");
}

/// Dials until the error contains `part`.
async fn until(client: &mut Client, part: &str) -> String {
    let error = async {
        loop {
            let error = client.dial("10.96.0.9:443", rand::random()).await.unwrap_err();
            if error.contains(part) {
                return error;
            }
        }
    };
    timeout(PATIENCE, error).await.unwrap_or_else(|_| panic!("no error with {part:?}"))
}

#[tokio::test]
async fn a_silent_api_server_leaves_what_it_said() {
    let api = ApiServer::start();
    let (listener, address) = target().await;
    service(&api, "10.96.0.9");
    endpoints(&api, &["127.0.0.1"], address.parse::<SocketAddr>().unwrap().port());
    let (served, _follows) = open(&api).await;
    let mut client = Client::open(&served.path()).await;
    client.dial("10.96.0.9:443", 1).await.unwrap();
    let _first = listener.accept().await.unwrap();
    drop(listener);
    // Unreachable endpoints are asked for again.
    assert!(client.dial("10.96.0.9:443", 2).await.unwrap_err().contains("connection refused"));
    let listener = TcpListener::bind(&address).await.unwrap();
    api.inject("list", "endpointslices", Fault::Status(500), usize::MAX);
    let asked = api.requests("list", SLICES);
    client.dial("10.96.0.9:443", 3).await.unwrap();
    assert_eq!(api.requests("list", SLICES), asked + 1);
    listener.accept().await.unwrap();
}

#[tokio::test]
async fn a_service_that_the_watch_does_not_tell_about_is_asked_for() {
    let api = ApiServer::start();
    api.inject("watch", "services", Fault::Status(500), usize::MAX);
    let (served, _follows) = open(&api).await;
    eventually("the list, and a watch in vain", || {
        (api.requests("watch", "/api/v1/services") > 0).then_some(())
    })
    .await;
    service(&api, "10.96.0.9");
    let mut client = Client::open(&served.path()).await;
    let error = client.dial("10.96.0.9:443", 1).await.unwrap_err();
    assert!(error.contains("Service hook.shop (10.96.0.9:443): it has no ready endpoint"), "{error}");
    let error = client.dial("10.96.0.8:443", 2).await.unwrap_err();
    assert!(error.contains("--egress-direct"), "{error}");
}

#[tokio::test]
async fn without_a_list_nobody_waits_for_long() {
    let api = ApiServer::start();
    api.inject("list", "services", Fault::Status(403), usize::MAX);
    let (served, _follows) = open(&api).await;
    let (listener, address) = target().await;
    let mut client = Client::open(&served.path()).await;
    // An address that this server may dial needs no list.
    client.dial(&address, 1).await.unwrap();
    let _first = listener.accept().await.unwrap();
    let error = client.dial("10.96.0.9:443", 2).await.unwrap_err();
    assert!(error.contains("failed to look up the Service of 10.96.0.9"), "{error}");
}

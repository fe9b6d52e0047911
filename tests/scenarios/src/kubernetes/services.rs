//! kube-apiserver reaches Services with endpoints on an edge node, an admission webhook and an aggregated API server (the
//! real metrics-server): by their cluster IPs, which kube-proxy translates, and through the egress listener.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::cluster::webhook::{self, Webhook};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, metrics_server, pods, postern};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, POD_CIDR, Testbed};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::by_route;
use super::checks::Checks;
use super::egress::{Kind, admission, select, socket};
use super::top::{NODES, measured, positive};
use super::views;
use crate::egress::client::ask;
use crate::rights;

const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn egress_services(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &views::pods(EDGE_NODE)).await?;
    let _postern = postern(testbed, &cluster, &["--redirect=off"]).await?;
    let mut checks = Checks::new();
    let mut webhook = None;
    for kind in [Kind::GrpcOverUnix, Kind::ConnectOverUnix] {
        select(testbed, &mut cluster, kind, &[]).await?;
        let webhook = match &webhook {
            Some(webhook) => webhook,
            None => webhook.insert(Webhook::start(&cluster).await?),
        };
        let name = format!("{kind:?}: an admission webhook on an edge node by its Service");
        checks.run(&name, admission(&cluster, webhook)).await;
    }
    checks.run("an edge pod by its Service", edge_pod(testbed, &cluster)).await;
    checks.run("a Service without ready endpoints", without_endpoints(testbed, &cluster)).await;
    let used = rights::of_components(&cluster, "kubernetes::egress_services");
    checks.run("each right of the components is used", used).await;
    checks.finish()
}

pub(super) async fn aggregated_at_the_edge(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[views::pods(EDGE_NODE), by_route::pods()].concat()).await?;
    metrics_server::install(&cluster).await?;
    let outside = testbed.add_neighbour()?;
    let clients = format!("--redirect-clients={NEIGHBOUR}/32");
    let (server, _agent) = postern(testbed, &cluster, &["--redirect-pods=route", &clients]).await?;
    let ports =
        json!({ "data": { "https-proxy-ports": format!("{}, {}", metrics_server::PORT, webhook::PORT) } });
    cluster.api.patch("/api/v1/namespaces/kube-system/configmaps/tunnel-server-cfg", &ports).await?;
    let _metrics_server = metrics_server::start(&cluster, EDGE_NODE).await?;
    let webhook = Webhook::start(&cluster).await?;
    let mut checks = Checks::new();
    checks.run("top asks metrics-server on an edge node by its Service", top(&cluster)).await;
    by_route::run(&mut checks, &mut cluster, &server, &webhook, &outside).await?;
    select(testbed, &mut cluster, Kind::GrpcOverUnix, &[]).await?;
    checks.run("top asks metrics-server on an edge node through the egress listener", top(&cluster)).await;
    checks.finish()
}

/// Starts Postern with an egress listener that may dial the cloud's node and pods, but no Service.
async fn postern<'a>(
    testbed: &Testbed,
    cluster: &Cluster<'a>,
    flags: &[&str],
) -> Result<(Server<'a>, Agent<'a>)> {
    let manifests = postern::install_with(cluster, "base", &["egress-services"]).await?;
    let builder = postern::server(cluster, &manifests).await?;
    let server = flags
        .iter()
        .fold(builder, |builder, flag| builder.flag(*flag))
        .flag("--edge-pod-routes=10.72.0.0/16")
        .flag(format!("--egress-socket={}", socket(testbed).display()))
        .flag(format!("--egress-direct={CLOUD}/32,{POD_CIDR}"))
        .start()
        .await?;
    let agent = postern::agent(cluster, &server, &manifests, 1).await?;
    Ok((server, agent))
}

async fn edge_pod(testbed: &Testbed, cluster: &Cluster<'_>) -> Result<()> {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "pages" },
        "spec": { "selector": { "app": "web" }, "ports": [{ "port": 8080, "targetPort": 80 }] },
    });
    cluster.api.create("/api/v1/namespaces/default/services", &service).await?;
    let slices = format!("{SLICES}?labelSelector=kubernetes.io/service-name%3Dpages");
    let ready = |list: &Value| list["items"][0]["endpoints"][0]["conditions"]["ready"] == true;
    cluster.api.wait("the Service's endpoint", &slices, PATIENCE, ready).await?;
    let target = format!("{}:8080", cluster_ip(cluster, "pages").await?);
    let (mut stream, answer) = connect(testbed, &target).await?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "CONNECT {target} was answered {answer:?}");
    stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").await?;
    let mut page = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut page)).await.context("no page")??;
    ensure!(page.ends_with("hello from an edge pod\n"), "the page is {page:?}");
    Ok(())
}

async fn without_endpoints(testbed: &Testbed, cluster: &Cluster<'_>) -> Result<()> {
    let address = cluster_ip(cluster, "webhook").await?;
    let target = format!("{address}:443");
    let answers = async || Ok(connect(testbed, &target).await?.1);
    let ready = async |ready: bool| {
        let slice = format!("{SLICES}/webhook");
        let object = cluster.api.get(&slice).await?;
        let mut endpoints = object["endpoints"].clone();
        endpoints[0]["conditions"]["ready"] = json!(ready);
        cluster.api.patch(&slice, &json!({ "endpoints": endpoints })).await.map(drop)
    };
    let works = |answer: &String| answer.starts_with("HTTP/1.1 200 ");
    wait_until("the webhook's Service", PATIENCE, answers, works).await?;
    ready(false).await?;
    let said = format!("Service webhook.default ({target}): it has no ready endpoint");
    let refused = |answer: &String| answer.starts_with("HTTP/1.1 502 ") && answer.contains(&said);
    wait_until("an answer without an endpoint", PATIENCE, answers, refused).await?;
    ready(true).await?;
    wait_until("the webhook's Service again", PATIENCE, answers, works).await?;
    let answer = connect(testbed, &format!("{address}:80")).await?.1;
    ensure!(
        answer.starts_with("HTTP/1.1 403 ") && answer.contains("no such TCP port"),
        "port 80: {answer:?}"
    );
    Ok(())
}

/// Makes a CONNECT through the listener; returns the stream and the answer.
async fn connect(testbed: &Testbed, target: &str) -> Result<(UnixStream, String)> {
    let stream = UnixStream::connect(socket(testbed)).await.context("connecting to the socket")?;
    ask(stream, target).await
}

async fn cluster_ip(cluster: &Cluster<'_>, service: &str) -> Result<String> {
    let service = cluster.api.get(&format!("/api/v1/namespaces/default/services/{service}")).await?;
    Ok(service["spec"]["clusterIP"].as_str().context("a Service without an address")?.to_owned())
}

/// Checks `kubectl top`: metrics-server asks the kubelets of both nodes, and kube-apiserver asks it.
async fn top(cluster: &Cluster<'_>) -> Result<()> {
    measured(cluster, NODES, &[CLOUD_NODE, EDGE_NODE], &[]).await?;
    let printed = cluster.kubectl.run(&["top", "nodes", "--no-headers"]).await?;
    positive(&printed, CLOUD_NODE, 1)?;
    positive(&printed, EDGE_NODE, 1)?;
    Ok(())
}

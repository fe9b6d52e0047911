//! Outages: the API server is down, or another holder has the Lease. Tunnels and routes stay, and nothing has to be
//! restarted.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::client::{connect, visit};
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{Cluster, EDGE_NODE, postern, tls};
use postern_testbed::report::figure;
use postern_testbed::server::{self, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::checks::Checks;
use crate::common::never;

const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit until the API server is in use again: watches back off for up to 10 s.
const BACK: Duration = Duration::from_secs(60);

pub(super) async fn outages(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    let manifests = postern::install(&cluster, "base").await?;
    let mut server = postern::server(&cluster, &manifests).await?.start().await?;
    let mut agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    let mut checks = Checks::new();
    checks.run("port lists are followed", ports_are_followed(&cluster, "9101")).await;
    checks.run("a node's label decides whether it is an edge node", label_flips(&cluster)).await;
    let down = api_down(&mut cluster, &mut server, &mut agent);
    checks.run_within(Duration::from_secs(180), "the API server is down for a while", down).await;
    let lost = lease_lost(&cluster, &server);
    checks.run_within(Duration::from_secs(120), "the Lease is lost and taken again", lost).await;
    checks.finish()
}

/// A port of the node works as soon as the ConfigMap has it.
pub(super) async fn ports_are_followed(cluster: &Cluster<'_>, port: &str) -> Result<()> {
    let edge = cluster.testbed.edge(1);
    let target = Target::start(&edge.ns, edge.address, port.parse()?, Behaviour::Echo)?;
    let change = json!({ "data": { "http-proxy-ports": port } }).to_string();
    let args = ["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &change];
    cluster.kubectl.run(&args).await?;
    wait_for("the port to be tunnelled", BACK, async || {
        let attempt = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(target.address));
        Ok(attempt.await.is_ok_and(|connected| connected.is_ok()).then_some(()))
    })
    .await?;
    visit(target.address).await?;
    Ok(())
}

/// Without its label the node is a cloud node, whose addresses are never redirected; with the label it is an edge node
/// again.
async fn label_flips(cluster: &Cluster<'_>) -> Result<()> {
    let address = (cluster.testbed.edge(1).address, 10250);
    let label = async |change: &str| cluster.kubectl.run(&["label", "node", EDGE_NODE, change]).await;
    let reached = async || {
        let attempt = tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(address));
        Ok(matches!(attempt.await, Ok(Ok(_))))
    };
    label("node-role.kubernetes.io/edge-").await?;
    let start = Instant::now();
    wait_until("the node to be direct", PATIENCE, reached, |reached| !reached).await?;
    let direct = start.elapsed();
    label("node-role.kubernetes.io/edge=").await?;
    let start = Instant::now();
    wait_until("the node to be redirected again", PATIENCE, reached, |reached| *reached).await?;
    figure(&format!("a label's change is in effect after {direct:.1?} and {:.1?}", start.elapsed()));
    Ok(())
}

async fn api_down(cluster: &mut Cluster<'_>, server: &mut Server<'_>, agent: &mut Agent<'_>) -> Result<()> {
    let address = cluster.testbed.edge(1).address;
    let kubelet = async |cluster: &Cluster<'_>| {
        let stream = connect((address, 10250)).await?;
        tls::handshake(stream, &address.to_string(), &cluster.pki, None).await
    };
    cluster.control_plane.kill_apiserver().await?;
    // Long enough for watches to end, and for the Lease to be lost.
    never("a loss of the tunnel", Duration::from_secs(20), async || {
        kubelet(cluster).await.context("through the tunnel while the API server is down")?;
        Ok(!server.is_connected(EDGE_NODE).await?)
    })
    .await?;
    let status = server.get("/readyz").await?;
    ensure!(status.0 == 200, "/readyz while the API server is down: {status:?}");
    // An agent that restarts attaches without the API server too.
    agent.process.crash().await?;
    server.wait_connected(EDGE_NODE, false, PATIENCE).await?;
    agent.start_again()?;
    server.wait_connected(EDGE_NODE, true, PATIENCE).await?;
    kubelet(cluster).await.context("through the new agent's tunnel")?;
    // So does a server that restarts, with the nodes and ports that it knew.
    for what in ["the CA Secret, using the CA", "the revocations, using those"] {
        cluster.testbed.allow_error(&format!("failed to read {what} of the state directory"));
    }
    server.process.stop().await?;
    server.start_again().await?;
    server.wait_connected(EDGE_NODE, true, PATIENCE).await?;
    let output = cluster.kubectl.output(&["logs", "talker", "--tail=1"]).await?;
    ensure!(!output.status.success(), "the API server is there: {output:?}");
    kubelet(cluster).await.context("through the restarted server")?;
    let exporter = Target::start(&cluster.testbed.edge(1).ns, address, 9101, Behaviour::Echo)?;
    visit(exporter.address).await.context("a port of the ConfigMap, through the restarted server")?;
    let tunnelled = server.status().await?["redirect"]["ports"].clone();
    ensure!(tunnelled == json!([9101, 10250, 10255]), "the tunnelled ports are {tunnelled}");
    let old = async || Ok(server.status().await?["inventory"]["old_s"].as_u64());
    let old_s = old().await?.context("status does not say how old the nodes are")?;
    figure(&format!("the restarted server has nodes that were current {old_s} s ago"));
    server.wait_metric("postern_inventory_saved_timestamp_seconds", &[], |saved| saved > 0.0).await?;
    let text = server::run(cluster.testbed, &["status"])?.stdout;
    let text = String::from_utf8_lossy(&text);
    ensure!(text.contains("OLD, as of "), "the table does not say how old the nodes are: {text}");

    cluster.restart_apiserver().await?;
    wait_for("kubectl logs to work again", BACK, async || {
        let output = cluster.kubectl.output(&["logs", "talker", "--tail=1"]).await?;
        Ok(output.status.success().then_some(()))
    })
    .await?;
    let (name, nodes) = ("postern_kube_watch_synced", [("resource", "nodes")]);
    server.wait_metric_for(BACK, name, &nodes, |synced| synced == 1.0).await?;
    wait_until("the nodes to be current", BACK, old, Option::is_none).await?;
    ports_are_followed(cluster, "9102").await.context("after the API server came back")
}

async fn lease_lost(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/tunnel-server");
    let records = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-nodes");
    // The record of an edge node: an earlier check made it a cloud node for a while, and the record may not have been
    // rewritten yet.
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-internal-svc");
    let service = cluster.api.get(&service).await?;
    let record = format!("{}\t{EDGE_NODE}", service["spec"]["clusterIP"].as_str().context("clusterIP")?);
    let is_written = |records: &Value| {
        records["data"]["tunnel-nodes"].as_str().is_some_and(|text| text.lines().any(|line| line == record))
    };
    let before = cluster.api.wait("the DNS records", &records, PATIENCE, is_written).await?;
    // An earlier check restarted the server during an outage of the API server, so its predecessor may still hold the
    // Lease.
    let holder = server.status().await?["server_id"].clone();
    ensure!(holder.is_string(), "status does not name the server: {holder}");
    let holds = |lease: &Value| lease["spec"]["holderIdentity"] == holder;
    cluster.api.wait("the server to hold the Lease", &path, BACK, holds).await?;

    let taken = json!({ "spec": {
        "holderIdentity": "another-server",
        "leaseDurationSeconds": 20,
        "renewTime": rfc3339_now()?,
    }});
    cluster.api.patch(&path, &taken).await?;
    let change = json!({ "data": { "tunnel-nodes": "changed by hand" } });
    // The server notices at its next renewal, and may still write until then.
    wait_for("the server to stop writing", PATIENCE, async || {
        cluster.api.patch(&records, &change).await?;
        let repaired = never("a repair", Duration::from_secs(4), async || {
            Ok(is_written(&cluster.api.get(&records).await?))
        })
        .await;
        Ok(repaired.is_ok().then_some(()))
    })
    .await?;
    let held = cluster.api.get(&path).await?;
    ensure!(held["spec"]["holderIdentity"] == "another-server", "the Lease was taken too early: {held}");
    ensure!(server.is_connected(EDGE_NODE).await?, "the tunnel was lost with the Lease");
    cluster.kubectl.run(&["logs", "talker", "--tail=1"]).await?;

    cluster.api.wait("the server to take the Lease again", &path, BACK, holds).await?;
    let after = cluster.api.wait("the DNS records to be repaired", &records, PATIENCE, is_written).await?;
    ensure!(after["data"] == before["data"], "the records are {} and were {}", after["data"], before["data"]);
    Ok(())
}

/// Returns the current time in the API's format (microseconds).
fn rfc3339_now() -> Result<String> {
    let output = std::process::Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%6NZ"]).output();
    Ok(String::from_utf8(output.context("running date")?.stdout)?.trim().to_owned())
}

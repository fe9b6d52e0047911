//! Two nodes in two sites with the same address, as factory-made edge boxes have: each is reached by name, and the
//! address leads to the older node, or is refused if both were created in the same second.
use std::cmp::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::{connect, expect_unreachable};
use postern_testbed::cluster::{Cluster, EDGE_NODE, postern, tls};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use serde_json::Value;
use tokio::net::TcpStream;

use super::checks::Checks;

/// Node of the second site, with the same address as [`EDGE_NODE`].
const TWIN: &str = "edge-2";
const HTTPS_LISTENER: ([u8; 4], u16) = ([127, 0, 0, 1], 10263);

pub(super) async fn two_sites_with_one_address(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    let (first, second) = (testbed.edge(1), testbed.edge(2));
    ensure!(first.address == second.address, "the twin has {}", second.address);
    let manifests = postern::install(&cluster, "base").await?;
    let server = postern::server(&cluster, &manifests).await?.start().await?;
    let _first = postern::agent(&cluster, &server, &manifests, 1).await?;
    let _second = postern::agent(&cluster, &server, &manifests, 2).await?;
    let mut checks = Checks::new();
    checks.run("each kubelet is reached by name", by_name(&cluster)).await;
    let older = older(&cluster).await?;
    match older {
        Some(node) => {
            let leads_there = async { presented(&cluster, node).await.map(drop) };
            checks.run("connect() by address leads to the older node", leads_there).await;
        }
        None => {
            checks
                .run("connect() by address fails immediately", expect_unreachable((first.address, 10250)))
                .await;
        }
    }
    let kind = if older.is_some() { "taken" } else { "ambiguous" };
    checks.run("status, metrics and log report the address", reported(&cluster, &server, kind)).await;
    checks.run("with one of them gone the address leads to the other", one_left(&mut cluster)).await;
    checks.finish()
}

async fn by_name(cluster: &Cluster<'_>) -> Result<()> {
    let user = cluster.pki.client("asker", "asker", &["system:masters"])?;
    for node in [EDGE_NODE, TWIN] {
        // The server name selects the node; the certificate is that kubelet's, end to end.
        let stream = connect(HTTPS_LISTENER).await?;
        let stream = tls::handshake(stream, node, &cluster.pki, Some(&user)).await.context(node)?;
        let page = tls::get(stream, "/pods").await.with_context(|| format!("the kubelet of {node}"))?;
        let pods: Value = serde_json::from_str(&page).context("the kubelet's pods")?;
        ensure!(pods["kind"] == "PodList", "{node} answered {pods}");
        let stream = connect(HTTPS_LISTENER).await?;
        let stream = tls::handshake(stream, node, &cluster.pki, Some(&user)).await.context(node)?;
        let metrics = tls::get(stream, "/metrics").await?;
        let name = format!("kubelet_node_name{{node=\"{node}\"}}");
        ensure!(metrics.contains(&name), "the kubelet that answers as {node} has another name");
    }
    Ok(())
}

/// Returns the older node; None if both were created in the same second.
async fn older(cluster: &Cluster<'_>) -> Result<Option<&'static str>> {
    // Times in one format sort as text.
    let created = async |node: &str| -> Result<String> {
        let node = cluster.api.get(&format!("/api/v1/nodes/{node}")).await?;
        Ok(node["metadata"]["creationTimestamp"].as_str().context("the Node's creationTimestamp")?.to_owned())
    };
    let (first, second) = (created(EDGE_NODE).await?, created(TWIN).await?);
    Ok(match first.cmp(&second) {
        Ordering::Less => Some(EDGE_NODE),
        Ordering::Equal => None,
        Ordering::Greater => Some(TWIN),
    })
}

async fn reported(cluster: &Cluster<'_>, server: &Server<'_>, kind: &str) -> Result<()> {
    let address = cluster.testbed.edge(1).address.to_string();
    server.expect_metric("postern_inventory_conflicts", &[("kind", kind)], 1.0).await?;
    let status = server.status().await?;
    let conflicts = status["inventory"]["conflicts"].as_array().cloned().unwrap_or_default();
    let message = conflicts.iter().find_map(|conflict| conflict["message"].as_str()).unwrap_or_default();
    let names_all = |text: &str| [address.as_str(), EDGE_NODE, TWIN].iter().all(|part| text.contains(part));
    ensure!(names_all(message), "the status says {conflicts:?}");
    let log = server.settled_log().await?;
    ensure!(log.lines().any(|line| line.contains(kind) && names_all(line)), "the log does not say so");
    Ok(())
}

async fn one_left(cluster: &mut Cluster<'_>) -> Result<()> {
    cluster.host_mut(TWIN)?.kill_kubelet()?;
    cluster.api.delete(&format!("/api/v1/nodes/{TWIN}")).await?;
    let cluster = &*cluster;
    let presented = async || presented(cluster, EDGE_NODE).await;
    wait_until("the address to lead to the remaining node", Duration::from_secs(20), presented, |_| true)
        .await?;
    Ok(())
}

/// Returns the certificate presented at the address, verified as the node's.
async fn presented(cluster: &Cluster<'_>, node: &str) -> Result<Vec<u8>> {
    let address = (cluster.testbed.edge(1).address, 10250);
    let stream = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address)).await??;
    tls::certificate(&tls::handshake(stream, node, &cluster.pki, None).await?)
}

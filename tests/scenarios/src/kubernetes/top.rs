//! kubectl top, with the real metrics-server on a master, and on a cloud host with a redirector.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, metrics_server, postern};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use postern_testbed::{NEIGHBOUR, Testbed};
use serde_json::Value;

use super::checks::Checks;
use super::redirector::{self, WORKER};

/// Time limit for a node's figures: they need two rounds of metrics-server and two of the kubelet, of ten seconds each.
const MEASURED: Duration = Duration::from_secs(60);
pub(super) const NODES: &str = "/apis/metrics.k8s.io/v1beta1/nodes";
const PODS: &str = "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods";

pub(super) async fn top(testbed: &Testbed) -> Result<()> {
    let worker = testbed.add_cloud_host("worker", NEIGHBOUR)?;
    let mut cluster = Cluster::start(testbed).await?;
    cluster.join(WORKER, "worker", &worker, "10.71.1.0/24").await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK), shell("worker-talker", WORKER, TALK)])
        .await?;
    metrics_server::install(&cluster).await?;
    let on_master = metrics_server::start(&cluster, CLOUD_NODE).await?;

    let mut checks = Checks::new();
    checks.run("without Postern the edge's figures are unknown", unknown(&cluster)).await;
    let manifests = postern::install(&cluster, "overlays/everywhere").await?;
    let server = postern::server(&cluster, &manifests).await?.start().await?;
    let mut agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    checks.run("top shows the edge, with metrics-server on the master", shown(&cluster)).await;
    agent.process.crash().await?;
    checks.run("the edge's figures are unknown after the agent is killed", gone(&cluster, &server)).await;
    agent.start_again()?;
    server.wait_connected(EDGE_NODE, true, MEASURED).await?;

    drop(on_master);
    let _on_worker = metrics_server::start(&cluster, WORKER).await?;
    checks
        .run("metrics-server on a host without a redirector does not reach the edge", unknown(&cluster))
        .await;
    let _redirector = redirector::start(&cluster, &manifests, &worker).await?;
    checks.run("top shows the edge, with metrics-server on a host with a redirector", shown(&cluster)).await;
    checks.finish()
}

/// The cloud's nodes and pods have figures, the edge's have none.
async fn unknown(cluster: &Cluster<'_>) -> Result<()> {
    measured(cluster, NODES, &[CLOUD_NODE, WORKER], &[EDGE_NODE]).await?;
    measured(cluster, PODS, &["worker-talker"], &["talker"]).await?;
    let nodes = cluster.kubectl.run(&["top", "nodes", "--no-headers"]).await?;
    let edge = line(&nodes, EDGE_NODE)?;
    ensure!(edge[1..] == ["<unknown>"; 4], "kubectl top nodes says {edge:?}");
    positive(&nodes, CLOUD_NODE, 1)?;
    positive(&nodes, WORKER, 1)?;
    let error = cluster.kubectl.fails(&["top", "pod", "talker"]).await?;
    ensure!(error.contains("NotFound"), "kubectl top pod talker says {error:?}");
    Ok(())
}

async fn gone(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    server.wait_connected(EDGE_NODE, false, MEASURED).await?;
    unknown(cluster).await
}

/// Every node and pod has figures.
async fn shown(cluster: &Cluster<'_>) -> Result<()> {
    let nodes = [CLOUD_NODE, EDGE_NODE, WORKER];
    measured(cluster, NODES, &nodes, &[]).await?;
    measured(cluster, PODS, &["worker-talker", "talker"], &[]).await?;
    let printed = cluster.kubectl.run(&["top", "nodes", "--no-headers"]).await?;
    for node in nodes {
        positive(&printed, node, 1)?;
        positive(&printed, node, 3)?;
    }
    let printed = cluster.kubectl.run(&["top", "pods", "--no-headers"]).await?;
    for pod in ["talker", "worker-talker"] {
        positive(&printed, pod, 1)?;
    }
    let containers = cluster.kubectl.run(&["top", "pod", "talker", "--containers", "--no-headers"]).await?;
    ensure!(line(&containers, "talker")?.get(1) == Some(&"main"), "its containers are {containers:?}");
    Ok(())
}

/// Waits until metrics-server's list has the names `with` and none of `without`. The list is cheap, and kubectl shows
/// the same.
pub(super) async fn measured(
    cluster: &Cluster<'_>,
    list: &str,
    with: &[&str],
    without: &[&str],
) -> Result<()> {
    let names = async || {
        let answer = cluster.api.get(list).await?;
        let items = answer["items"].as_array().context("no list")?;
        let name = |item: &Value| item["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        Ok(items.iter().map(name).collect::<Vec<_>>())
    };
    let what = format!("{list} to have {with:?} and not {without:?}");
    let fits = |names: &Vec<String>| {
        let has = |name: &&str| names.iter().any(|listed| listed == name);
        with.iter().all(has) && !without.iter().any(has)
    };
    wait_until(&what, MEASURED, names, fits).await.map(drop)
}

/// Returns the words of the line of `kubectl top` about `name`.
fn line<'a>(printed: &'a str, name: &str) -> Result<Vec<&'a str>> {
    let mut lines = printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.find(|words| words.first() == Some(&name)).with_context(|| format!("no {name} in {printed:?}"))
}

/// Fails unless the word at this place is a quantity above zero, such as 12m or 345Mi.
pub(super) fn positive(printed: &str, name: &str, place: usize) -> Result<()> {
    let words = line(printed, name)?;
    let quantity = words.get(place).copied().unwrap_or_default();
    let number = quantity.trim_end_matches(char::is_alphabetic);
    ensure!(number.parse::<u64>().is_ok_and(|number| number > 0), "{name}: {quantity:?} in {printed:?}");
    Ok(())
}

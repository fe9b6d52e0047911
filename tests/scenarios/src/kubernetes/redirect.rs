//! Checks which connections are redirected and which are not.
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::cluster::pods::{self, IDLE, TALK, shell};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use serde_json::Value;

use super::checks::Checks;

/// Returns pods on the cloud's node.
pub(super) fn pods() -> Vec<Value> {
    vec![shell("cloud-talker", CLOUD_NODE, TALK), shell("cloud-idle", CLOUD_NODE, IDLE)]
}

/// Checks failures before Postern runs. `--request-timeout` shortens the API server's own timeout.
pub(super) async fn nothing_works_yet(cluster: &Cluster<'_>) -> Result<()> {
    let error = cluster.kubectl.fails(&["logs", "talker", "--request-timeout=3s"]).await?;
    ensure!(
        error.to_lowercase().contains("timeout") || error.contains("deadline"),
        "it failed with: {error}"
    );
    cluster.kubectl.run(&["logs", "cloud-talker", "--tail=1"]).await?;
    Ok(())
}

pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>, server: &Server<'_>) {
    checks.run("the cloud's node stays direct", cloud_is_direct(cluster, server)).await;
    checks.run("a pod on the cloud host reaches the edge's kubelet", pod_on_cloud(cluster, server)).await;
    checks.run("the Node shows the tunnel", node_condition(cluster)).await;
}

async fn cloud_is_direct(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let verdicts = async |outcome: &str| {
        let verdict = [("hook", "connect4"), ("outcome", outcome)];
        server.metric_or_zero("postern_redirect_verdicts_total", &verdict).await
    };
    let relayed = async || {
        let lines = server.settled_access_log().await?;
        anyhow::Ok(lines.iter().filter(|line| line.text("node") == CLOUD_NODE).count())
    };
    let (redirected, excluded) = (verdicts("redirected").await?, verdicts("excluded").await?);
    // The API server reuses connections to kubelets; an exec always opens a new one.
    for _ in 0..5 {
        let printed = cluster.kubectl.run(&["exec", "cloud-idle", "--", "hostname"]).await?;
        ensure!(printed == "cloud-idle\n", "hostname printed {printed:?}");
    }
    let (redirected_then, excluded_then) = (verdicts("redirected").await?, verdicts("excluded").await?);
    ensure!(
        excluded_then >= excluded + 5.0,
        "5 connects to the cloud's node, excluded {excluded} -> {excluded_then}"
    );
    // The API server also connects to the edge's kubelet by itself now and then.
    ensure!(
        redirected_then < redirected + 5.0,
        "redirected {redirected} -> {redirected_then} by 5 connects to the cloud"
    );
    ensure!(relayed().await? == 0, "a connection to {CLOUD_NODE} went through a tunnel");
    let printed = cluster.kubectl.run(&["exec", "idle", "--", "hostname"]).await?;
    ensure!(printed == "idle\n", "hostname printed {printed:?}");
    ensure!(verdicts("redirected").await? > redirected, "an exec on the edge was not counted as redirected");
    Ok(())
}

async fn pod_on_cloud(cluster: &Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let address = cluster.testbed.edge(1).address;
    let url = format!("http://{address}:10255/healthz");
    let printed = cluster.kubectl.run(&["exec", "cloud-idle", "--", "wget", "-q", "-O-", &url]).await?;
    ensure!(printed == "ok", "the kubelet answered {printed:?}");
    let pod = pods::address(&cluster.api, "cloud-idle").await?;
    let fits = |line: &postern_testbed::access_log::AccessLine| {
        line.text("listener") == "redirect"
            && line.text("client").starts_with(&pod)
            && line.text("destination") == format!("{address}:10255")
            && line.text("node") == EDGE_NODE
    };
    server.wait_access(&format!("the pod {pod} to {address}:10255"), fits).await?;
    Ok(())
}

async fn node_condition(cluster: &Cluster<'_>) -> Result<()> {
    let path = format!("/api/v1/nodes/{EDGE_NODE}");
    let limit = Duration::from_secs(60);
    let up = |node: &Value| {
        let condition = postern_testbed::cluster::api::condition(node, "PosternTunnel");
        condition.is_some_and(|found| found["status"] == "True" && found["reason"] == "TunnelUp")
    };
    cluster.api.wait("the condition PosternTunnel", &path, limit, up).await?;
    let describe = async || cluster.kubectl.run(&["describe", "node", EDGE_NODE]).await;
    let has_event = |described: &String| {
        described.split("Events:").nth(1).is_some_and(|events| events.contains("TunnelUp"))
    };
    let described = wait_until("kubectl describe node to show the Event", limit, describe, has_event).await?;
    ensure!(
        described.contains("PosternTunnel"),
        "kubectl describe node does not show the condition:\n{described}"
    );
    Ok(())
}

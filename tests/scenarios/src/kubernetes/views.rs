//! Views of kubelets and pods through the API server: statistics, metrics, node logs, proxies.
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::cluster::{Cluster, EDGE_NODE, pods};
use postern_testbed::wait::{wait_for, wait_until};
use serde_json::{Value, json};

use super::checks::Checks;

pub(super) fn pods(node: &str) -> Vec<Value> {
    vec![pods::shell("web", node, "exec httpd -f -p 80 -h /www")]
}

pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>) {
    checks.run("stats/summary of the edge node", summary(cluster)).await;
    checks.run("cadvisor's metrics of the edge node", cadvisor(cluster)).await;
    checks.run("/logs/ of the edge node", node_logs(cluster)).await;
    checks.run("proxy to an edge pod", pod_proxy(cluster)).await;
    checks.run("proxy to a Service with an edge pod", service_proxy(cluster)).await;
}

fn of_node(path: &str) -> String {
    format!("/api/v1/nodes/{EDGE_NODE}/proxy/{path}")
}

pub(super) async fn summary(cluster: &Cluster<'_>) -> Result<()> {
    // The kubelet collects statistics every ten seconds.
    wait_for("the talker's statistics", Duration::from_secs(40), async || {
        let text = cluster.kubectl.run(&["get", "--raw", &of_node("stats/summary")]).await?;
        let summary: Value = serde_json::from_str(&text)?;
        ensure!(summary["node"]["nodeName"] == EDGE_NODE, "statistics of {}", summary["node"]["nodeName"]);
        let pods = summary["pods"].as_array().map_or(&[][..], Vec::as_slice);
        let talker = pods.iter().find(|pod| pod["podRef"]["name"] == "talker");
        Ok(talker.filter(|pod| pod["memory"]["workingSetBytes"].as_u64() > Some(0)).map(|_| ()))
    })
    .await
}

async fn cadvisor(cluster: &Cluster<'_>) -> Result<()> {
    wait_for("the talker's metrics", Duration::from_secs(40), async || {
        let page = cluster.kubectl.run(&["get", "--raw", &of_node("metrics/cadvisor")]).await?;
        let talker = page
            .lines()
            .any(|line| line.starts_with("container_memory_usage_bytes{") && line.contains("pod=\"talker\""));
        Ok(talker.then_some(()))
    })
    .await
}

async fn node_logs(cluster: &Cluster<'_>) -> Result<()> {
    let page = cluster.kubectl.run(&["get", "--raw", &of_node("logs/")]).await?;
    ensure!(page.contains("href=\"pods/\""), "/logs/ is {page:?}");
    Ok(())
}

/// The API server dials the pod itself; `--edge-pod-routes` redirects that connection.
async fn pod_proxy(cluster: &Cluster<'_>) -> Result<()> {
    expect_page(cluster, "/api/v1/namespaces/default/pods/web:80/proxy/index.html").await
}

async fn service_proxy(cluster: &Cluster<'_>) -> Result<()> {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "web" },
        "spec": { "selector": { "app": "web" }, "ports": [{ "port": 8080, "targetPort": 80 }] },
    });
    let services = "/api/v1/namespaces/default/services";
    // An earlier connection type may have created it.
    if cluster.api.find(&format!("{services}/web")).await?.is_none() {
        cluster.api.create(services, &service).await?;
    }
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dweb";
    let ready = |list: &Value| list["items"][0]["endpoints"][0]["conditions"]["ready"] == true;
    cluster.api.wait("the Service's endpoint", slices, Duration::from_secs(20), ready).await?;
    // The API server's proxy uses the Service's Endpoints, which another controller writes.
    let path = "/api/v1/namespaces/default/services/web:8080/proxy/index.html";
    let page = async || expect_page(cluster, path).await;
    wait_until("the page by the Service", Duration::from_secs(20), page, |()| true).await
}

async fn expect_page(cluster: &Cluster<'_>, path: &str) -> Result<()> {
    let page = cluster.kubectl.run(&["get", "--raw", path]).await?;
    ensure!(page == "hello from an edge pod\n", "{path} is {page:?}");
    Ok(())
}

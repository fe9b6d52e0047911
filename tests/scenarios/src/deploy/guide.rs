//! docs/kubernetes.md, followed from labelling a node to `kubectl logs`, and back to nothing.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::{Cluster, EDGE_NODE};

use super::chart::nothing_is_left;
use super::{DOCUMENT, NAMESPACE, follow, logs, on_cluster, overlay, text};

pub(super) async fn the_guide_is_followed(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, followed).await
}

async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    // The testbed's nodes are labelled from the start.
    cluster.kubectl.run(&["label", "node", EDGE_NODE, "node-role.kubernetes.io/edge-"]).await?;
    let refused = cluster.kubectl.fails(&["logs", "talker", "--tail=1"]).await?;
    ensure!(!refused.contains("line "), "kubectl logs works without Postern: {refused}");
    let overlay = overlay(cluster.testbed, "base")?;
    let mine = [("my-postern", text(&overlay)?)];
    let follow = async |title: &str, replaced: &[(&str, &str)]| {
        follow::section(cluster, DOCUMENT, title, replaced).await
    };
    follow("1. Label the edge nodes", &[]).await?;
    follow("3. Apply", &mine).await?;
    let shown = follow("4. Check", &[]).await?;
    for expected in ["nodes: 1 of 1 connected", "talker"] {
        ensure!(shown.contains(expected), "{expected:?} is not shown:\n{shown}");
    }
    logs(&cluster.kubectl).await?;
    follow("Removing", &mine).await?;

    nothing_is_left(cluster).await?;
    let objects =
        "secret/tunnel-server-ca configmap/tunnel-nodes configmap/tunnel-revoked-agents lease/tunnel-server";
    for object in objects.split(' ') {
        let found = cluster.kubectl.fails(&["get", object, "--namespace", NAMESPACE]).await;
        found.with_context(|| format!("{object} is left"))?;
    }
    let node = cluster.api.get(&format!("/api/v1/nodes/{EDGE_NODE}")).await?;
    ensure!(node["metadata"]["labels"]["node-role.kubernetes.io/edge"].is_null(), "the label is left");
    Ok(())
}

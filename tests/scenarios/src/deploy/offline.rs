//! Agents on online nodes are updated, even if other nodes are offline.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::report::progress;
use postern_testbed::wait::{wait_for, wait_until};
use serde_json::{Value, json};

use super::{DOCUMENT, NAMESPACE, PATIENCE, follow, logs, running};

/// An edge node for which no kubelet has ever reported.
const OFFLINE: &str = "edge-offline";
/// Time limit of one rolling update.
const UPDATED: Duration = Duration::from_secs(90);

/// Checks the update, with the overlay for SuperEdge's labels.
pub(super) async fn agents_are_updated(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    // With room for pods, so that the scheduler assigns its agent, which stays pending.
    let room = json!({ "cpu": "1", "memory": "1Gi", "pods": "10" });
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": OFFLINE,
            "labels": { "kubernetes.io/os": "linux", "superedge.io/edge-node": "enable" },
        },
        "status": {
            "capacity": room,
            "allocatable": room,
            "addresses": [{ "type": "InternalIP", "address": "192.168.99.2" }],
        },
    });
    cluster.api.create("/api/v1/nodes", &node).await.context("the node that is offline")?;
    let daemon_set = format!("/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/tunnel-agent");
    let has_agent = |set: &Value| set["status"]["currentNumberScheduled"] == 2;
    cluster.api.wait("an agent for the node that is offline", &daemon_set, PATIENCE, has_agent).await?;

    let before = running(kubectl, "tunnel-agent").await?;
    kubectl.run(&["rollout", "restart", "daemonset/tunnel-agent", "--namespace", NAMESPACE]).await?;
    // The old pod is removed once the new one is available.
    let now = async || running(kubectl, "tunnel-agent").await;
    let updated = |now: &Vec<String>| now.len() == 1 && !before.contains(&now[0]);
    wait_until("the agent of the node that is online to be a new one", UPDATED, now, updated).await?;
    logs(kubectl).await.context("after an update beside a node that is offline")?;

    // As docs/install/kubernetes.md says: the command ends with an error, and the numbers show the reason.
    let said = kubectl.fails(&rollout_status()?.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    ensure!(said.contains("rollout to finish: 1 ") && said.contains("timed out"), "rollout status: {said}");
    let counted = |set: &Value| {
        let status = &set["status"];
        status["desiredNumberScheduled"] == 2 && status["numberAvailable"] == 1
    };
    cluster.api.wait("the numbers of nodes and agents", &daemon_set, PATIENCE, counted).await?;
    progress("an update of the agents does not wait for a node that is offline");

    cluster.api.delete(&format!("/api/v1/nodes/{OFFLINE}")).await?;
    let of_node = format!("--field-selector=spec.nodeName={OFFLINE}");
    let delete = ["delete", "pods", "--namespace", NAMESPACE, &of_node, "--force", "--grace-period=0"];
    // A controller that has not seen the node's deletion makes another pod for it.
    wait_for("the node to be forgotten", PATIENCE, async || {
        kubectl.run(&delete).await?;
        let set = cluster.api.get(&daemon_set).await?;
        Ok((set["status"]["desiredNumberScheduled"] == 1).then_some(()))
    })
    .await
}

/// Returns the documented command for the agents, with a shorter timeout.
fn rollout_status() -> Result<Vec<String>> {
    let commands = follow::commands(DOCUMENT, "3. Apply")?;
    let command = commands.lines().find(|line| line.contains("rollout status daemonset/tunnel-agent"));
    let command = command.context("the guide does not wait for the agents' rollout")?;
    let documented = "--timeout=300s";
    ensure!(command.starts_with("kubectl ") && command.contains(documented), "the command is {command:?}");
    let command = command.replace(documented, "--timeout=5s");
    Ok(command.split_whitespace().skip(1).map(str::to_owned).collect())
}

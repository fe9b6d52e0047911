//! Pods of the test image, assigned to a node by name.
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::api::{Api, is_true};
use super::image::BUSYBOX;

const START: Duration = Duration::from_secs(60);
const PODS: &str = "/api/v1/namespaces/default/pods";
/// Does nothing until SIGTERM.
pub const IDLE: &str = "trap 'exit 0' TERM; while true; do sleep 1000 & wait $!; done";
/// Prints numbered lines until killed.
pub const TALK: &str = "n=0; while true; do n=$((n+1)); echo line $n; sleep 0.1; done";

/// Returns a pod that runs a shell script on `node`.
pub fn shell(name: &str, node: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": name } },
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "main",
                "image": BUSYBOX,
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", script],
            }],
        },
    })
}

/// Gives the pod the node's network.
pub fn on_host_network(mut pod: Value) -> Value {
    pod["spec"]["hostNetwork"] = json!(true);
    pod
}

/// Gives the container a standard input that `kubectl attach` reaches.
pub fn with_stdin(mut pod: Value) -> Value {
    pod["spec"]["containers"][0]["stdin"] = json!(true);
    pod
}

/// Creates pods and waits until all are ready.
pub async fn run(api: &Api, pods: &[Value]) -> Result<()> {
    for pod in pods {
        api.create(PODS, pod).await.with_context(|| format!("creating pod {}", pod["metadata"]["name"]))?;
    }
    for pod in pods {
        wait_ready(api, pod["metadata"]["name"].as_str().context("a pod without a name")?).await?;
    }
    Ok(())
}

/// Waits until the pod is ready and returns it.
pub async fn wait_ready(api: &Api, name: &str) -> Result<Value> {
    let path = format!("{PODS}/{name}");
    api.wait(&format!("pod {name} to be ready"), &path, START, |pod| is_true(pod, "Ready")).await
}

pub async fn address(api: &Api, name: &str) -> Result<String> {
    let pod = api.get(&format!("{PODS}/{name}")).await?;
    Ok(pod["status"]["podIP"].as_str().with_context(|| format!("pod {name} has no address"))?.to_owned())
}

//! Pods of the test image, put on a node by name.
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::api::{Api, is_true};
use super::image::BUSYBOX;

const START: Duration = Duration::from_secs(60);
const PODS: &str = "/api/v1/namespaces/default/pods";

/// A pod that runs a shell script on `node`.
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

/// Creates a pod.
pub async fn create(api: &Api, pod: &Value) -> Result<()> {
    api.create(PODS, pod).await.with_context(|| format!("creating pod {}", pod["metadata"]["name"]))?;
    Ok(())
}

/// Waits until it is ready; the pod as it is then.
pub async fn wait_ready(api: &Api, name: &str) -> Result<Value> {
    api.wait(&format!("pod {name} to be ready"), &format!("{PODS}/{name}"), START, |pod| {
        is_true(pod, "Ready")
    })
    .await
}

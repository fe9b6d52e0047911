//! The real metrics-server as a process of a host, with the objects, rights and arguments of its own manifests. Its
//! Service's endpoint is written by hand: the controllers make endpoints of pods only.
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::api::is_true;
use super::postern::NAMESPACE;
use super::running::Cluster;
use super::{endpoints, peers};
use crate::process::{Process, log_file};

/// Not 10250 as in its own manifests: on a host that is the kubelet's port.
pub const PORT: u16 = 4443;
const OBJECTS: &str = include_str!("metrics-server.yaml");
const AVAILABLE: Duration = Duration::from_secs(60);

/// Applies its objects.
pub async fn install(cluster: &Cluster<'_>) -> Result<()> {
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], OBJECTS.as_bytes()).await.map(drop)
}

/// Starts it on this node's host, makes it the Service's endpoint for the API server, and waits until it answers. It
/// verifies the kubelets' certificates.
pub async fn start(cluster: &Cluster<'_>, node: &str) -> Result<Process> {
    let host = cluster.host(node)?;
    let token = ["create", "token", "metrics-server", "--namespace", NAMESPACE];
    let token = cluster.kubectl.run(&token).await?;
    let kubeconfig = cluster.pki.kubeconfig_with_token("metrics-server", &cluster.server, token.trim())?;
    let kubeconfig = kubeconfig.display();
    let name = format!("metrics-server-{node}");
    let mut command = host.command(&peers::metrics_server()?);
    command
        .arg(format!("--cert-dir={}", cluster.testbed.dir().join(&name).display()))
        .arg(format!("--secure-port={PORT}"))
        .args(["--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname"])
        .arg("--kubelet-use-node-status-port")
        // Its minimum; its manifests have 15s.
        .args(["--metric-resolution=10s", "--kubelet-request-timeout=5s"])
        .arg(format!("--kubeconfig={kubeconfig}"))
        .arg(format!("--authentication-kubeconfig={kubeconfig}"))
        .arg(format!("--authorization-kubeconfig={kubeconfig}"));
    let process = Process::spawn(cluster.testbed.dir(), &name, command)?;
    let mut slice = endpoints::slice("metrics-server", "https", host.spec.address.into(), PORT);
    slice["metadata"]["namespace"] = json!(NAMESPACE);
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], slice.to_string().as_bytes()).await?;
    let service = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.metrics.k8s.io";
    let available = |service: &Value| is_true(service, "Available");
    let waited = cluster.api.wait("metrics-server to answer", service, AVAILABLE, available).await;
    waited.with_context(|| format!("its log is {}", log_file(cluster.testbed.dir(), &name).display()))?;
    Ok(process)
}

//! Postern in the cluster: the shipped objects and rights; the programs as processes of their hosts, with the arguments
//! that their DaemonSets give them.
use anyhow::{Context as _, Result};
use serde_json::json;

use super::manifests::Manifests;
use super::names::CLOUD_NODE;
use super::running::Cluster;
use crate::agent::{self, Agent};
use crate::server::{Builder, Server};
use crate::topology::CLOUD;

/// The namespace of all objects in the manifests.
pub const NAMESPACE: &str = "kube-system";

/// Applies the manifests of `deploy/FOLDER` except the DaemonSets, and publishes the server's address.
pub async fn install(cluster: &Cluster<'_>, folder: &str) -> Result<Manifests> {
    let manifests = Manifests::render(&cluster.kubectl, folder).await?;
    manifests.apply(&cluster.kubectl, |object| object["kind"] != "DaemonSet").await?;
    // The controllers make slices of pods only, and this server is a process.
    for (service, port, number) in
        [("x-tunnel-server-svc", "tcp", 10262), ("x-tunnel-server-internal-svc", "https", 10263)]
    {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{service}-processes"),
                "labels": {
                    "kubernetes.io/service-name": service,
                    "endpointslice.kubernetes.io/managed-by": "postern-testbed",
                },
            },
            "addressType": "IPv4",
            "ports": [{ "name": port, "port": number, "protocol": "TCP" }],
            "endpoints": [{
                "addresses": [CLOUD.to_string()],
                "conditions": { "ready": true },
                "nodeName": CLOUD_NODE,
            }],
        });
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices");
        cluster.api.create(&path, &slice).await.with_context(|| format!("the endpoints of {service}"))?;
    }
    Ok(manifests)
}

/// The server with the arguments of its DaemonSet and a token of its ServiceAccount.
pub async fn server<'a>(cluster: &Cluster<'a>, manifests: &Manifests) -> Result<Builder<'a>> {
    let token = cluster
        .kubectl
        .run(&["create", "token", "tunnel-server", "--namespace", NAMESPACE, "--duration=2h"])
        .await?;
    let kubeconfig = cluster.pki.kubeconfig_with_token("tunnel-server", &cluster.server, token.trim())?;
    let builder = Builder::in_cluster(cluster.testbed, kubeconfig);
    Ok(manifests.arguments("tunnel-server")?.into_iter().fold(builder, Builder::flag))
}

/// Starts the agent of edge `n` with its kubelet's kubeconfig and waits for its tunnel.
pub async fn agent<'a>(
    cluster: &Cluster<'a>,
    server: &Server<'a>,
    manifests: &Manifests,
    n: usize,
) -> Result<Agent<'a>> {
    let node = cluster.testbed.edge(n).name.clone();
    let kubeconfig = cluster.host(&node)?.kubeconfig.clone();
    let builder = agent::Builder::in_cluster(cluster.testbed, n, kubeconfig);
    let agent =
        manifests.arguments("tunnel-agent")?.into_iter().fold(builder, agent::Builder::flag).spawn()?;
    server.wait_connected(&node, true, agent::START).await?;
    Ok(agent)
}

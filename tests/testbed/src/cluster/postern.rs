//! Postern in the cluster: the shipped objects and rights, with the programs as processes of their hosts and the
//! arguments of their DaemonSets.
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::manifests::{Manifests, write_overlay};
use super::names::CLOUD_NODE;
use super::running::Cluster;
use crate::agent::{self, Agent};
use crate::server::{Builder, Server};
use crate::topology::{CLOUD, CloudHost};

/// Namespace of all objects in the manifests.
pub const NAMESPACE: &str = "kube-system";

/// Optional components, and one that the agents need as processes: they have their kubelets' credentials.
const COMPONENTS: [&str; 3] = ["node-condition", "edge-pods", "kubelet-rights"];

/// Applies the manifests of `deploy/FOLDER` with [`COMPONENTS`] except the DaemonSets, and publishes the server's address.
pub async fn install(cluster: &Cluster<'_>, folder: &str) -> Result<Manifests> {
    install_with(cluster, folder, &[]).await
}

/// As [`install`], with more components.
pub async fn install_with(cluster: &Cluster<'_>, folder: &str, components: &[&str]) -> Result<Manifests> {
    install_for(cluster, folder, components, &[(CLOUD, CLOUD_NODE)]).await
}

/// As [`install`], with the addresses and nodes of several servers.
pub async fn install_for(
    cluster: &Cluster<'_>,
    folder: &str,
    components: &[&str],
    servers: &[(Ipv4Addr, &str)],
) -> Result<Manifests> {
    let dir = cluster.testbed.dir().join("postern");
    write_overlay(&dir, folder, &[&COMPONENTS[..], components].concat(), &json!([]))?;
    let manifests = Manifests::render_at(&cluster.kubectl, &dir).await?;
    manifests.apply(&cluster.kubectl, |object| object["kind"] != "DaemonSet").await?;
    // The controllers make EndpointSlices of pods only, and these servers are processes.
    let endpoint = |(address, node): &(Ipv4Addr, &str)| json!({ "addresses": [address.to_string()], "conditions": { "ready": true }, "nodeName": node });
    let endpoints: Vec<_> = servers.iter().map(endpoint).collect();
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
            "endpoints": endpoints,
        });
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices");
        cluster.api.create(&path, &slice).await.with_context(|| format!("the endpoints of {service}"))?;
    }
    Ok(manifests)
}

/// Makes a builder for the server with the arguments of its DaemonSet and a token of its ServiceAccount.
pub async fn server<'a>(cluster: &Cluster<'a>, manifests: &Manifests) -> Result<Builder<'a>> {
    let builder = Builder::in_cluster(cluster.testbed, credentials(cluster).await?);
    Ok(manifests.arguments("tunnel-server")?.into_iter().fold(builder, Builder::flag))
}

/// As [`server`], on another host. `state` names its state folder and its log.
pub async fn server_on<'a>(
    cluster: &Cluster<'a>,
    manifests: &Manifests,
    host: &'a CloudHost,
    state: &'static str,
) -> Result<Builder<'a>> {
    let builder = Builder::in_cluster_on(cluster.testbed, host, state, credentials(cluster).await?);
    Ok(manifests.arguments("tunnel-server")?.into_iter().fold(builder, Builder::flag))
}

async fn credentials(cluster: &Cluster<'_>) -> Result<PathBuf> {
    let token = cluster
        .kubectl
        .run(&["create", "token", "tunnel-server", "--namespace", NAMESPACE, "--duration=2h"])
        .await?;
    cluster.pki.kubeconfig_with_token("tunnel-server", &cluster.server, token.trim())
}

/// Starts the agent of edge `n` with its kubelet's kubeconfig and waits for its tunnel.
pub async fn agent<'a>(
    cluster: &Cluster<'a>,
    server: &Server<'a>,
    manifests: &Manifests,
    n: usize,
) -> Result<Agent<'a>> {
    let agent = agent_builder(cluster, manifests, n)?.spawn()?;
    server.wait_connected(&cluster.testbed.edge(n).name, true, agent::START).await?;
    Ok(agent)
}

/// Makes a builder for the agent of edge `n` with its kubelet's kubeconfig.
pub fn agent_builder<'a>(
    cluster: &Cluster<'a>,
    manifests: &Manifests,
    n: usize,
) -> Result<agent::Builder<'a>> {
    let kubeconfig = cluster.host(&cluster.testbed.edge(n).name)?.kubeconfig.clone();
    let builder = agent::Builder::in_cluster(cluster.testbed, n, kubeconfig);
    Ok(manifests.arguments("tunnel-agent")?.into_iter().fold(builder, agent::Builder::flag))
}

//! docs/migrating-from-yurttunnel.md, followed step by step: there, back, and there again.
use anyhow::{Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::image::BUSYBOX;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use serde_json::{Value, json};

use super::{NAMESPACE, PATIENCE, follow, logs, on_cluster, overlay, service_has_port, text};

const DOCUMENT: &str = include_str!("../../../../docs/migrating-from-yurttunnel.md");
const OVERLAY: &str = "deploy/overlays/openyurt-migration";
/// Sections that apply the manifests.
const APPLYING: [&str; 2] = ["2. Bring", "4. Start"];

pub(super) async fn migration_from_yurttunnel_and_back(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, followed).await
}

async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    yurttunnel(cluster).await?;
    let before = addresses(cluster).await?;
    for title in ["1. Inspect", "2. Bring", "3. Stop", "4. Start"] {
        section(cluster, title).await?;
    }
    logs(&cluster.kubectl).await?;
    ensure!(addresses(cluster).await? == before, "the Services have other addresses than {before:?}");
    taken_over(cluster, &before[1]).await?;
    section(cluster, "5. Check").await?;

    section(cluster, "Going back").await?;
    runs_again(cluster).await?;
    ensure!(
        addresses(cluster).await? == before,
        "the Services came back with other addresses than {before:?}"
    );

    for title in ["3. Stop", "4. Start", "6. Clean up"] {
        section(cluster, title).await?;
    }
    logs(&cluster.kubectl).await
}

/// Runs the commands of a section unchanged.
async fn section(cluster: &Cluster<'_>, title: &str) -> Result<()> {
    let overlay = overlay(cluster.testbed, "overlays/openyurt-migration")?;
    let overlay = text(&overlay)?;
    let replaced: &[(&str, &str)] = if APPLYING.contains(&title) { &[(OVERLAY, overlay)] } else { &[] };
    follow::section(cluster, DOCUMENT, title, replaced).await.map(drop)
}

/// Creates YurtTunnel's objects, with stand-ins for its programs that only occupy the port: the takeover of its objects
/// is under test.
async fn yurttunnel(cluster: &Cluster<'_>) -> Result<()> {
    for (node, value) in [(CLOUD_NODE, "false"), (EDGE_NODE, "true")] {
        let labels = json!({ "metadata": { "labels": { "openyurt.io/is-edge-worker": value } } });
        cluster.api.patch(&format!("/api/v1/nodes/{node}"), &labels).await?;
    }
    let meta = |name: &str| json!({ "name": name, "namespace": NAMESPACE });
    let service = |name: &str, kind: &str, ports: Value| {
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta(name), "spec": {
            "type": kind, "selector": { "k8s-app": "yurt-tunnel-server" }, "ports": ports,
        }})
    };
    let workload = |kind: &str, name: &str, node: &str, script: &str| {
        json!({ "apiVersion": "apps/v1", "kind": kind, "metadata": meta(name), "spec": {
            "selector": { "matchLabels": { "k8s-app": name } },
            "template": { "metadata": { "labels": { "k8s-app": name } }, "spec": {
                "hostNetwork": true,
                "nodeSelector": { "kubernetes.io/hostname": node },
                "terminationGracePeriodSeconds": 1,
                "tolerations": [{ "operator": "Exists" }],
                "containers": [{
                    "name": name,
                    "image": BUSYBOX,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/sh", "-c", script],
                }],
            }},
        }})
    };
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("yurt-tunnel-server-cfg"), "data": {
            "http-proxy-ports": "9100", "https-proxy-ports": "9443", "dnat-ports-pair": "",
            "localhost-proxy-ports": "10266, 10267",
        }},
        { "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("yurt-tunnel-nodes"), "data": { "tunnel-nodes": "" } },
        service("x-tunnel-server-svc", "NodePort", json!([
            { "name": "tcp", "port": 10262, "targetPort": 10262, "nodePort": 31008 },
        ])),
        service("x-tunnel-server-internal-svc", "ClusterIP", json!([
            { "name": "http", "port": 10255, "targetPort": 10264 },
            { "name": "https", "port": 10250, "targetPort": 10263 },
        ])),
        workload("Deployment", "yurt-tunnel-server", CLOUD_NODE, "exec httpd -f -p 10262 -h /www"),
        workload("DaemonSet", "yurt-tunnel-agent", EDGE_NODE, "exec sleep 2147483647"),
    ]});
    // `create`, as yurtadm did: without the last-applied annotation, which makes the takeover harder.
    cluster.kubectl.run_with_input(&["create", "--filename=-"], objects.to_string().as_bytes()).await?;
    runs_again(cluster).await
}

/// Waits until YurtTunnel's pods run and its Service leads to them.
async fn runs_again(cluster: &Cluster<'_>) -> Result<()> {
    for workload in ["deployment/yurt-tunnel-server", "daemonset/yurt-tunnel-agent"] {
        let args = ["rollout", "status", workload, "--namespace", NAMESPACE, "--timeout=50s"];
        cluster.kubectl.run(&args).await?;
    }
    let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices");
    let leads = |slices: &Value| {
        let slices = slices["items"].as_array().map_or(&[][..], Vec::as_slice);
        slices.iter().any(|slice| {
            slice["metadata"]["labels"]["kubernetes.io/service-name"] == "x-tunnel-server-svc"
                && slice["endpoints"][0]["targetRef"]["name"]
                    .as_str()
                    .is_some_and(|pod| pod.starts_with("yurt-tunnel-server-"))
        })
    };
    cluster.api.wait("the Service to lead to YurtTunnel", &slices, PATIENCE, leads).await?;
    Ok(())
}

/// Returns cluster IP and node port of the Services.
async fn addresses(cluster: &Cluster<'_>) -> Result<[String; 3]> {
    let service = |name: &str| format!("/api/v1/namespaces/{NAMESPACE}/services/{name}");
    let agents = cluster.api.get(&service("x-tunnel-server-svc")).await?;
    let internal = cluster.api.get(&service("x-tunnel-server-internal-svc")).await?;
    let ip = |service: &Value| service["spec"]["clusterIP"].as_str().unwrap_or_default().to_owned();
    Ok([ip(&agents), ip(&internal), agents["spec"]["ports"][0]["nodePort"].to_string()])
}

/// Fails unless the port lists are unchanged and in effect, and the DNS records are Postern's.
async fn taken_over(cluster: &Cluster<'_>, internal: &str) -> Result<()> {
    let configmap = |name: &str| format!("/api/v1/namespaces/{NAMESPACE}/configmaps/{name}");
    let lists = cluster.api.get(&configmap("yurt-tunnel-server-cfg")).await?;
    ensure!(lists["data"]["http-proxy-ports"] == "9100", "the port lists are {}", lists["data"]);
    let record = format!("{internal}\t{EDGE_NODE}");
    let written = |records: &Value| {
        records["data"]["tunnel-nodes"].as_str().is_some_and(|lines| lines.lines().any(|line| line == record))
    };
    cluster.api.wait("the DNS records", &configmap("yurt-tunnel-nodes"), PATIENCE, written).await?;
    service_has_port(cluster, NAMESPACE).await
}

//! docs/migrating-from-superedge.md, followed step by step: there, back, and there again.
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::visit;
use postern_testbed::cluster::image::BUSYBOX;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::report::progress;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, Testbed};
use serde_json::{Value, json};

use super::{NAMESPACE, PATIENCE, follow, logs, on_cluster, overlay, text};
use crate::web::{Answer, curl};

const DOCUMENT: &str = include_str!("../../../../docs/migrating-from-superedge.md");
/// SuperEdge's namespace.
const SUPEREDGE: &str = "edge-system";
/// Port of the map, and of its target on the edge's loopback.
const MAP: u16 = 8022;
const TOML: &str = r#"
[mode]
    [mode.cloud]
        [mode.cloud.stream]
            [mode.cloud.stream.server]
                grpcport = 9000
                logport = 51010
                metricsport = 6000
                key = "/etc/superedge/tunnel/certs/tunnel-cloud-server.key"
                cert = "/etc/superedge/tunnel/certs/tunnel-cloud-server.crt"
                tokenfile = "/etc/superedge/tunnel/token/token"
            [mode.cloud.stream.dns]
                configmap = "tunnel-nodes"
                hosts = "/etc/superedge/tunnel/nodes/hosts"
                service = "tunnel-cloud"
        [mode.cloud.tcp]
            "0.0.0.0:8022" = "127.0.0.1:8022"
        [mode.cloud.https]
            cert = "/etc/superedge/tunnel/certs/apiserver-kubelet-server.crt"
            key = "/etc/superedge/tunnel/certs/apiserver-kubelet-server.key"
            [mode.cloud.https.addr]
                "10250" = "127.0.0.1:10250"
                "9100" = "127.0.0.1:9100"
"#;
/// A record as tunnel-cloud writes it: its pod's address for each of its nodes.
const RECORD: &str = "10.71.0.99    edge-1";
const COREFILE: &str = ".:53 {\n    hosts /etc/edge/hosts {\n        reload 300ms\n        fallthrough\n    }\n    forward . /etc/resolv.conf\n}\n";

pub(super) async fn migration_from_superedge(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, followed).await
}

async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    let _behind_the_map = Target::start(&testbed.edge(1).ns, Ipv4Addr::LOCALHOST, MAP, Behaviour::Echo)?;
    superedge(cluster).await?;
    overlay(testbed, "overlays/superedge")?;
    for title in ["1. Keep", "2. Start"] {
        section(cluster, title).await?;
    }
    let names = served(kubectl).await?;
    ensure!(names == RECORD, "the names lead elsewhere already: {names}");
    for title in ["3. Take", "4. Lead"] {
        section(cluster, title).await?;
    }
    taken_over(cluster).await?;

    section(cluster, "Going back").await?;
    let names = async || served(kubectl).await;
    wait_until("SuperEdge's names", 2 * PATIENCE, names, |names| names == RECORD).await?;
    runs(kubectl).await?;
    let left = kubectl.run(&["get", "daemonset", "--namespace", NAMESPACE, "--output=name"]).await?;
    ensure!(left.is_empty(), "Postern's are left: {left}");
    progress("SuperEdge's objects are as they were");

    for title in ["2. Start", "3. Take", "4. Lead"] {
        section(cluster, title).await?;
    }
    taken_over(cluster).await?;
    section(cluster, "6. Remove").await?;
    // Kubernetes creates these two in every namespace.
    let kinds = "deployment,daemonset,service,configmap,secret,serviceaccount,rolebinding";
    let left = kubectl.run(&["get", kinds, "--namespace", SUPEREDGE, "--output=name"]).await?;
    let left: Vec<&str> = left
        .lines()
        .filter(|name| !["configmap/kube-root-ca.crt", "serviceaccount/default"].contains(name))
        .collect();
    ensure!(left.is_empty(), "of SuperEdge there is left {left:?}");
    logs(kubectl).await?;
    visit(SocketAddr::from((CLOUD, MAP))).await.map(drop).context("the map without SuperEdge")
}

async fn section(cluster: &Cluster<'_>, title: &str) -> Result<()> {
    let commands = follow::commands(DOCUMENT, title)?;
    let mut replaced = vec![("my-postern", "overlay")];
    replaced.retain(|(from, _)| commands.contains(*from));
    follow::section(cluster, DOCUMENT, title, &replaced).await.map(drop)
}

/// Creates SuperEdge's objects under the names of its manifests. Stand-ins that do nothing replace its programs, which
/// the module proxy does not have, and CoreDNS: the takeover of their objects in the cluster is under test.
async fn superedge(cluster: &Cluster<'_>) -> Result<()> {
    let label = json!({ "metadata": { "labels": { "superedge.io/edge-node": "enable" } } });
    cluster.api.patch(&format!("/api/v1/nodes/{EDGE_NODE}"), &label).await?;
    let meta = |name: &str| json!({ "name": name, "namespace": SUPEREDGE });
    let configmap = |name: &str, key: &str, value: &str| json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(name), "data": { key: value } });
    let secret = |name: &str| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": meta(name) });
    let account =
        |name: &str| json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(name) });
    let service = |name: &str, kind: &str, label: &str, port: u16| {
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": meta(name), "spec": {
            "type": kind, "selector": { label: name }, "ports": [{ "port": port }],
        }})
    };
    let role = |name: &str| {
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": name }, "rules": [
            { "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"] },
        ]})
    };
    let binding = |kind: &str, name: &str| {
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": meta(name),
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": SUPEREDGE }],
        })
    };
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SUPEREDGE } },
        configmap("tunnel-cloud-conf", "tunnel_cloud.toml", TOML),
        configmap("tunnel-cloud-token", "token", "default:of-every-node"),
        configmap("tunnel-edge-conf", "tunnel_edge.toml", "[mode.edge]\n"),
        configmap("tunnel-coredns", "Corefile", COREFILE),
        configmap("tunnel-nodes", "hosts", RECORD),
        secret("tunnel-cloud-cert"),
        secret("tunnel-edge-cert"),
        account("tunnel-cloud"),
        account("tunnel-edge"),
        role("tunnel-cloud"),
        role("tunnel-edge"),
        binding("RoleBinding", "tunnel-cloud"),
        binding("ClusterRoleBinding", "tunnel-edge"),
        service("tunnel-cloud", "NodePort", "app", 9000),
        service("tunnel-coredns", "ClusterIP", "k8s-app", 53),
        workload("Deployment", "tunnel-cloud", "app", CLOUD_NODE),
        workload("Deployment", "tunnel-coredns", "k8s-app", CLOUD_NODE),
        workload("DaemonSet", "tunnel-edge", "app", EDGE_NODE),
    ]});
    cluster.kubectl.run_with_input(&["create", "--filename=-"], objects.to_string().as_bytes()).await?;
    runs(&cluster.kubectl).await
}

/// Returns a stand-in workload, with the edge nodes' names where CoreDNS would read them.
fn workload(kind: &str, name: &str, label: &str, node: &str) -> Value {
    json!({ "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": name, "namespace": SUPEREDGE }, "spec": {
        "selector": { "matchLabels": { label: name } },
        "template": { "metadata": { "labels": { label: name } }, "spec": {
            "nodeSelector": { "kubernetes.io/hostname": node },
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": name,
                "image": BUSYBOX,
                "imagePullPolicy": "Never",
                "volumeMounts": [{ "name": "hosts", "mountPath": "/etc/edge", "readOnly": true }],
            }],
            "volumes": [{ "name": "hosts", "configMap": { "name": "tunnel-nodes" } }],
        }},
    }})
}

async fn runs(kubectl: &Kubectl) -> Result<()> {
    for workload in ["deployment/tunnel-cloud", "deployment/tunnel-coredns", "daemonset/tunnel-edge"] {
        let status = ["rollout", "status", workload, "--namespace", SUPEREDGE, "--timeout=50s"];
        kubectl.run(&status).await?;
    }
    Ok(())
}

/// Returns the file from which tunnel-coredns answers.
async fn served(kubectl: &Kubectl) -> Result<String> {
    let server = ["exec", "deployment/tunnel-coredns", "--namespace", SUPEREDGE];
    kubectl.run(&[&server[..], &["--", "cat", "/etc/edge/hosts"]].concat()).await
}

/// Checks that the edge is reached by its address, by its name in SuperEdge's DNS, and through the map.
async fn taken_over(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    logs(kubectl).await?;
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-internal-svc");
    let service = cluster.api.get(&service).await?;
    let address = service["spec"]["clusterIP"].as_str().context("the internal Service has no address")?;
    let record = format!("{address}\t{EDGE_NODE}");
    let names = async || served(kubectl).await;
    let is_there = |names: &String| names.lines().any(|line| line == record);
    wait_until("the edge's name to lead to Postern", 2 * PATIENCE, names, is_there).await?;
    by_name(cluster, address).await?;
    let map = SocketAddr::from((CLOUD, MAP));
    wait_for("the map", PATIENCE, async || Ok(visit(map).await.ok())).await.map(drop)
}

/// Reads a pod's log from the kubelet by the node's name, like a kube-apiserver that SuperEdge has set up.
async fn by_name(cluster: &Cluster<'_>, address: &str) -> Result<()> {
    let pki = &cluster.pki;
    let (ca, certificate) = (pki.file("ca.crt"), pki.file("kube-apiserver-kubelet-client.crt"));
    let key = pki.file("kube-apiserver-kubelet-client.key");
    let name = format!("{EDGE_NODE}:10250");
    let resolve = format!("{name}:{address}");
    let url = format!("https://{name}/containerLogs/default/talker/main?tailLines=1");
    let args = [
        "--cacert",
        text(&ca)?,
        "--cert",
        text(&certificate)?,
        "--key",
        text(&key)?,
        "--resolve",
        &resolve,
        &url,
    ];
    let asked = async || curl(cluster.testbed, &args).await;
    let answered = |answer: &Answer| answer.status == 200 && answer.body.starts_with("line ");
    wait_until("a log from the kubelet at its node's name", PATIENCE, asked, answered).await.map(drop)
}

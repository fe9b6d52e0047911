//! docs/migrating-from-konnectivity.md, followed step by step in a cluster that runs konnectivity's own programs: there, back, and
//! there again.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::api::is_true;
use postern_testbed::cluster::image::BUSYBOX;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, peers};
use postern_testbed::report::progress;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, POD_CIDR, Testbed};
use serde_json::{Value, json};

use super::{NAMESPACE, PATIENCE, explained, follow, import, overlay, running, text};

const DOCUMENT: &str = include_str!("../../../../docs/migrating-from-konnectivity.md");
const RANGES: &str = "10.0.0.0/16,10.244.0.0/16,10.96.0.0/12";
const SERVER: &str = "konnectivity-server";
const AGENT: &str = "konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";
/// Grace period of the pods with konnectivity's programs, which have nothing to finish.
const GRACE: u32 = 2;

pub(super) async fn migration_from_konnectivity(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    import(&mut cluster).await?;
    let talkers = [shell("talker", EDGE_NODE, TALK), shell("cloud-talker", CLOUD_NODE, TALK)];
    pods::run(&cluster.api, &talkers).await?;
    let connection =
        json!({ "proxyProtocol": "GRPC", "transport": { "uds": { "udsName": socket(testbed) } } });
    cluster.select_egress(&connection, &[]).await?;
    explained(&cluster, followed).await
}

async fn followed(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    konnectivity(cluster).await?;
    works(kubectl).await.context("through konnectivity")?;
    progress("kubectl reaches both nodes through konnectivity");

    overlay(cluster.testbed, "base")?;
    for title in ["1. Install", "2. Prepare"] {
        section(cluster, title).await?;
    }
    works(kubectl).await.context("through konnectivity, with Postern beside it")?;
    changing_servers(cluster, "3. Change over").await?;
    works(kubectl).await.context("through Postern")?;
    relayed_by_postern(kubectl).await?;
    section(cluster, "4. Check").await?;

    // No Postern server that owns the socket is left afterwards.
    changing_servers(cluster, "Going back").await?;
    proxy_server_runs(cluster).await?;
    works(kubectl).await.context("through konnectivity again")?;

    changing_servers(cluster, "3. Change over").await?;
    works(kubectl).await.context("through Postern again")?;
    relayed_by_postern(kubectl).await?;
    for title in ["4. Check", "5. Remove"] {
        section(cluster, title).await?;
    }
    for object in
        [format!("daemonset/{AGENT}"), format!("serviceaccount/{AGENT}"), format!("pod/{}", mirror())]
    {
        let found = kubectl.fails(&["get", &object, "--namespace", NAMESPACE]).await;
        found.with_context(|| format!("{object} is left"))?;
    }
    works(kubectl).await.context("without konnectivity")
}

/// Stand-in for the master's /etc/kubernetes: all hosts of the testbed share the machine's own.
fn etc(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("etc")
}

fn socket(testbed: &Testbed) -> PathBuf {
    etc(testbed).join(SERVER).join(format!("{SERVER}.socket"))
}

/// Returns the name of the static pod's mirror in the API server.
fn mirror() -> String {
    format!("{SERVER}-{CLOUD_NODE}")
}

/// Runs the commands of a section with the folders and address ranges of this cluster.
async fn section(cluster: &Cluster<'_>, title: &str) -> Result<()> {
    let (manifests, etc) = (cluster.host(CLOUD_NODE)?.manifests(), etc(cluster.testbed));
    let direct = format!("{CLOUD}/32,{POD_CIDR}");
    let commands = follow::commands(DOCUMENT, title)?;
    let mut replaced = vec![
        ("my-postern", "overlay"),
        ("/etc/kubernetes/manifests", text(&manifests)?),
        ("/etc/kubernetes", text(&etc)?),
        (RANGES, direct.as_str()),
    ];
    replaced.retain(|(from, _)| commands.contains(*from));
    follow::section(cluster, DOCUMENT, title, &replaced).await.map(drop)
}

/// As [`section`], for one that replaces the servers' pods; waits until the old ones are gone.
async fn changing_servers(cluster: &Cluster<'_>, title: &str) -> Result<()> {
    let before = running(&cluster.kubectl, "tunnel-server").await?;
    section(cluster, title).await?;
    let now = async || running(&cluster.kubectl, "tunnel-server").await;
    let new = |now: &Vec<String>| !now.is_empty() && now.iter().all(|pod| !before.contains(pod));
    wait_until("the servers before to be gone", PATIENCE, now, new).await.map(drop)
}

/// Runs commands in pods of both nodes and reads their logs.
async fn works(kubectl: &Kubectl) -> Result<()> {
    for pod in ["talker", "cloud-talker"] {
        wait_for(&format!("kubectl exec in {pod}"), PATIENCE, async || {
            let output = kubectl.output(&["exec", pod, "--", "echo", "there"]).await?;
            Ok((output.status.success() && output.stdout == b"there\n").then_some(()))
        })
        .await?;
        let said = kubectl.run(&["logs", pod, "--tail=1"]).await?;
        ensure!(said.starts_with("line "), "kubectl logs {pod}: {said}");
    }
    Ok(())
}

/// Waits until the servers' log shows a connection from kube-apiserver to the edge.
async fn relayed_by_postern(kubectl: &Kubectl) -> Result<()> {
    let selector = "--selector=app.kubernetes.io/name=tunnel-server";
    let log = async || kubectl.run(&["logs", "--namespace", NAMESPACE, selector, "--tail=-1"]).await;
    let node = format!("node={EDGE_NODE}");
    let relayed =
        |log: &String| log.lines().any(|line| line.contains(r#"listener="egress""#) && line.contains(&node));
    wait_until("a connection of the egress listener", PATIENCE, log, relayed).await.map(drop)
}

/// Sets up konnectivity as the Kubernetes documentation does: proxy-server is a static pod of the master, proxy-agent a
/// DaemonSet that presents tokens. Every agent names its own address and is used for that only, because agents behind
/// NAT reach nothing else.
async fn konnectivity(cluster: &Cluster<'_>) -> Result<()> {
    let (testbed, pki) = (cluster.testbed, &cluster.pki);
    pki.server(SERVER, SERVER, &[CLOUD.to_string()])?;
    let user = pki.client("konnectivity-server-user", AUDIENCE, &[])?;
    let kubeconfig = pki.kubeconfig(SERVER, &cluster.server, &user)?;
    let certificates = kubeconfig.parent().context("the kubeconfig is in no folder")?;
    let socket = socket(testbed);
    let of_socket = socket.parent().context("the socket is in no folder")?;
    fs::create_dir_all(of_socket).with_context(|| format!("creating {}", of_socket.display()))?;

    let file = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    let mut arguments = Vec::from(
        [
            "--mode=grpc",
            "--server-port=0",
            "--agent-port=8132",
            "--admin-port=8133",
            "--health-port=8134",
            "--proxy-strategies=destHost",
        ]
        .map(str::to_owned),
    );
    arguments.extend([
        file("uds-name", &socket),
        file("cluster-cert", &pki.file("konnectivity-server.crt")),
        file("cluster-key", &pki.file("konnectivity-server.key")),
        file("kubeconfig", &kubeconfig),
        format!("--authentication-audience={AUDIENCE}"),
        format!("--agent-namespace={NAMESPACE}"),
        format!("--agent-service-account={AGENT}"),
    ]);
    let server = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": SERVER, "namespace": NAMESPACE, "labels": { "k8s-app": SERVER } },
        "spec": spec("proxy-server", &arguments, &[of_socket, certificates])?,
    });
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": { "name": AUDIENCE },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:auth-delegator" },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": AUDIENCE }],
        },
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": AGENT, "namespace": NAMESPACE } },
        agents()?,
    ]});
    cluster.kubectl.run_with_input(&["create", "--filename=-"], objects.to_string().as_bytes()).await?;

    // The kubelet may read a file in its folder before it is complete.
    let manifest = etc(testbed).join(format!("{SERVER}.yaml"));
    fs::write(&manifest, server.to_string()).with_context(|| format!("writing {}", manifest.display()))?;
    let place = cluster.host(CLOUD_NODE)?.manifests().join(format!("{SERVER}.yaml"));
    fs::rename(&manifest, &place).with_context(|| format!("renaming to {}", place.display()))?;
    proxy_server_runs(cluster).await?;
    let rollout = ["rollout", "status", "daemonset", AGENT, "--namespace", NAMESPACE, "--timeout=50s"];
    cluster.kubectl.run(&rollout).await.map(drop)
}

async fn proxy_server_runs(cluster: &Cluster<'_>) -> Result<()> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", mirror());
    let ready = |pod: &Value| is_true(pod, "Ready");
    cluster.api.wait("proxy-server to run", &path, PATIENCE, ready).await.map(drop)
}

/// Returns the DaemonSet of konnectivity's agents, on every node.
fn agents() -> Result<Value> {
    const TOKEN: &str = "konnectivity-agent-token";
    let arguments = [
        "--ca-cert=/var/run/secrets/kubernetes.io/serviceaccount/ca.crt".to_owned(),
        format!("--service-account-token-path=/var/run/secrets/tokens/{TOKEN}"),
        format!("--proxy-server-host={CLOUD}"),
        "--proxy-server-port=8132".to_owned(),
        "--admin-server-port=8143".to_owned(),
        "--health-server-port=8144".to_owned(),
        "--agent-identifiers=ipv4=$(HOST_IP)".to_owned(),
        "--sync-interval-cap=2s".to_owned(),
    ];
    let mut spec = spec("proxy-agent", &arguments, &[])?;
    spec["serviceAccountName"] = json!(AGENT);
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    let container = &mut spec["containers"][0];
    container["env"] =
        json!([{ "name": "HOST_IP", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } }]);
    let mounts = container["volumeMounts"].as_array_mut().context("the container has no mounts")?;
    mounts.push(json!({ "name": TOKEN, "mountPath": "/var/run/secrets/tokens" }));
    let source = json!({ "serviceAccountToken": { "path": TOKEN, "audience": AUDIENCE } });
    let volumes = spec["volumes"].as_array_mut().context("the pod has no volumes")?;
    volumes.push(json!({ "name": TOKEN, "projected": { "sources": [source] } }));
    Ok(json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": AGENT, "namespace": NAMESPACE, "labels": { "k8s-app": AGENT } },
        "spec": {
            "selector": { "matchLabels": { "k8s-app": AGENT } },
            "template": { "metadata": { "labels": { "k8s-app": AGENT } }, "spec": spec },
        },
    }))
}

/// Returns a pod spec of a konnectivity program, which comes from its host, as do these folders.
fn spec(program: &str, arguments: &[String], folders: &[&Path]) -> Result<Value> {
    let program = peers::konnectivity(program)?;
    let of_program = program.parent().context("the program is in no folder")?;
    let (mut mounts, mut volumes) = (Vec::new(), Vec::new());
    for (number, folder) in folders.iter().copied().chain([of_program]).enumerate() {
        let name = format!("folder-{number}");
        mounts.push(json!({ "name": name, "mountPath": folder }));
        volumes.push(json!({ "name": name, "hostPath": { "path": folder, "type": "Directory" } }));
    }
    Ok(json!({
        "hostNetwork": true,
        "terminationGracePeriodSeconds": GRACE,
        "containers": [{
            "name": "konnectivity",
            "image": BUSYBOX,
            "imagePullPolicy": "Never",
            "command": [program],
            "args": arguments,
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    }))
}

//! deploy/ as an administrator applies it: real images, real pods, and only the rights that are used.
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::visit;
use postern_testbed::cluster::api::is_true;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::report::{figure, progress};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_for;
use serde_json::{Value, json};

use crate::common::{alongside, target};

mod migration;
mod rights;

use migration::migration_from_yurttunnel_and_back;

scenarios! {
    manifests_run_unchanged(images, limit = 420),
    migration_from_yurttunnel_and_back(images, limit = 420),
}

const DOCUMENT: &str = include_str!("../../../../docs/kubernetes.md");
const FOLDERS: [&str; 6] = [
    "base",
    "overlays/nodeport",
    "overlays/loadbalancer",
    "overlays/openyurt-migration",
    "overlays/superedge",
    "prometheus",
];
const PROGRAMS: [(&str, &str); 2] = [("tunnel-server", CLOUD_NODE), ("tunnel-agent", EDGE_NODE)];
const PATIENCE: Duration = Duration::from_secs(60);

async fn manifests_run_unchanged(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    for folder in FOLDERS {
        let path = deploy().join(folder);
        cluster.kubectl.run(&["apply", "--dry-run=server", "-k", text(&path)?]).await?;
    }
    progress("the API server accepts every folder");
    import(&mut cluster).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    let result = installed(&cluster).await;
    match result {
        Ok(()) => Ok(()),
        Err(error) => Err(error.context(explanation(&cluster.kubectl).await)),
    }
}

/// Imports into each host the image that it runs.
async fn import(cluster: &mut Cluster<'_>) -> Result<()> {
    for (program, node) in PROGRAMS {
        let archive = archive(program)?;
        cluster.host_mut(node)?.import(&archive).await.with_context(|| archive.display().to_string())?;
    }
    Ok(())
}

async fn installed(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    kubectl.run(&["apply", "-k", text(&overlay(cluster.testbed, "base")?)?]).await?;
    for (program, _) in PROGRAMS {
        rolled_out(kubectl, program).await?;
    }
    progress("both DaemonSets are ready");
    logs(kubectl).await?;
    ports(cluster).await?;
    rotation(kubectl).await?;
    restarts(cluster).await?;
    let up = |node: &Value| is_true(node, "PosternTunnel");
    let node = format!("/api/v1/nodes/{EDGE_NODE}");
    cluster.api.wait("the node's condition PosternTunnel", &node, PATIENCE, up).await?;
    rights::check(cluster).await
}

/// An overlay of `folder`, as an administrator would write it, that only sets the cgroup and the BPF file system: a test must
/// not redirect the whole machine.
fn overlay(testbed: &Testbed, folder: &str) -> Result<PathBuf> {
    let dir = fs::canonicalize(testbed.dir()).context("the run's folder")?.join("overlay");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    // Kustomize takes no absolute paths.
    let up = "../".repeat(dir.components().count() - 1);
    let base = fs::canonicalize(deploy().join(folder)).with_context(|| folder.to_owned())?;
    let base = format!("{up}{}", text(&base)?.trim_start_matches('/'));
    let argument = format!("--redirect-cgroup={}", testbed.cloud_cgroup.path().display());
    let bpffs = testbed.bpffs();
    let patch = json!([
        { "op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": argument },
        // This host may have none.
        { "op": "replace", "path": "/spec/template/spec/volumes/2/hostPath/path", "value": text(&bpffs)? },
    ]);
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
        "patches": [{
            "target": { "kind": "DaemonSet", "name": "tunnel-server" },
            "patch": patch.to_string(),
        }],
    });
    // JSON is YAML too.
    fs::write(dir.join("kustomization.yaml"), kustomization.to_string()).context("writing the overlay")?;
    Ok(dir)
}

async fn rolled_out(kubectl: &Kubectl, daemon_set: &str) -> Result<()> {
    let name = format!("daemonset/{daemon_set}");
    let status = kubectl.within(Duration::from_secs(100));
    status.run(&["rollout", "status", &name, "--namespace", NAMESPACE, "--timeout=90s"]).await?;
    let ready = ["get", &name, "--namespace", NAMESPACE, "--output=jsonpath={.status.numberReady}"];
    let ready = kubectl.run(&ready).await?;
    ensure!(ready == "1", "{daemon_set} is ready on {ready:?} nodes: it must run on exactly one");
    Ok(())
}

/// `kubectl logs` of a pod of the edge node, which is behind NAT.
async fn logs(kubectl: &Kubectl) -> Result<()> {
    wait_for("kubectl logs of the edge's pod", PATIENCE, async || {
        let output = kubectl.output(&["logs", "talker", "--tail=1"]).await?;
        let line = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok((output.status.success() && line.starts_with("line ")).then_some(()))
    })
    .await
}

/// Ports in the ConfigMap become ports of the internal Service; an invalid one becomes an Event.
async fn ports(cluster: &Cluster<'_>) -> Result<()> {
    let change = json!({ "data": {
        "http-proxy-ports": "9100, nonsense",
        "localhost-proxy-ports": "10266",
    }});
    cluster
        .api
        .patch(&format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-server-cfg"), &change)
        .await?;
    service_has_port(cluster).await?;
    let events = format!("/api/v1/namespaces/{NAMESPACE}/events");
    let reported = |events: &Value| {
        let events = events["items"].as_array().map_or(&[][..], Vec::as_slice);
        events.iter().any(|event| event["reason"] == "InvalidPort")
    };
    cluster.api.wait("the Event about an invalid port", &events, PATIENCE, reported).await?;
    let records = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-nodes");
    let named = |records: &Value| {
        records["data"]["tunnel-nodes"]
            .as_str()
            .is_some_and(|lines| lines.contains(&format!("\t{EDGE_NODE}")))
    };
    cluster.api.wait("the DNS records", &records, PATIENCE, named).await?;
    Ok(())
}

/// Waits until the internal Service has port 9100.
async fn service_has_port(cluster: &Cluster<'_>) -> Result<()> {
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-internal-svc");
    let has_port = |service: &Value| {
        let ports = service["spec"]["ports"].as_array().map_or(&[][..], Vec::as_slice);
        ports.iter().any(|port| port["name"] == "dnat-9100")
    };
    cluster.api.wait("the internal Service's port", &service, PATIENCE, has_port).await.map(drop)
}

/// The CA is rotated from within a server's pod, as documented.
async fn rotation(kubectl: &Kubectl) -> Result<()> {
    let ca = async |step: &str| {
        let server = ["exec", "--namespace", NAMESPACE, "daemonset/tunnel-server", "--"];
        kubectl.run(&[&server[..], &["/tunnel-server", "ca", step, "--in-cluster"]].concat()).await
    };
    let agent = async |step: &str| {
        let server = ["exec", "--namespace", NAMESPACE, "daemonset/tunnel-server", "--"];
        let command = ["/tunnel-server", "agent", step, "no-such-node", "--in-cluster"];
        kubectl.run(&[&server[..], &command].concat()).await
    };
    agent("revoke").await?;
    agent("readmit").await?;
    ca("introduce").await?;
    let status = ca("status").await?;
    ensure!(status.matches("sha256:").count() >= 2, "there are not two roots in {status:?}");
    Ok(())
}

/// New pods of each DaemonSet, first because another overlay is applied: the tunnel comes back without a new certificate.
async fn restarts(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    let label = json!({ "metadata": { "labels": { "superedge.io/edge-node": "enable" } } });
    cluster.api.patch(&format!("/api/v1/nodes/{EDGE_NODE}"), &label).await?;
    kubectl.run(&["apply", "-k", text(&overlay(cluster.testbed, "overlays/superedge")?)?]).await?;
    for (program, _) in PROGRAMS {
        rolled_out(kubectl, program).await?;
    }
    logs(kubectl).await.context("after another overlay was applied")?;
    for _ in 0..2 {
        kubectl.run(&["rollout", "restart", "daemonset/tunnel-agent", "--namespace", NAMESPACE]).await?;
        rolled_out(kubectl, "tunnel-agent").await?;
        logs(kubectl).await.context("after the agent was restarted")?;
    }
    update(cluster).await?;
    let requests = cluster.api.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").await?;
    let requests = requests["items"].as_array().map_or(&[][..], Vec::as_slice);
    let ours = requests.iter().filter(|csr| csr["spec"]["signerName"] == "postern.internal/agent").count();
    ensure!(ours == 1, "{ours} certificates were requested; the agent's state must outlive its pod");
    Ok(())
}

/// A rolling update of the servers, which nobody notices.
async fn update(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    // A port of the ConfigMap.
    let exporter = target(testbed, 1, 9100, Behaviour::Echo)?;
    wait_for("the port to be redirected", PATIENCE, async || Ok(visit(exporter.address).await.ok())).await?;
    let before = server_pod(kubectl).await?;
    let asked = Cell::new(0);
    let updated = Cell::new(false);
    let update = async {
        kubectl.run(&["rollout", "restart", "daemonset/tunnel-server", "--namespace", NAMESPACE]).await?;
        rolled_out(kubectl, "tunnel-server").await?;
        updated.set(true);
        anyhow::Ok(())
    };
    let ask = async {
        while !updated.get() {
            let said = kubectl.run(&["logs", "talker", "--tail=1"]).await?;
            ensure!(said.starts_with("line "), "kubectl logs: {said}");
            let said = kubectl.run(&["exec", "talker", "--", "echo", "there"]).await?;
            ensure!(said.trim() == "there", "kubectl exec: {said}");
            asked.set(asked.get() + 1);
        }
        Ok(())
    };
    let both = async { tokio::try_join!(update, ask) };
    alongside("a rolling update", exporter.address, both).await?;
    figure(&format!("kubectl logs and exec {} times during a rolling update", asked.get()));
    ensure!(server_pod(kubectl).await? != before, "the server's pod is the one before");
    Ok(())
}

async fn server_pod(kubectl: &Kubectl) -> Result<String> {
    let selector = "--selector=app.kubernetes.io/name=tunnel-server";
    let running = "--field-selector=status.phase=Running";
    kubectl.run(&["get", "pods", "--namespace", NAMESPACE, selector, running, "--output=name"]).await
}

/// The state of an installation that does not work.
async fn explanation(kubectl: &Kubectl) -> String {
    let mut text = String::new();
    for args in [
        &["get", "pods,services,endpointslices,csr", "-A", "--output=wide"][..],
        &["get", "events", "-A"],
        &["logs", "daemonset/tunnel-server", "--namespace", NAMESPACE, "--tail=40"],
        &["logs", "daemonset/tunnel-agent", "--namespace", NAMESPACE, "--tail=40"],
    ] {
        match kubectl.within(Duration::from_secs(10)).output(args).await {
            Ok(output) => text.push_str(&postern_testbed::cluster::kubectl::said(&output)),
            Err(error) => text.push_str(&format!("{error:#}")),
        }
        text.push('\n');
    }
    text
}

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// The image that `cargo xtask image` wrote to the target folder.
fn archive(program: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    let target = own.parent().and_then(Path::parent).context("this program is in no target folder")?;
    let path = target.join("image").join(format!("{program}.oci.tar"));
    ensure!(path.exists(), "{} is missing: run `cargo xtask image --profile dev`", path.display());
    Ok(path)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

#[cfg(test)]
mod tests;

//! The chart on a real cluster, in a namespace of its own: installed, upgraded, rolled back and removed.
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::peers;
use postern_testbed::cluster::{Cluster, EDGE_NODE};
use postern_testbed::report::progress;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::guide::{CHART, link_deploy};
use super::render::chart;
use super::{
    DOCUMENT, PATIENCE, PROGRAMS, follow, logs, on_cluster, patches, ready_in, service_has_port, text,
};

/// Longer than helm's own `--timeout`, so that helm reports the reason.
const LIMIT: Duration = Duration::from_secs(150);
/// All other scenarios use that of the manifests, which is also the guide's.
const NAMESPACE: &str = "postern";
const GUIDES: &str = "--namespace kube-system";

pub(super) async fn chart_is_installed_upgraded_and_removed(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, lived).await
}

async fn lived(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, chart) = (&cluster.kubectl, chart());
    let chart = text(&chart)?;
    // A test must not redirect the whole machine, which may have no BPF file system either.
    let cgroup = cluster.testbed.cloud_cgroup.path();
    let values = json!({ "server": {
        "hostPaths": { "bpf": text(&cluster.testbed.bpffs())? },
        "extraArgs": [patches::redirect_cgroup(text(cgroup)?)?],
    }});
    let file = cluster.testbed.dir().join("values.json");
    fs::write(&file, values.to_string()).context("writing the values")?;
    let values = format!("--values={}", text(&file)?);
    // The guide's commands, in a folder that has `deploy`. There is no registry here.
    link_deploy(cluster.testbed)?;
    let with_values = format!("deploy/helm/postern {values}");
    let guides = async |command: &str, replaced: &[(&str, &str)]| {
        follow::lines(cluster, DOCUMENT, CHART, command, replaced).await
    };
    let of_its_own = format!("--namespace {NAMESPACE}");
    let created = format!("{of_its_own} --create-namespace");
    let here = [
        ("deploy/helm/postern", with_values.as_str()),
        ("registry.example.org", "localhost"),
        (GUIDES, created.as_str()),
    ];
    let notes = guides("helm install", &here).await?;
    ensure!(notes.contains("kubectl label node NODE"), "helm does not say what is next: {notes}");
    for (program, _) in PROGRAMS {
        ready_in(kubectl, NAMESPACE, program, 1).await?;
    }
    logs(kubectl).await.context("after the installation")?;
    // The kubelet has made the folder, which is all that the pod has of the file system.
    let pins = cluster.testbed.bpffs().join("postern");
    let servers = fs::read_dir(&pins).with_context(|| format!("reading {}", pins.display()))?.count();
    ensure!(servers == 1, "{servers} servers have pinned programs in {}", pins.display());
    progress("the chart is installed");
    // The pod prints it, and is gone: with `--logs` Helm looks for it then.
    let tested = helm(cluster, &["test", "postern", "--timeout=120s"]).await?;
    ensure!(tested.contains("Succeeded") && tested.contains("1 nodes: 1 ok"), "helm test: {tested}");
    guides("helm upgrade", &[(GUIDES, of_its_own.as_str())]).await?;
    service_port(cluster).await?;
    let object = |kind: &str, name: &str| format!("/api/v1/namespaces/{NAMESPACE}/{kind}/{name}");
    let config = cluster.api.get(&object("configmaps", "tunnel-server-cfg")).await?;
    ensure!(config["data"] == json!({ "http-proxy-ports": "9100" }), "the ConfigMap has {}", config["data"]);

    // Values set by `kubectl edit` stay.
    let edited = json!({ "data": { "localhost-proxy-ports": "10266" } }).to_string();
    let patch = ["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &edited];
    kubectl.run(&patch).await?;
    let change = [
        "--set=tunnelledPorts.http={9100},tunnelledPorts.https={9443},server.nodeCondition=true",
        "--set=server.image.repository=localhost/postern/tunnel-server,server.extraEnv[0].name=NOTHING",
        "--set=server.extraVolumes[0].name=further,server.extraVolumes[0].emptyDir.medium=Memory",
        "--set=server.extraVolumeMounts[0].name=further,server.extraVolumeMounts[0].mountPath=/further",
        &format!("--set=test.node={EDGE_NODE}"),
    ];
    let upgrade = ["upgrade", "postern", chart, &values, "--wait", "--timeout=120s"];
    helm(cluster, &[&upgrade[..], &change].concat()).await?;
    for (program, _) in PROGRAMS {
        ready_in(kubectl, NAMESPACE, program, 1).await?;
    }
    logs(kubectl).await.context("after the upgrade")?;
    service_has_port(cluster, NAMESPACE).await?;
    service_port(cluster).await?;
    let config = cluster.api.get(&object("configmaps", "tunnel-server-cfg")).await?;
    let expected =
        json!({ "http-proxy-ports": "9100", "https-proxy-ports": "9443", "localhost-proxy-ports": "10266" });
    ensure!(config["data"] == expected, "the ConfigMap has {}", config["data"]);
    let node = format!("/api/v1/nodes/{EDGE_NODE}");
    let up = |node: &Value| postern_testbed::cluster::api::is_true(node, "PosternTunnel");
    cluster.api.wait("the condition that was asked for", &node, PATIENCE, up).await?;
    // A second upgrade must change nothing: the server's own ports of the internal Service stay.
    helm(cluster, &[&upgrade[..], &change].concat()).await?;
    service_has_port(cluster, NAMESPACE).await?;
    // Nothing listens at port 9443 of the node.
    let failed = helm(cluster, &["test", "postern", "--timeout=120s"]).await.err();
    let failed = failed.map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(failed.contains("#port-not-reached"), "helm test of a node: {failed:?}");
    progress("the chart is upgraded");

    reused(cluster, chart, &values).await?;
    for (program, _) in PROGRAMS {
        ready_in(kubectl, NAMESPACE, program, 1).await?;
    }
    // Removes the pod of the test that failed.
    helm(cluster, &["test", "postern", "--timeout=120s"]).await?;
    helm(cluster, &["rollback", "postern", "1", "--wait", "--timeout=120s"]).await?;
    for (program, _) in PROGRAMS {
        ready_in(kubectl, NAMESPACE, program, 1).await?;
    }
    logs(kubectl).await.context("after the rollback")?;

    guides("helm uninstall", &[(GUIDES, of_its_own.as_str())]).await?;
    nothing_is_left(cluster).await?;
    let secret = ["get", "secret", "tunnel-server-ca", "--namespace", NAMESPACE, "--output=name"];
    ensure!(kubectl.run(&secret).await?.contains("tunnel-server-ca"), "helm has removed the CA");
    progress("the chart is removed; the CA is kept");
    Ok(())
}

/// `--reuse-values` leaves out the defaults of values that a chart has and the one before had not: Helm names them, and the
/// documented flag has them.
async fn reused(cluster: &Cluster<'_>, chart: &str, values: &str) -> Result<()> {
    let older = cluster.testbed.dir().join("older");
    let copied =
        Command::new("cp").args(["-r", chart]).arg(&older).output().await.context("copying the chart")?;
    ensure!(copied.status.success(), "{}", said(&copied));
    fs::remove_file(older.join("templates/test.yaml")).context("the template of what is new")?;
    let file = older.join("values.yaml");
    let text_of = fs::read_to_string(&file).context("the values")?;
    let mut defaults: Value = serde_saphyr::from_str(&text_of).context("the values")?;
    let removed = defaults.as_object_mut().and_then(|values| values.remove("test"));
    ensure!(removed.is_some(), "the chart has no value test");
    fs::write(&file, defaults.to_string()).context("writing the older values")?;
    fs::remove_file(older.join("values.schema.json")).context("the schema, which requires what is new")?;
    helm(cluster, &["upgrade", "postern", text(&older)?, "--reset-values", values]).await?;
    let refused = helm(cluster, &["upgrade", "postern", chart, "--reuse-values"]).await;
    let refused = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("missing property 'test'"), "--reuse-values: {refused:?}");
    helm(cluster, &["upgrade", "postern", chart, "--reset-then-reuse-values"]).await.map(drop)
}

/// The Service has the configured node port.
async fn service_port(cluster: &Cluster<'_>) -> Result<()> {
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-svc");
    let service = cluster.api.get(&service).await?;
    ensure!(service["spec"]["ports"][0]["nodePort"] == 31008, "the Service has {}", service["spec"]["ports"]);
    Ok(())
}

/// Fails if an object of the manifests or a pod is left.
pub(super) async fn nothing_is_left(cluster: &Cluster<'_>) -> Result<()> {
    let kinds = "daemonsets,pods,services,configmaps,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings";
    let selector = "--selector=app.kubernetes.io/part-of=postern";
    postern_testbed::wait::wait_until(
        "the removal of every object",
        PATIENCE,
        async || cluster.kubectl.run(&["get", kinds, "--all-namespaces", selector, "--output=name"]).await,
        |left: &String| left.trim().is_empty(),
    )
    .await
    .map(drop)
}

async fn helm(cluster: &Cluster<'_>, args: &[&str]) -> Result<String> {
    let (_, kubeconfig) = cluster.kubectl.files();
    let home = cluster.testbed.dir().join("helm");
    let mut command = Command::new(peers::helm()?);
    command.args(args).args(["--namespace", NAMESPACE]).env("KUBECONFIG", kubeconfig).env("HOME", home);
    let output = timeout(LIMIT, command.kill_on_drop(true).output()).await;
    let output = output.with_context(|| format!("helm {args:?} took more than {LIMIT:?}"))?;
    let output = output.context("running helm")?;
    if !output.status.success() {
        bail!("helm {} ended with {}: {}", args.join(" "), output.status, said(&output));
    }
    Ok(said(&output))
}

//! Prometheus in the cluster with the shipped configuration: kubernetes_sd, the kubelets' certificates verified.
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::host::Host;
use super::names::{CLOUD_NODE, KUBERNETES_SERVICE};
use super::peers;
use super::postern::NAMESPACE;
use super::running::Cluster;
use crate::process::Process;
use crate::prometheus;

/// The shipped configuration.
const CONFIGURATION: &str = include_str!("../../../../deploy/prometheus/prometheus.yml");
/// The shipped alerts, which the configuration refers to.
const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");
/// Path of Postern's CA in that configuration.
const AUTHORITY: &str = "/etc/postern/ca.crt";
/// Path of the token for the servers in that configuration.
const TOKEN: &str = "/etc/postern/token";
const ACCOUNT: &str = "prometheus-postern";
/// A job for the same metrics of a server that is a process of the cloud host, which kubernetes_sd does not find.
const PROCESS: &str = "
  - job_name: tunnel-server-process
    static_configs:
      - targets: ['127.0.0.1:10265']
        labels: { job: tunnel-server }
";
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/prometheus");

/// Starts node exporters on every host and Prometheus on the cloud host, with the shipped configuration and rights. The
/// server is a process.
pub async fn start(cluster: &Cluster<'_>) -> Result<Vec<Process>> {
    let configuration = format!("{CONFIGURATION}{PROCESS}");
    start_with(cluster, &configuration, &cluster.pki.file("ca.crt")).await
}

/// As [`start`], for servers that are pods. `authority`: Postern's CA.
pub async fn start_for_pods(cluster: &Cluster<'_>, authority: &Path) -> Result<Vec<Process>> {
    start_with(cluster, CONFIGURATION, authority).await
}

async fn start_with(cluster: &Cluster<'_>, configuration: &str, authority: &Path) -> Result<Vec<Process>> {
    let mut running = start_exporters(cluster)?;
    cluster.kubectl.run(&["apply", "-k", FOLDER]).await?;
    // As the comments in the configuration say.
    let ports =
        json!({ "data": { "http-proxy-ports": "9100", "localhost-proxy-ports": "10266" } }).to_string();
    let patch = ["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &ports];
    cluster.kubectl.run(&patch).await?;
    let host = cluster.host(CLOUD_NODE)?;
    give_credentials(cluster, host).await?;
    for path in [AUTHORITY, TOKEN] {
        ensure!(configuration.contains(path), "the configuration names no {path}");
    }
    // As the kubelet projects it into a pod.
    let ours = ["create", "token", ACCOUNT, "--namespace", NAMESPACE, "--audience=postern.internal"];
    let token = cluster.testbed.dir().join("prometheus-token");
    std::fs::write(&token, cluster.kubectl.run(&ours).await?.trim()).context("writing the token")?;
    let often = configuration
        .replace(AUTHORITY, &authority.display().to_string())
        .replace(TOKEN, &token.display().to_string())
        // Not more often: a scrape's timeout is at most its interval, and a busy machine needs seconds for one.
        .replace("scrape_interval: 30s", "scrape_interval: 10s");
    std::fs::write(cluster.testbed.dir().join("alerts.yml"), ALERTS).context("writing the alerts")?;
    let mut command = host.command(&peers::prometheus()?);
    // As in a pod.
    command.env("KUBERNETES_SERVICE_HOST", KUBERNETES_SERVICE).env("KUBERNETES_SERVICE_PORT", "443");
    running.push(prometheus::start_as(cluster.testbed, command, &often)?);
    Ok(running)
}

/// Puts a token of its ServiceAccount and the cluster's CA at the paths that they have in a pod; /run is the host's
/// own.
async fn give_credentials(cluster: &Cluster<'_>, host: &Host) -> Result<()> {
    let token = ["create", "token", ACCOUNT, "--namespace", NAMESPACE];
    let token = cluster.kubectl.run(&token).await?;
    let authority = std::fs::read_to_string(cluster.pki.file("ca.crt")).context("reading the CA")?;
    for (name, text) in [("token", token.trim()), ("ca.crt", &authority)] {
        let folder = "/var/run/secrets/kubernetes.io/serviceaccount";
        let mut command = tokio::process::Command::from(host.command(Path::new("sh")));
        command.args(["-c", r#"mkdir -p "$0" && cat > "$0/$1""#, folder, name]).stdin(Stdio::piped());
        let mut child = command.spawn().context("starting sh")?;
        child.stdin.take().context("no input")?.write_all(text.as_bytes()).await.context("writing")?;
        let status = child.wait().await.context("waiting for sh")?;
        ensure!(status.success(), "writing {folder}/{name} ended with {status}");
    }
    Ok(())
}

/// Starts a node exporter on every host.
fn start_exporters(cluster: &Cluster<'_>) -> Result<Vec<Process>> {
    let start = |host: &Host| {
        let mut command = host.command(Path::new("prometheus-node-exporter"));
        command.arg("--log.level=warn").arg(format!("--web.listen-address={}:9100", host.spec.address));
        Process::spawn(cluster.testbed.dir(), &format!("node-exporter-{}", host.spec.name), command)
    };
    cluster.hosts.iter().map(start).collect()
}

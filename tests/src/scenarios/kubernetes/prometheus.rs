//! Prometheus with the shipped configuration: kubernetes_sd, each node by its own address, the kubelets' certificates
//! verified. Nothing in that configuration knows of a tunnel.
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::checks::Checks;
use crate::cluster::host::Host;
use crate::cluster::postern::NAMESPACE;
use crate::cluster::{CLOUD_NODE, Cluster, KUBERNETES_SERVICE, peers};
use crate::prometheus::{self, query};
use crate::testbed::process::Process;
use crate::wait::wait_until;

const PATIENCE: Duration = Duration::from_secs(60);
const CONFIGURATION: &str = include_str!("../../../../deploy/prometheus/prometheus.yml");
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/prometheus");

pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>) {
    checks.run("Prometheus scrapes every node by its own address", scrapes(cluster)).await;
}

async fn scrapes(cluster: &Cluster<'_>) -> Result<()> {
    let (_exporters, _prometheus) = start(cluster).await?;
    let nodes = cluster.hosts.len();
    // kubelet, cadvisor and node exporter of every node, the agents of all but the cloud's, and the server.
    let targets = 3 * nodes + (nodes - 1) + 1;
    let found = wait_until(&format!("{targets} targets to be up"), PATIENCE, prometheus::targets, |found| {
        found.len() == targets && found.iter().all(|target| target.health == "up")
    })
    .await?;
    for host in &cluster.hosts {
        let (name, address) = (&host.spec.name, host.spec.address);
        for (job, url) in [
            ("kubelet", format!("https://{address}:10250/metrics")),
            ("cadvisor", format!("https://{address}:10250/metrics/cadvisor")),
            ("node-exporter", format!("http://{address}:9100/metrics")),
        ] {
            let its = found.iter().any(|target| target.job == job && target.url == url);
            ensure!(its, "{job} of {name} is not scraped at {url}: {found:?}");
        }
        // The figures are the node's own.
        let uname = query(&format!("node_uname_info{{node=\"{name}\"}}")).await?;
        let uname = uname.first().context("no node_uname_info")?;
        ensure!(uname.label("nodename") == name, "{name} was answered by {:?}", uname.label("nodename"));
        let kubelet = query(&format!("kubelet_node_name{{node=\"{name}\"}}")).await?;
        let kubelet = kubelet.first().context("no kubelet_node_name")?;
        // The target's label of that name comes first; the kubelet's own is this one.
        let own = kubelet.label("exported_node");
        ensure!(own == name, "{name} was answered by {own:?}");
    }
    let pods = query("container_memory_usage_bytes{pod=\"talker\"}").await?;
    ensure!(!pods.is_empty(), "cadvisor's figures of the edge's pods are missing");
    Ok(())
}

/// Node exporters on every host and Prometheus on the cloud host, with the shipped configuration and rights.
pub(crate) async fn start(cluster: &Cluster<'_>) -> Result<(Vec<Process>, Process)> {
    let exporters = start_exporters(cluster)?;
    cluster.kubectl.run(&["apply", "-k", FOLDER]).await?;
    // What the configuration's comments ask for.
    let ports =
        json!({ "data": { "http-proxy-ports": "9100", "localhost-proxy-ports": "10266" } }).to_string();
    let patch = ["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &ports];
    cluster.kubectl.run(&patch).await?;
    let host = cluster.host(CLOUD_NODE)?;
    give_credentials(cluster, host).await?;
    let often = CONFIGURATION
        .replace("scrape_interval: 30s", "scrape_interval: 2s")
        .replace("scrape_timeout: 10s", "scrape_timeout: 2s");
    let mut command = host.command(&peers::prometheus()?);
    // As in a pod.
    command.env("KUBERNETES_SERVICE_HOST", KUBERNETES_SERVICE).env("KUBERNETES_SERVICE_PORT", "443");
    Ok((exporters, prometheus::start_as(cluster.testbed, command, &often)?))
}

/// A token of its ServiceAccount and the cluster's CA where a pod has them; /run is the host's own.
async fn give_credentials(cluster: &Cluster<'_>, host: &Host) -> Result<()> {
    let token = ["create", "token", "prometheus-postern", "--namespace", NAMESPACE];
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

/// A node exporter on every host.
fn start_exporters(cluster: &Cluster<'_>) -> Result<Vec<Process>> {
    let start = |host: &Host| {
        let mut command = host.command(Path::new("prometheus-node-exporter"));
        command.arg("--log.level=warn").arg(format!("--web.listen-address={}:9100", host.spec.address));
        Process::spawn(cluster.testbed, &format!("node-exporter-{}", host.spec.name), command)
    };
    cluster.hosts.iter().map(start).collect()
}

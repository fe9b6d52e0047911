//! Prometheus with the shipped configuration: kubernetes_sd, each node by its own address, the kubelets' certificates
//! verified. That configuration contains nothing about a tunnel.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::{Cluster, monitoring};
use postern_testbed::prometheus::{self, samples};
use postern_testbed::wait::wait_until;

use super::checks::Checks;

const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of the check, with the start of the programs.
const LIMIT: Duration = Duration::from_secs(180);

pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>) {
    let check = scrapes(cluster);
    checks.run_within(LIMIT, "Prometheus scrapes every node by its own address", check).await;
}

async fn scrapes(cluster: &Cluster<'_>) -> Result<()> {
    let _running = monitoring::start(cluster).await?;
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
        // The samples come from the node itself.
        let uname = samples(&format!("node_uname_info{{node=\"{name}\"}}")).await?;
        let uname = uname.first().context("no node_uname_info")?;
        ensure!(uname.label("nodename") == name, "{name} was answered by {:?}", uname.label("nodename"));
        let kubelet = samples(&format!("kubelet_node_name{{node=\"{name}\"}}")).await?;
        let kubelet = kubelet.first().context("no kubelet_node_name")?;
        // The target's label takes precedence over the kubelet's, which Prometheus renames.
        let own = kubelet.label("exported_node");
        ensure!(own == name, "{name} was answered by {own:?}");
    }
    samples("container_memory_usage_bytes{pod=\"talker\"}").await.context("cadvisor's of the edge's pods")?;
    Ok(())
}

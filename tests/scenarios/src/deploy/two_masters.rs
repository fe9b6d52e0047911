//! The shipped manifests and images on two masters: a rolling update of the servers without a failed connection.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::visit;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::process::Placement;
use postern_testbed::prometheus;
use postern_testbed::report::{figure, progress};
use postern_testbed::target::Behaviour;
use postern_testbed::visitors::Visitors;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CloudHost, NEIGHBOUR, Testbed};
use serde_json::json;

use super::{PATIENCE, archive, explained, logs, patches, plugin, ready, restart, running, text};
use crate::common::target;

const SECOND: &str = "cloud-2";
/// Port of an echo on the edge, beside the node exporter.
const ECHO: u16 = 9102;
/// New connections per second, over both masters.
const RATE: u32 = 200;
/// Minimum number of connections of each master's clients, however slow the machine.
const LEAST: usize = 500;
/// Number of Prometheus jobs, and the scrape interval of each in seconds.
const JOBS: u32 = 5;
/// Maximum number of scrapes that time out, of hundreds: one of each job, on a machine that stands still for as long.
const TIMEOUTS: f64 = JOBS as f64;

pub(super) async fn two_masters_are_updated(testbed: &Testbed) -> Result<()> {
    let second = testbed.add_cloud_host(SECOND, NEIGHBOUR)?;
    let mut cluster = Cluster::start(testbed).await?;
    cluster.join(SECOND, "control-plane", &second, "10.71.1.0/24").await?;
    for (program, node) in
        [("tunnel-server", CLOUD_NODE), ("tunnel-server", SECOND), ("tunnel-agent", EDGE_NODE)]
    {
        cluster.host_mut(node)?.import(&archive(program)?).await?;
    }
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    explained(&cluster, async |cluster: &Cluster<'_>| updated(cluster, &second).await).await
}

async fn updated(cluster: &Cluster<'_>, second: &CloudHost) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    // Started before the redirect, which would otherwise take this process's connections too.
    let echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let _exporter = prometheus::start_exporter(testbed, 1)?;
    install(cluster).await?;
    both_have_the_edge(kubectl).await?;
    logs(kubectl).await?;
    plugin::every_command(kubectl, 2).await?;
    let ports = json!({ "data": { "http-proxy-ports": format!("9100, {ECHO}") } }).to_string();
    kubectl
        .run(&["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &ports])
        .await?;
    wait_for("the ports to be redirected", PATIENCE, async || Ok(visit(echo.address).await.ok())).await?;
    let address = format!("{}:9100", testbed.edge(1).address);
    let _prometheus = prometheus::start(testbed, &scraped_each_second(&address))?;
    let up = format!("count(up == 1) == {JOBS}");
    let scraped = async || prometheus::query(&up).await;
    wait_until("every job of Prometheus to reach the edge", PATIENCE, scraped, |series| !series.is_empty())
        .await?;
    let second = Placement { ns: &second.ns, cgroup: &second.cgroup };
    let hosts = [(CLOUD_NODE, testbed.on_cloud()), (SECOND, second)];
    let visitors = Visitors::start(testbed, &hosts, echo.address, RATE, LEAST).await?;
    progress("both masters reach the edge; the update begins");

    let ((), visits) = visitors.alongside(restart(cluster, "tunnel-server", 2)).await?;
    for ((master, _), visits) in hosts.iter().zip(&visits) {
        let rate = visits.count as f64 / visits.seconds;
        figure(&format!("{master}: {} new connections, {rate:.0} a second, {}", visits.count, visits.times));
    }
    both_have_the_edge(kubectl).await?;
    let failed = number("sum(count_over_time(up[10m])) - sum(sum_over_time(up[10m]))").await?;
    // Those that took their whole time may have waited for a processor: each second counts in which the last scrape of a job
    // failed sooner.
    let sooner = format!("up == 0 and scrape_duration_seconds < {JOBS}");
    let seconds = number(&format!("sum(count_over_time(({sooner})[10m:1s])) or vector(0)")).await?;
    ensure!(seconds == 0.0, "{failed} scrapes failed, and not by a timeout for {seconds} s");
    // Connections that are dead for longer would time out again and again.
    ensure!(failed <= TIMEOUTS, "{failed} scrapes timed out");
    figure(&format!("{failed} scrapes timed out"));
    Ok(())
}

/// Returns the number that a query of Prometheus gives.
async fn number(query: &str) -> Result<f64> {
    let series = prometheus::samples(query).await?;
    Ok(series.first().with_context(|| format!("no series of {query}"))?.number())
}

/// Returns a configuration for one scrape a second. A scrape's timeout is its interval, and a busy machine may need
/// more than a second for one, so several jobs take turns.
fn scraped_each_second(address: &str) -> String {
    let jobs = (0..JOBS)
        .map(|job| format!("- job_name: edge-{job}\n  static_configs: [{{targets: ['{address}']}}]\n"));
    format!("global: {{scrape_interval: {JOBS}s}}\nscrape_configs:\n{}", jobs.collect::<String>())
}

/// Installs the base on hosts that share one machine: each has its own cgroup and folder in the BPF file system.
async fn install(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    let cgroups = testbed.cloud_cgroup.path().parent().context("the cloud's cgroup has no parent")?;
    let cgroup = format!("{}/$(NODE_NAME)", cgroups.display());
    let folder = patches::of(
        "tunnel-server",
        &json!([
            { "op": "add", "path": "/spec/template/spec/containers/0/volumeMounts/2/subPathExpr", "value": "$(NODE_NAME)" },
        ]),
    );
    let dir = patches::overlay_in(testbed, "base", &[], &cgroup, vec![folder])?;
    kubectl.run(&["apply", "-k", text(&dir)?]).await?;
    ready(kubectl, "tunnel-server", 2).await?;
    ready(kubectl, "tunnel-agent", 1).await
}

/// Waits until each of the two servers has a session with the edge node.
async fn both_have_the_edge(kubectl: &Kubectl) -> Result<()> {
    let sessions = async || {
        let mut sessions = Vec::new();
        for pod in running(kubectl, "tunnel-server").await? {
            let status =
                ["exec", "--namespace", NAMESPACE, &pod, "--", "/tunnel-server", "status", "--output=json"];
            // A terminating pod may be gone meanwhile.
            let Ok(status) = kubectl.run(&status).await else { continue };
            let status: serde_json::Value = serde_json::from_str(&status)?;
            sessions.push(status["nodes"].as_array().is_some_and(|nodes| {
                nodes.iter().any(|node| node["name"] == EDGE_NODE && node["connected"] == true)
            }));
        }
        Ok(sessions)
    };
    wait_until("a session at each master", PATIENCE, sessions, |sessions| sessions == &[true, true])
        .await
        .map(drop)
}

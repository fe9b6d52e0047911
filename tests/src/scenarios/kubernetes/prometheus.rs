//! Prometheus, configured as for nodes that can be reached directly: kubernetes_sd, each node by its own address, the
//! kubelets' certificates verified.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::checks::Checks;
use crate::cluster::postern::NAMESPACE;
use crate::cluster::{Cluster, KUBERNETES_SERVICE};
use crate::prometheus::{self, query};
use crate::testbed::process::Process;
use crate::wait::wait_until;

const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>) {
    checks.run("Prometheus scrapes every node by its own address", scrapes(cluster)).await;
}

async fn scrapes(cluster: &Cluster<'_>) -> Result<()> {
    let _exporters = start_exporters(cluster)?;
    tunnel_exporters(cluster).await?;
    let configuration = configuration(cluster).await?;
    let _prometheus = prometheus::start(cluster.testbed, &configuration)?;
    let jobs = ["kubelet", "cadvisor", "node-exporter"];
    let targets = jobs.len() * cluster.hosts.len();
    wait_until(
        &format!("{targets} targets to be up"),
        PATIENCE,
        async || query("up").await,
        |series| series.len() == targets && series.iter().all(|one| one.number() == 1.0),
    )
    .await?;
    for host in &cluster.hosts {
        let name = &host.spec.name;
        for (job, port) in jobs.into_iter().zip([10250, 10250, 9100]) {
            let instance = format!("{}:{port}", host.spec.address);
            let up = query(&format!("up{{job=\"{job}\",instance=\"{instance}\"}}")).await?;
            ensure!(up.len() == 1, "{job} of {name} is not scraped at {instance}");
        }
        // The figures are the node's own.
        let uname = query(&format!("node_uname_info{{instance=\"{}:9100\"}}", host.spec.address)).await?;
        let uname = uname.first().context("no node_uname_info")?;
        ensure!(uname.label("nodename") == name, "{name} was answered by {:?}", uname.label("nodename"));
        let kubelet =
            query(&format!("kubelet_node_name{{instance=\"{}:10250\"}}", host.spec.address)).await?;
        let kubelet = kubelet.first().context("no kubelet_node_name")?;
        ensure!(kubelet.label("node") == name, "{name} was answered by {:?}", kubelet.label("node"));
    }
    let pods = query("container_memory_usage_bytes{pod=\"talker\"}").await?;
    ensure!(!pods.is_empty(), "cadvisor's figures of the edge's pods are missing");
    Ok(())
}

/// A node exporter on every host.
fn start_exporters(cluster: &Cluster<'_>) -> Result<Vec<Process>> {
    let start = |host: &crate::cluster::host::Host| {
        let mut command = host.command(Path::new("prometheus-node-exporter"));
        command.arg("--log.level=warn").arg(format!("--web.listen-address={}:9100", host.spec.address));
        Process::spawn(cluster.testbed, &format!("node-exporter-{}", host.spec.name), command)
    };
    cluster.hosts.iter().map(start).collect()
}

/// What an administrator does for a port that is not the kubelet's.
async fn tunnel_exporters(cluster: &Cluster<'_>) -> Result<()> {
    let change = json!({ "data": { "http-proxy-ports": "9100" } }).to_string();
    let args = ["patch", "configmap", "tunnel-server-cfg", "--namespace", NAMESPACE, "--patch", &change];
    cluster.kubectl.run(&args).await?;
    Ok(())
}

async fn configuration(cluster: &Cluster<'_>) -> Result<String> {
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "prometheus", "namespace": "default" } },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": { "name": "prometheus" },
            "rules": [
                { "apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"] },
                { "apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"] },
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": { "name": "prometheus" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "prometheus" },
            "subjects": [{ "kind": "ServiceAccount", "name": "prometheus", "namespace": "default" }],
        },
    ]});
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], objects.to_string().as_bytes()).await?;
    let token = cluster.kubectl.run(&["create", "token", "prometheus"]).await?;
    let file = cluster.testbed.dir().join("prometheus-token");
    std::fs::write(&file, token.trim()).context("writing Prometheus' token")?;
    let (token, authority) = (file.display().to_string(), cluster.pki.file("ca.crt").display().to_string());
    let nodes = json!([{
        "role": "node",
        "api_server": format!("https://{KUBERNETES_SERVICE}"),
        "authorization": { "credentials_file": token },
        "tls_config": { "ca_file": authority },
    }]);
    let kubelet = |job: &str, path: &str| {
        json!({
            "job_name": job,
            "scheme": "https",
            "metrics_path": path,
            "authorization": { "credentials_file": token },
            "tls_config": { "ca_file": authority },
            "kubernetes_sd_configs": nodes,
            "relabel_configs": [{ "source_labels": ["__address__"], "target_label": "instance" }],
        })
    };
    // JSON is YAML too.
    let text = json!({
        "global": { "scrape_interval": "2s", "scrape_timeout": "2s" },
        "scrape_configs": [
            kubelet("kubelet", "/metrics"),
            kubelet("cadvisor", "/metrics/cadvisor"),
            {
                "job_name": "node-exporter",
                "kubernetes_sd_configs": nodes,
                "relabel_configs": [
                    { "source_labels": ["__address__"], "regex": "(.*):10250", "target_label": "__address__", "replacement": "$1:9100" },
                    { "source_labels": ["__address__"], "target_label": "instance" },
                ],
            },
        ],
    });
    Ok(text.to_string())
}

//! A cloud host that is not a master, with a redirector as in the overlay `everywhere`.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::manifests::Manifests;
use postern_testbed::cluster::pods::{self, IDLE, TALK, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{Cluster, EDGE_NODE, postern};
use postern_testbed::process::{Placement, Process};
use postern_testbed::prometheus;
use postern_testbed::server::{Builder, Server};
use postern_testbed::wait::wait_until;
use postern_testbed::{CloudHost, NEIGHBOUR, Testbed};
use serde_json::{Value, json};

use super::checks::Checks;
use crate::rights;
use crate::web::{Answer, curl};

pub(crate) const WORKER: &str = "cloud-2";
const SCRAPED: Duration = Duration::from_secs(40);

pub(super) async fn redirector(testbed: &Testbed) -> Result<()> {
    let worker = testbed.add_cloud_host("worker", NEIGHBOUR)?;
    let mut cluster = Cluster::start(testbed).await?;
    cluster.join(WORKER, "worker", &worker, "10.71.1.0/24").await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK), shell("worker-idle", WORKER, IDLE)]).await?;
    let components = ["metrics", "everywhere-metrics"];
    let manifests = postern::install_with(&cluster, "overlays/everywhere", &components).await?;
    let server = postern::server(&cluster, &manifests).await?.start().await?;
    let _agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    let kubelet = format!("http://{}:10255", testbed.edge(1).address);

    let mut checks = Checks::new();
    let before = async {
        let Err(error) = fetch(&worker, &format!("{kubelet}/healthz")) else { bail!("the edge was reached") };
        ensure!(format!("{error:#}").contains("timed out"), "{error:#}");
        Ok(())
    };
    checks.run("without a redirector the host does not reach the edge", before).await;
    let redirector = start(&cluster, &manifests, &worker).await?;
    checks.run("its certificate came by a request of its own", requested(&cluster)).await;
    checks
        .run("programs and pods of the host reach the edge", reached(&cluster, &worker, &server, &kubelet))
        .await;
    checks.run("Prometheus on the host scrapes the edge", scraped(testbed, &worker)).await;
    checks.run("it shows its metrics to whom the cluster permits it", metrics(&cluster)).await;
    let cloud = async {
        let status = redirector.status().await?;
        ensure!(status["role"] == "redirector" && status["redirect"]["routes_down"] == 0, "{status}");
        Ok(())
    };
    checks.run("its status says what it is", cloud).await;
    let used = rights::of_components(&cluster, "kubernetes::redirector");
    checks.run("each right of the components is used", used).await;
    checks.finish()
}

/// Starts it as its DaemonSet does, with a token of its ServiceAccount that is bound to a pod of the host.
pub(super) async fn start<'a>(
    cluster: &Cluster<'a>,
    manifests: &Manifests,
    worker: &'a CloudHost,
) -> Result<Server<'a>> {
    let mut pod = shell("tunnel-redirector", WORKER, IDLE);
    pod["spec"]["serviceAccountName"] = json!("tunnel-redirector");
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    let pod = cluster.api.create(&path, &pod).await?;
    let uid = pod["metadata"]["uid"].as_str().context("the pod's uid")?;
    let token = ["create", "token", "tunnel-redirector", "--namespace", NAMESPACE, "--duration=2h"];
    let bound =
        ["--bound-object-kind=Pod", "--bound-object-name=tunnel-redirector", "--bound-object-uid", uid];
    let token = cluster.kubectl.run(&[&token[..], &bound[..]].concat()).await?;
    let kubeconfig = cluster.pki.kubeconfig_with_token("tunnel-redirector", &cluster.server, token.trim())?;
    let builder = Builder::in_cluster_on(cluster.testbed, worker, "redirector", kubeconfig);
    // Its state is in the run's folder.
    let arguments = manifests.arguments("tunnel-redirector")?.into_iter();
    let arguments = arguments.filter(|argument| !argument.starts_with("--state-dir"));
    arguments.fold(builder, Builder::flag).flag(format!("--node-name={WORKER}")).start().await
}

/// Fetches a URL from a program on the host.
pub(crate) fn fetch(host: &CloudHost, url: &str) -> Result<String> {
    let place = Placement { ns: &host.ns, cgroup: &host.cgroup };
    let mut command = place.command(Path::new("curl"));
    command.args(["--silent", "--show-error", "--fail", "--noproxy", "*", "--max-time", "3", url]);
    let output = command.output().context("running curl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "curl {url} ended with {}: {said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn requested(cluster: &Cluster<'_>) -> Result<()> {
    let list = cluster.api.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").await?;
    let user = format!("system:serviceaccount:{NAMESPACE}:tunnel-redirector");
    let requests = list["items"].as_array().context("no list")?;
    let own = requests.iter().find(|request| request["spec"]["username"] == user.as_str());
    let own = own.with_context(|| format!("no request of {user} among {}", requests.len()))?;
    ensure!(own["status"]["conditions"][0]["type"] == "Approved", "{own}");
    Ok(())
}

async fn reached(
    cluster: &Cluster<'_>,
    worker: &CloudHost,
    server: &Server<'_>,
    kubelet: &str,
) -> Result<()> {
    let url = format!("{kubelet}/healthz");
    // It is ready once linked to a server, and only then learns that server's nodes.
    let fetched = async || fetch(worker, &url);
    wait_until("the kubelet to answer a program", SCRAPED, fetched, |answer| answer == "ok").await?;
    let of_redirector = |line: &postern_testbed::access_log::AccessLine| {
        line.text("listener") == "peer"
            && line.text("via") == format!("redirector of {WORKER}")
            && line.text("node") == EDGE_NODE
    };
    server.wait_access("of the redirector", of_redirector).await?;
    let printed = cluster.kubectl.run(&["exec", "worker-idle", "--", "wget", "-q", "-O-", &url]).await?;
    ensure!(printed == "ok", "a pod was answered {printed:?}");
    Ok(())
}

/// Reads its metrics from another host, with the rights of the component.
async fn metrics(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    for account in ["reader", "nobody"] {
        kubectl.run(&["create", "serviceaccount", account]).await?;
    }
    let role = ["--clusterrole=postern:metrics-reader", "--serviceaccount=default:reader"];
    kubectl.run(&[&["create", "clusterrolebinding", "reader"][..], &role].concat()).await?;
    let url = format!("https://{NEIGHBOUR}:10269/metrics");
    let ask = async |account: &str| {
        let token = kubectl.run(&["create", "token", account]).await?;
        let header = format!("Authorization: Bearer {}", token.trim());
        curl(cluster.testbed, &["--insecure", "--header", &header, &url]).await
    };
    // The authoriser may learn of the binding a moment later, and a denial is cached for 5 s.
    let reader = async || ask("reader").await;
    let may_read = |answer: &Answer| answer.status != 403;
    let answer = wait_until("the reader to be let in", SCRAPED, reader, may_read).await?;
    answer.expect(200, "postern_role{role=\"redirector\"} 1")?;
    let refused = "system:serviceaccount:default:nobody cannot get the nonResourceURL /metrics";
    ask("nobody").await?.expect(403, refused)
}

/// Runs a real Prometheus there, with the node's own address as its target.
async fn scraped(testbed: &Testbed, worker: &CloudHost) -> Result<()> {
    let target = format!("{}:10255", testbed.edge(1).address);
    let configuration = json!({
        "global": { "scrape_interval": "1s", "scrape_timeout": "1s" },
        "scrape_configs": [{ "job_name": "kubelet", "static_configs": [{ "targets": [target] }] }],
    });
    let place = Placement { ns: &worker.ns, cgroup: &worker.cgroup };
    let command = place.command(Path::new("prometheus"));
    // JSON is YAML too.
    let _running: Process = prometheus::start_as(testbed, command, &configuration.to_string())?;
    let samples = async || {
        let query = "http://127.0.0.1:9090/api/v1/query?query=kubelet_node_name";
        let answer: Value = serde_json::from_str(&fetch(worker, query)?).context("Prometheus' answer")?;
        Ok(answer["data"]["result"][0]["metric"]["node"].as_str().unwrap_or_default().to_owned())
    };
    wait_until("a sample of the edge's kubelet", SCRAPED, samples, |node| node == EDGE_NODE).await.map(drop)
}

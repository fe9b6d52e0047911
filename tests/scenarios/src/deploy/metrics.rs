//! The servers' metrics as the shipped component exposes them, for accounts with the right to read them and for the
//! shipped Prometheus; and a redirector on a host that is not a master, for a Prometheus there.
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::monitoring;
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::prometheus::{self, ScrapeTarget};
use postern_testbed::report::progress;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, CloudHost, NEIGHBOUR, Testbed};
use serde_json::Value;

use super::guide::PROMETHEUS;
use super::{DOCUMENT, PATIENCE, archive, explained, follow, import, overlay_with, patches, ready, text};
use crate::kubernetes::redirector::{WORKER, fetch};
use crate::rights;
use crate::web::{Answer, curl};

const METRIC: &str = "postern_build_info{";

pub(super) async fn prometheus_reads_servers(testbed: &Testbed) -> Result<()> {
    let worker = testbed.add_cloud_host(WORKER, NEIGHBOUR)?;
    let mut cluster = Cluster::start(testbed).await?;
    cluster.join(WORKER, "worker", &worker, "10.71.1.0/24").await?;
    cluster.host_mut(WORKER)?.import(&archive("tunnel-server")?).await?;
    import(&mut cluster).await?;
    explained(&cluster, async |cluster: &Cluster<'_>| read(cluster, &worker).await).await
}

async fn read(cluster: &Cluster<'_>, worker: &CloudHost) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    let cgroup = worker.cgroup.path().display().to_string();
    let redirectors = patches::redirects("tunnel-redirector", testbed, &cgroup)?;
    let overlay = overlay_with(testbed, "overlays/everywhere", &["metrics"], vec![redirectors])?;
    kubectl.run(&["apply", "-k", text(&overlay)?]).await?;
    ready(kubectl, "tunnel-server", 1).await?;
    ready(kubectl, "tunnel-agent", 1).await?;
    ready(kubectl, "tunnel-redirector", 1).await?;
    // The worker has no other way through the edge's NAT.
    let url = format!("http://{}:10255/healthz", testbed.edge(1).address);
    let kubelet = async || fetch(worker, &url);
    let reached = wait_until("the worker to reach the edge", PATIENCE, kubelet, |answer| answer == "ok");
    reached.await?;
    progress("a redirector's pod serves a host that is not a master");

    let authority = authority(cluster).await?;
    let url = format!("https://{CLOUD}:10269/metrics");
    let ask = async |more: &[&str]| {
        curl(testbed, &[&["--cacert", text(&authority)?, &url][..], more].concat()).await
    };
    let with_token =
        async |token: &str| ask(&["--header", &format!("Authorization: Bearer {}", token.trim())]).await;
    // The reader is the account to which the guide gives the right.
    kubectl.run(&["create", "namespace", "monitoring"]).await?;
    kubectl.run(&["create", "serviceaccount", "prometheus", "--namespace=monitoring"]).await?;
    kubectl.run(&["create", "serviceaccount", "nobody"]).await?;
    follow::section(cluster, DOCUMENT, PROMETHEUS, &[]).await?;
    let reader = kubectl.run(&["create", "token", "prometheus", "--namespace=monitoring"]).await?;
    let nobody = kubectl.run(&["create", "token", "nobody"]).await?;

    // The authoriser may learn of the binding a moment later, and a denial is cached for 5 s.
    let answered = async || with_token(&reader).await;
    let answer =
        wait_until("the reader to be let in", PATIENCE, answered, |answer: &Answer| answer.status != 403);
    answer.await?.expect(200, METRIC)?;
    let refused = "system:serviceaccount:default:nobody cannot get the nonResourceURL /metrics";
    with_token(&nobody).await?.expect(403, refused)?;
    with_token("nonsense").await?.expect(401, "the API server does not accept the bearer token")?;
    ask(&[]).await?.expect(401, "a client certificate or a bearer token is needed")?;
    progress("the API server says whose token it is, and who may read");

    // Certificates of the CA that kube-apiserver accepts, which the server learns from the cluster.
    for (user, groups, status, part) in
        [("root", &["system:masters"][..], 200, METRIC), ("carol", &[][..], 403, "carol cannot get")]
    {
        let pair = cluster.pki.client(user, user, groups)?;
        let (certificate, key) = (text(&pair.certificate)?, text(&pair.key)?);
        // The server may not have read that CA yet; until then it requests no certificate.
        let answered = async || ask(&["--cert", certificate, "--key", key]).await;
        let known = |answer: &Answer| answer.status != 401;
        let answer = wait_until("the certificate to be asked for", PATIENCE, answered, known).await?;
        answer.expect(status, part)?;
    }
    progress("a certificate shows who it is as well");

    let _running = monitoring::start_for_pods(cluster, &authority).await?;
    let of_servers = |found: &Vec<ScrapeTarget>| -> Vec<ScrapeTarget> {
        found.iter().filter(|target| target.job == "tunnel-server").cloned().collect()
    };
    let found = wait_until("the server to be up in Prometheus", PATIENCE, prometheus::targets, |found| {
        of_servers(found).iter().any(|target| target.health == "up")
    });
    let found = of_servers(&found.await?);
    ensure!(found.len() == 1 && found[0].url == url, "the job's targets are {found:?}");
    let role = prometheus::samples("postern_role{job=\"tunnel-server\"}").await?;
    let role = role.first().context("no role")?;
    ensure!(role.label("role") == "server" && !role.label("node").is_empty(), "{role:?}");
    progress("the shipped Prometheus finds the pod by its label and reads its metrics");

    // Prometheus' credential for redirectors, whose certificates it cannot verify: a token that can only read metrics.
    let account = "prometheus-postern-metrics";
    let answered = async || with_token(&secret(cluster, account, "token").await?).await;
    let read = wait_until("the Secret's token to read metrics", PATIENCE, answered, |answer: &Answer| {
        answer.status == 200
    });
    read.await?.expect(200, METRIC)?;
    let subject = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
    for right in [&["list", "nodes"][..], &["get", "nodes", "--subresource=metrics"], &["list", "pods"]] {
        let asked = [&["auth", "can-i", &subject, "--namespace", NAMESPACE][..], right].concat();
        let may = kubectl.output(&asked).await?;
        ensure!(String::from_utf8_lossy(&may.stdout).trim() == "no", "{right:?}: {}", said(&may));
    }

    rights::of_components(cluster, "deploy::prometheus_reads_servers").await?;
    doctor_misses_rights(cluster).await
}

async fn doctor_misses_rights(cluster: &Cluster<'_>) -> Result<()> {
    let state = |check: &Value| check["state"].as_str().unwrap_or_default().to_owned();
    let check = checked(cluster).await?;
    ensure!(state(&check) == "ok", "{check:#}");
    cluster.kubectl.run(&["delete", "clusterrolebinding", "postern:tunnel-server-metrics"]).await?;
    let missed = wait_until(
        "doctor to miss the rights",
        PATIENCE,
        async || checked(cluster).await,
        |check| state(check) == "broken",
    );
    let missed = missed.await?;
    let found = &missed["findings"][0]["found"];
    ensure!(found == "may not create tokenreviews.authentication.k8s.io", "{missed:#}");
    progress("doctor says when the right to ask the API server is missing");
    Ok(())
}

/// Returns doctor's result, in the server's pod, for the rights that the listener needs.
async fn checked(cluster: &Cluster<'_>) -> Result<Value> {
    let command = ["/tunnel-server", "doctor", "-o", "json"];
    let server = ["exec", "--namespace", NAMESPACE, "daemonset/tunnel-server", "--"];
    // The exit code covers other checks too.
    let output = cluster.kubectl.output(&[&server[..], &command].concat()).await?;
    let report: Value = serde_json::from_slice(&output.stdout).with_context(|| said(&output))?;
    let mut checks = report["checks"].as_array().into_iter().flatten();
    let check = checks.find(|check| check["name"] == "metrics rights");
    check.cloned().with_context(|| format!("doctor does not check them: {report:#}"))
}

/// Fetches Postern's CA with the command of docs/tasks/callers.md.
async fn authority(cluster: &Cluster<'_>) -> Result<PathBuf> {
    let path = cluster.testbed.dir().join("postern-ca.crt");
    let pem = secret(cluster, "tunnel-server-ca", "ca.crt").await?;
    fs::write(&path, pem).with_context(|| path.display().to_string())?;
    Ok(path)
}

async fn secret(cluster: &Cluster<'_>, name: &str, key: &str) -> Result<String> {
    let template = format!("--output=go-template={{{{index .data \"{key}\" | base64decode}}}}");
    cluster.kubectl.run(&["get", "secret", name, "--namespace", NAMESPACE, &template]).await
}

//! The doors that ask the API server who a caller is, with the shipped components, rights and images.
use anyhow::{Result, ensure};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{Cluster, EDGE_NODE};
use postern_testbed::report::progress;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use serde_json::json;

use super::guide::CALLERS;
use super::{DOCUMENT, PATIENCE, follow, on_cluster, overlay_with, ready, text};
use crate::rights;
use crate::web::{Answer, Web, curl};

const POLICY: &str = "\
rules:
- name: scrapers
  from: [{serviceAccount: default/scraper}]
  to:
  - {node: edge-1, ports: [9100]}
  - {service: inside.default, ports: [80]}
";
/// What the Service's endpoint sends.
const BODY: u64 = 1000;
/// What may be done at kubelets, for the account that may.
const READER: &str = "nodes/proxy,nodes/metrics,nodes/log";

pub(super) async fn callers_are_asked_for(testbed: &Testbed) -> Result<()> {
    on_cluster(testbed, asked_for).await
}

async fn asked_for(cluster: &Cluster<'_>) -> Result<()> {
    let (kubectl, testbed) = (&cluster.kubectl, cluster.testbed);
    let metrics = Web::start(testbed, 1, 9100)?;
    install(cluster).await?;
    // The commands of the guide: Postern's CA in postern-ca.crt, and the servers' certificate for kubelets.
    follow::section(cluster, DOCUMENT, CALLERS, &[]).await?;
    for account in ["scraper", "reader"] {
        kubectl.run(&["create", "serviceaccount", account]).await?;
    }
    let resource = format!("--resource={READER}");
    kubectl.run(&["create", "clusterrole", "reader", "--verb=get", &resource]).await?;
    let subject = "--serviceaccount=default:reader";
    kubectl.run(&["create", "clusterrolebinding", "reader", "--clusterrole=reader", subject]).await?;
    let scraper = kubectl.run(&["create", "token", "scraper"]).await?;
    let reader = kubectl.run(&["create", "token", "reader"]).await?;

    kubelets(cluster, &reader, &scraper).await?;
    progress("the https door asks the API server who may reach kubelets");
    by_connect(cluster, &scraper, &reader).await?;
    progress("the connect door asks the API server whose a token is, and where a Service leads");
    ensure!(metrics.connections() > 0, "the exporter was not reached");
    rights::of_components(cluster, "deploy::callers_are_asked_for").await
}

async fn install(cluster: &Cluster<'_>) -> Result<()> {
    let policy = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "tunnel-server-policy", "namespace": NAMESPACE },
        "data": { "policy.yaml": POLICY },
    });
    let policy = json!({ "patch": policy.to_string() });
    let overlay =
        overlay_with(cluster.testbed, "base", &["https-callers", "connect", "edge-pods"], vec![policy])?;
    cluster.kubectl.run(&["apply", "-k", text(&overlay)?]).await?;
    ready(&cluster.kubectl, "tunnel-server", 1).await?;
    ready(&cluster.kubectl, "tunnel-agent", 1).await
}

/// By the https door: kubelets' paths, for whom the cluster's rules for nodes permit it.
async fn kubelets(cluster: &Cluster<'_>, reader: &str, scraper: &str) -> Result<()> {
    let testbed = cluster.testbed;
    let door = format!("https://{CLOUD}:10263");
    let ask = async |path: &str, host: Option<&str>, token: &str| {
        let (url, token) = (format!("{door}{path}"), format!("Authorization: Bearer {}", token.trim()));
        let ca = testbed.dir().join("postern-ca.crt");
        let host = host.map(|host| format!("Host: {host}"));
        let host = host.iter().flat_map(|host| ["-H", host]);
        let args: Vec<&str> = ["--cacert", text(&ca)?, "-H", &token, &url].into_iter().chain(host).collect();
        curl(testbed, &args).await
    };
    // The Secret reaches the pod within a minute.
    let edge = format!("{EDGE_NODE}:10250");
    let logs = "/containerLogs/default/talker/main?tailLines=1";
    let answered = async || ask(logs, None, reader).await;
    wait_until("a pod's log by the pod's name", 2 * PATIENCE, answered, |answer: &Answer| {
        answer.status == 200 && answer.body.starts_with("line ")
    })
    .await?;
    ask("/metrics/resource", Some(&edge), reader).await?.expect(200, "node_cpu_usage_seconds_total")?;
    ask("/metrics/resource", Some(&edge), scraper)
        .await?
        .expect(403, "system:serviceaccount:default:scraper")?;
    ask("/metrics/resource", Some(&edge), "nonsense").await?.expect(401, "")?;
    // Which pods there are, and where, is for those who may do this to all nodes.
    let refused = ask(logs, None, scraper).await?;
    refused.expect(403, "system:serviceaccount:default:scraper cannot get nodes/proxy of")?;
    let of_servers = "--selector=app.kubernetes.io/name=tunnel-server";
    let name = "--output=jsonpath={.items[0].metadata.name}";
    let on_cloud = cluster.kubectl.run(&["get", "pods", "--namespace", NAMESPACE, of_servers, name]).await?;
    for (pod, status, reason) in [
        (format!("{NAMESPACE}/{}", on_cloud.trim()), 400, "which is not an edge node"),
        ("default/missing".to_owned(), 404, "does not exist"),
    ] {
        let path = format!("/containerLogs/{pod}/main");
        ask(&path, None, reader).await?.expect(status, reason)?;
        let answer = ask(&path, None, scraper).await?;
        ensure!(
            (answer.status, &answer.body) == (refused.status, &refused.body),
            "{pod} is told apart from a pod at the edge: {answer:?} and {refused:?}"
        );
    }
    Ok(())
}

/// By the connect door: what the policy permits a token's account.
async fn by_connect(cluster: &Cluster<'_>, scraper: &str, reader: &str) -> Result<()> {
    let testbed = cluster.testbed;
    let _inside = inside(cluster).await?;
    let (proxy, ca) = (format!("https://{CLOUD}:10280"), testbed.dir().join("postern-ca.crt"));
    let ca = text(&ca)?;
    let ask = async |url: &str, token: &str| {
        let user = format!("any:{}", token.trim());
        curl(testbed, &["--proxytunnel", "-x", &proxy, "--proxy-cacert", ca, "-U", &user, "--verbose", url])
            .await
    };
    ask(&format!("http://{EDGE_NODE}:9100/metrics"), scraper).await?.expect(200, "GET /metrics")?;
    for (url, token, status) in [
        (format!("http://{EDGE_NODE}:9100/"), reader, " 403 "),
        (format!("http://{EDGE_NODE}:9101/"), scraper, " 403 "),
        (format!("http://{EDGE_NODE}:9100/"), "nonsense", " 407 "),
    ] {
        let answer = ask(&url, token).await?;
        ensure!(!answer.ok && answer.said.contains(status), "{url} for {token:.9}…: {answer:?}");
    }
    // It sends bytes without a head, as HTTP/0.9 did.
    let user = format!("any:{}", scraper.trim());
    let url = "http://inside.default:80/";
    let args = [
        "--proxytunnel",
        "-x",
        &proxy,
        "--proxy-cacert",
        ca,
        "-U",
        &user,
        "--http0.9",
        "--output",
        "/dev/null",
    ];
    let answer =
        curl(testbed, &[&args[..], &["--write-out", "%{size_download} bytes\n%{http_code}", url]].concat())
            .await?;
    ensure!(answer.ok && answer.body.contains(&format!("{BODY} bytes")), "the Service's answer: {answer:?}");
    Ok(())
}

/// A Service without a selector, whose endpoint is a program on the cloud host.
async fn inside(cluster: &Cluster<'_>) -> Result<Target> {
    let target = Target::start(&cluster.testbed.cloud, CLOUD, 8080, Behaviour::Source(1, BODY))?;
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "inside" },
        "spec": { "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }] },
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "inside", "labels": { "kubernetes.io/service-name": "inside" } },
        "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" }],
        "endpoints": [{ "addresses": [CLOUD], "conditions": { "ready": true } }],
    });
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [service, slice] });
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], list.to_string().as_bytes()).await?;
    Ok(target)
}

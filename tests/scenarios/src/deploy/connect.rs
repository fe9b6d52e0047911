//! The connect listeners: the servers', for callers with a token, and an agent's, for workloads of its node. Services
//! are reached by name, wherever their endpoints are.
use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use postern_testbed::CLOUD;
use postern_testbed::cluster::pods::{self, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{Cluster, EDGE_NODE, endpoints};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use serde_json::{Value, json};

use super::{PATIENCE, patches, text};
use crate::web::{Answer, curl, curl_on_edge};

const POLICY: &str = "\
rules:
- name: scrapers
  from: [{serviceAccount: default/scraper}]
  to:
  - {node: edge-1, ports: [9100]}
  - {service: inside.default, ports: [80]}
  - {service: exporter.default, ports: [80]}
  - {service: web.default, ports: [80]}
- name: workloads
  from: [{node: edge-1}]
  to:
  - {service: inside.default, ports: [80]}
";
/// Agent's connect listener on the edge node's loopback.
const AGENT: &str = "127.0.0.1:10281";
/// Answer of the Service in the cloud.
const INSIDE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\nfrom the cloud\n";

/// Returns the policy and the patch for the agents' connect listener.
pub(super) fn patches() -> Vec<Value> {
    let policy = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "tunnel-server-policy", "namespace": NAMESPACE },
        "data": { "policy.yaml": POLICY },
    });
    let listener = json!([patches::argument(&format!("--connect-address={AGENT}"))]);
    vec![json!({ "patch": policy.to_string() }), patches::of("tunnel-agent", &listener)]
}

/// Checks the connect listeners. The tokens belong to two accounts, of which only one is in the policy.
pub(super) async fn check(cluster: &Cluster<'_>, scraper: &str, reader: &str) -> Result<()> {
    let _inside = Target::start(&cluster.testbed.cloud, CLOUD, 8080, Behaviour::Answers(INSIDE))?;
    services(cluster).await?;
    from_the_cloud(cluster, scraper, reader).await?;
    from_the_edge(cluster).await
}

/// Makes Services: one with an endpoint on the cloud host, one on the edge host, and one of a pod at the edge.
async fn services(cluster: &Cluster<'_>) -> Result<()> {
    let of_pods = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web" },
        "spec": { "selector": { "app": "web" }, "ports": [{ "name": "http", "port": 80, "targetPort": 80 }] },
    });
    let mut items = vec![of_pods];
    items.extend(with_endpoint("inside", CLOUD, 8080));
    items.extend(with_endpoint("exporter", cluster.testbed.edge(1).address, 9100));
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    cluster.kubectl.run_with_input(&["apply", "--filename=-"], list.to_string().as_bytes()).await?;
    pods::run(&cluster.api, &[shell("web", EDGE_NODE, "exec httpd -f -p 80 -h /www")]).await?;
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dweb";
    let ready = |list: &Value| list["items"][0]["endpoints"][0]["conditions"]["ready"] == true;
    cluster.api.wait("the endpoint of the Service of pods", slices, PATIENCE, ready).await.map(drop)
}

/// Returns a Service without a selector whose endpoint is a program on a host.
fn with_endpoint(name: &str, address: Ipv4Addr, port: u16) -> [Value; 2] {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name },
        "spec": { "ports": [{ "name": "http", "port": 80, "targetPort": port }] },
    });
    [service, endpoints::slice(name, "http", address.into(), port)]
}

async fn from_the_cloud(cluster: &Cluster<'_>, scraper: &str, reader: &str) -> Result<()> {
    let testbed = cluster.testbed;
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
        ("http://web.default/".to_owned(), reader, " 403 "),
        ("http://web.kube-system/".to_owned(), scraper, " 403 "),
        (format!("http://{EDGE_NODE}:9100/"), "nonsense", " 407 "),
    ] {
        let answer = ask(&url, token).await?;
        ensure!(!answer.ok && answer.said.contains(status), "{url} for {token:.9}…: {answer:?}");
    }
    ask("http://inside.default/", scraper).await?.expect(200, "from the cloud")?;
    ask("http://exporter.default/metrics", scraper).await?.expect(200, "GET /metrics")?;
    // The agent learns its node's pod CIDR by itself.
    let page = async || ask("http://web.default/index.html", scraper).await;
    let hello = |answer: &Answer| answer.status == 200 && answer.body.contains("hello from an edge pod");
    wait_until("an edge pod by its Service", PATIENCE, page, hello).await.map(drop)
}

/// A workload on the edge node reaches only the targets that the policy permits its node.
async fn from_the_edge(cluster: &Cluster<'_>) -> Result<()> {
    let proxy = format!("http://{AGENT}");
    let ask = async |url: &str| {
        curl_on_edge(cluster.testbed, 1, &["--proxytunnel", "-x", &proxy, "--verbose", url]).await
    };
    ask("http://inside.default/").await?.expect(200, "from the cloud")?;
    for url in ["http://inside.default:81/", "http://inside.kube-system/", "http://web.default/"] {
        let answer = ask(url).await?;
        ensure!(!answer.ok && answer.said.contains(" 403 "), "{url} from the edge: {answer:?}");
    }
    Ok(())
}

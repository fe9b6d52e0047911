//! Services with endpoints on an edge node, which kube-proxy translates, with nothing configured for them but Postern.
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, PATIENCE};
use postern_testbed::cluster::kubectl::said;
use postern_testbed::cluster::pods::{self, IDLE, shell};
use postern_testbed::cluster::webhook::Webhook;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, endpoints};
use postern_testbed::netns::Namespace;
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR};
use serde_json::{Value, json};

use super::checks::Checks;
use super::egress::admission;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
const POLICIES: &str = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies";
/// kube-proxy learns of a Service a moment after its creation.
const KNOWN: Duration = Duration::from_secs(20);
const CLIENT: &str = "cloud-idle";
const KUBELET_PORT: u16 = 10255;
const WEB_PORT: u16 = 8080;
/// Modes of kube-proxy; the flag has it translate the source too, where the packet leaves the host.
const PROXIES: [&[&str]; 3] = [
    &["--proxy-mode=iptables"],
    &["--proxy-mode=iptables", "--masquerade-all"],
    &["--proxy-mode=nftables", "--masquerade-all"],
];

/// A port of a Service, by one of its addresses.
#[derive(Debug)]
struct Way {
    name: &'static str,
    /// Where the client connects.
    to: SocketAddr,
    /// Where the client's connection is to arrive.
    endpoint: SocketAddr,
    path: &'static str,
    page: &'static str,
}

impl Way {
    fn url(&self) -> String {
        format!("http://{}{}", self.to, self.path)
    }
}

/// Returns a pod on the cloud's node.
pub(super) fn pods() -> Vec<Value> {
    vec![shell(CLIENT, CLOUD_NODE, IDLE)]
}

/// Checks an edge pod's Service, by its address and its NodePort, one of the edge node itself, and a webhook's.
pub(super) async fn run(
    checks: &mut Checks,
    cluster: &mut Cluster<'_>,
    server: &Server<'_>,
    webhook: &Webhook,
    outside: &Namespace,
) -> Result<()> {
    let ways = ways(cluster).await?;
    let node_port = ways.iter().find(|way| way.to.ip() == CLOUD).context("no NodePort")?;
    for flags in PROXIES {
        cluster.restart_proxy(CLOUD_NODE, flags).await?;
        let proxy = flags.join(" ");
        for way in &ways {
            let name = format!("{proxy}: {} from a pod", way.name);
            checks.run(&name, from_pod(cluster, server, way)).await;
            let name = format!("{proxy}: {} from the host", way.name);
            checks.run(&name, visited(server, way, &cluster.testbed.cloud, &[])).await;
        }
        let name = format!("{proxy}: {} from a machine that --redirect-clients names", node_port.name);
        checks.run(&name, visited(server, node_port, outside, &[&NEIGHBOUR.to_string()])).await;
        let name = format!("{proxy}: a webhook on an edge node by its Service");
        checks.run(&name, admission(cluster, webhook)).await;
    }
    let _engine = cluster.host(CLOUD_NODE)?.start_policies(cluster.testbed, &cluster.pki)?;
    for (name, policy, node) in policies(cluster) {
        let name = format!("a NetworkPolicy that {name} the edge node's address, judged by kube-router");
        checks.run(&name, judged(cluster, &ways, &policy, node)).await;
    }
    Ok(())
}

/// Policies for the pod, and whether it may reach the edge node; it may reach the edge's pods if it may not.
fn policies(cluster: &Cluster<'_>) -> [(&'static str, Value, bool); 2] {
    let edge = format!("{}/32", cluster.testbed.edge(1).address);
    let policy = |block: Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": { "name": "edge" },
            "spec": {
                "podSelector": { "matchLabels": { "app": CLIENT } }, "policyTypes": ["Egress"],
                "egress": [{ "to": [{ "ipBlock": block }] }],
            },
        })
    };
    [
        ("permits only", policy(json!({ "cidr": edge })), true),
        ("forbids only", policy(json!({ "cidr": "0.0.0.0/0", "except": [edge] })), false),
    ]
}

async fn judged(cluster: &Cluster<'_>, ways: &[Way], policy: &Value, node: bool) -> Result<()> {
    cluster.api.create(POLICIES, policy).await?;
    let judged = each_judged(cluster, ways, node).await;
    // The next one has the same name.
    judged.and(cluster.api.delete(&format!("{POLICIES}/edge")).await)
}

async fn each_judged(cluster: &Cluster<'_>, ways: &[Way], node: bool) -> Result<()> {
    for way in ways {
        let (url, permitted) = (way.url(), (way.endpoint.port() == KUBELET_PORT) == node);
        let what = format!("{url} to be {}", if permitted { "permitted" } else { "forbidden" });
        let page = async || fetch(cluster, &url).await;
        wait_until(&what, KNOWN, page, |page| (page == way.page) == permitted).await?;
    }
    Ok(())
}

async fn ways(cluster: &Cluster<'_>) -> Result<Vec<Way>> {
    let pod: SocketAddr = format!("{}:80", pods::address(&cluster.api, "web").await?).parse()?;
    let web = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "pages" },
        "spec": { "type": "NodePort", "selector": { "app": "web" }, "ports": [{ "port": WEB_PORT, "targetPort": 80 }] },
    });
    let web = cluster.api.create(SERVICES, &web).await?;
    let node = SocketAddr::from((cluster.testbed.edge(1).address, KUBELET_PORT));
    let kubelet = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "kubelet" },
        "spec": { "ports": [{ "port": WEB_PORT, "targetPort": KUBELET_PORT }] },
    });
    let kubelet = cluster.api.create(SERVICES, &kubelet).await?;
    cluster.api.create(SLICES, &endpoints::slice("kubelet", "", node.ip(), KUBELET_PORT)).await?;
    let address = |service: &Value| -> Result<SocketAddr> {
        let address = service["spec"]["clusterIP"].as_str().context("a Service without an address")?;
        Ok(SocketAddr::new(address.parse()?, WEB_PORT))
    };
    let port = web["spec"]["ports"][0]["nodePort"].as_u64().context("no NodePort")?;
    let port = u16::try_from(port).context("its NodePort")?;
    let (path, page) = ("/index.html", "hello from an edge pod");
    Ok(vec![
        Way { name: "an edge pod", to: pod, endpoint: pod, path, page },
        Way { name: "an edge pod's Service", to: address(&web)?, endpoint: pod, path, page },
        Way { name: "an edge pod's NodePort", to: (CLOUD, port).into(), endpoint: pod, path, page },
        Way {
            name: "an edge node's Service",
            to: address(&kubelet)?,
            endpoint: node,
            path: "/healthz",
            page: "ok",
        },
    ])
}

/// Returns what wget prints in the pod. A firewall's REJECT is as good as a DROP: the kernel sends no ICMP from an address that is
/// not the host's.
async fn fetch(cluster: &Cluster<'_>, url: &str) -> Result<String> {
    let wget = ["exec", CLIENT, "--", "timeout", "3", "wget", "-q", "-O-", url];
    Ok(said(&cluster.kubectl.output(&wget).await?))
}

/// The server sees the pod's own address, also if kube-proxy masquerades.
async fn from_pod(cluster: &Cluster<'_>, server: &Server<'_>, way: &Way) -> Result<()> {
    let pod = pods::address(&cluster.api, CLIENT).await?;
    let before = arrived(server, way, &[&pod]).await?;
    let url = way.url();
    let page = async || fetch(cluster, &url).await;
    wait_until(&format!("the page of {url}"), KNOWN, page, |page| page == way.page).await?;
    let after = arrived(server, way, &[&pod]).await?;
    ensure!(after > before, "no connection of {pod} to {} is in the access log", way.endpoint);
    Ok(())
}

/// Visits it from a namespace. The server sees one of these addresses, if there are any.
async fn visited(server: &Server<'_>, way: &Way, from: &Namespace, clients: &[&str]) -> Result<()> {
    let before = arrived(server, way, clients).await?;
    let page = async || {
        let stream = client::connect_from(from, way.to, PATIENCE).await?;
        client::http(stream, "GET", way.path, "").await
    };
    let expected = |(status, page): &(u16, String)| *status == 200 && page.trim() == way.page;
    wait_until(&format!("the page of {}", way.to), KNOWN, page, expected).await?;
    let after = arrived(server, way, clients).await?;
    ensure!(after > before, "no connection of {clients:?} to {} is in the access log", way.endpoint);
    Ok(())
}

/// Counts ended connections to its endpoint, of clients with these addresses if there are any.
async fn arrived(server: &Server<'_>, way: &Way, clients: &[&str]) -> Result<usize> {
    let endpoint = way.endpoint.to_string();
    let lines = server.settled_access_log().await?;
    let fits = lines.iter().filter(|line| {
        let client = line.text("client");
        let known = |address: &&str| client.rsplit_once(':').is_some_and(|(ip, _)| ip == *address);
        line.text("listener") == "redirect"
            && line.text("node") == EDGE_NODE
            && line.text("destination") == endpoint
            && (clients.is_empty() || clients.iter().any(known))
    });
    Ok(fits.count())
}

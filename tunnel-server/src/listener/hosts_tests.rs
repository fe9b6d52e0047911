//! A table of each kind of host at each listener.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use prometheus_client::registry::Registry;
use tunnel_routing::inventory::{Inventory, InventoryNode};
use tunnel_routing::{Resolved, Router, RouterConfig, split_host};
use tunnel_runtime::NodeName;

use super::connect::{Denied, Gatekeeper, Services};
use super::context::Reached;
use super::egress::leads_at_egress;
use super::front::reached_over_http;
use super::{Https, OpenRequest, map};
use crate::caller::{Authenticator, Tokens};
use crate::maps::{Map, Target};
use crate::policy::{Identity, Policy};

const PORT: u16 = 10250;

/// Lets a caller reach every node and every address, and no Service.
const POLICY: &str = "rules:\n- name: all\n  from: [{clients: [0.0.0.0/0]}]\n  to:\n  \
    - {nodes: edge, addresses: [0.0.0.0/0, '::/0'], ports: ['*']}\n  \
    - {addresses: [0.0.0.0/0, '::/0'], ports: ['*']}\n";

/// Nodes named like addresses, of each other and of others, and like Services; two with one address; pods inside and outside the range
/// that is redirected.
fn router() -> Arc<Router> {
    let node = |name: &str, addresses: &[&str]| InventoryNode {
        edge: true,
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        labels: [("edge".to_owned(), String::new())].into(),
        ..InventoryNode::new(name.parse().unwrap())
    };
    let pods = |name: &str, address: &str, range: &str| InventoryNode {
        pod_cidrs: vec![range.parse().unwrap()],
        ..node(name, &[address])
    };
    let (v4, v6) = ("198.18.0.0/15".parse().unwrap(), "fd00:706f::/64".parse().unwrap());
    let config =
        RouterConfig { pods: vec!["10.244.0.0/16".parse().unwrap()], ..RouterConfig::new(v4, v6, [PORT]) };
    let router = Router::new(config, &mut Registry::default());
    router.set_inventory(Inventory::from(vec![
        node("10.8.0.9", &["10.8.0.7"]),
        node("10.8.0.7", &["10.8.0.9"]),
        node("10.8.0.5", &["10.8.0.6"]),
        node("127.0.0.1", &["10.8.0.4"]),
        node("010.8.0.9", &["10.8.0.8"]),
        node("edge-1", &["169.254.3.3", "10.8.0.1", "fd00:8::1"]),
        node("twin-1", &["10.8.0.66"]),
        node("twin-2", &["10.8.0.66"]),
        node("nowhere", &[]),
        pods("edge-2", "10.8.0.2", "10.244.2.0/24"),
        pods("edge-3", "10.8.0.3", "10.99.3.0/24"),
        node("web.shop", &["10.8.0.10"]),
        node("web.shop.svc.cluster.local", &["10.8.0.11"]),
        InventoryNode::new("cloud-1".parse().unwrap()),
    ]));
    Arc::new(router)
}

fn to(node: &NodeName, target: SocketAddr) -> String {
    format!("{node} {target}")
}

fn of_request(request: Result<OpenRequest, String>) -> String {
    request.map_or("refused".to_owned(), |request| to(&request.node, request.target))
}

async fn at_http(host: &str, router: &Arc<Router>) -> String {
    let reached = reached_over_http(&format!("{host}:{PORT}"), router.clone()).await;
    reached.map_or("refused".to_owned(), |(node, target)| to(&node, target))
}

fn at_sni(host: &str, router: &Router) -> String {
    of_request(Https { front: None, port: None }.request(Some(host), router))
}

/// Returns `None` if no map can name the host.
fn at_map(host: &str, router: &Router) -> Option<String> {
    let map = Map {
        listen: ([127, 0, 0, 1], 1).into(),
        node: host.parse().ok()?,
        target: Target::Port(PORT),
        clients: Vec::new(),
    };
    Some(of_request(map::request(&map, router)))
}

fn gatekeeper(policy: Policy, router: &Arc<Router>) -> Gatekeeper {
    Gatekeeper {
        authenticator: Arc::new(Authenticator::new(Tokens::default(), None)),
        services: Services::Resolver,
        policy: ArcSwap::from_pointee(policy),
        router: router.clone(),
    }
}

async fn at_connect(host: &str, router: &Arc<Router>) -> String {
    let gatekeeper = gatekeeper(Policy::parse(POLICY).unwrap(), router);
    let client = "10.0.0.1".parse().unwrap();
    match gatekeeper.reach(&Identity::None, client, host, PORT).await {
        Ok((Reached::Edge(request), ..)) => to(&request.node, request.target),
        Ok((Reached::Cloud(target), ..)) => format!("direct {target}"),
        Err(Denied::Policy) => "denied".to_owned(),
        Err(Denied::Unclear(_) | Denied::Unavailable(_)) => "refused".to_owned(),
    }
}

#[tokio::test]
async fn each_kind_of_host_at_each_listener() {
    const NO: &str = "refused";
    let router = router();
    // Hosts that lead to the same node at every listener.
    for (host, expected) in [
        ("edge-1", "edge-1 10.8.0.1:10250"),
        ("EDGE-1.", "edge-1 10.8.0.1:10250"),
        ("10.8.0.1", "edge-1 10.8.0.1:10250"),
        ("[fd00:8::1]", "edge-1 [fd00:8::1]:10250"),
        ("[FD00:8:0::1]", "edge-1 [fd00:8::1]:10250"),
        ("[::ffff:10.8.0.9]", "10.8.0.7 10.8.0.9:10250"),
        ("[10.8.0.9]", "10.8.0.7 10.8.0.9:10250"),
        // A host is parsed as an address before it is looked up as a name.
        ("10.8.0.9", "10.8.0.7 10.8.0.9:10250"),
        ("10.8.0.9.", "10.8.0.7 10.8.0.9:10250"),
        ("10.8.0.7", "10.8.0.9 10.8.0.7:10250"),
        // Not a valid address.
        ("010.8.0.9", "010.8.0.9 10.8.0.8:10250"),
        // By name, although two nodes have the address.
        ("twin-1", "twin-1 10.8.0.66:10250"),
    ] {
        assert_eq!(at_http(host, &router).await, expected, "http: {host}");
        assert_eq!(at_sni(host, &router), expected, "https: {host}");
        assert_eq!(at_map(host, &router).as_deref().unwrap_or(expected), expected, "map: {host}");
        assert_eq!(at_connect(host, &router).await, expected, "connect: {host}");
        assert_eq!(leads_at_egress(host, PORT, &router), expected, "egress: {host}");
    }
    // All others: at the http and plain listeners and maps, at the https listener's SNI, at the connect listener and
    // for workloads, and at egress.
    for (host, http, sni, connect, egress) in [
        // A pod, which has no kubelet, in a range that is redirected, and in one that is not.
        ("10.244.2.7", "edge-2 10.244.2.7:10250", NO, "edge-2 10.244.2.7:10250", "edge-2 10.244.2.7:10250"),
        ("10.99.3.7", NO, NO, "direct 10.99.3.7:10250", "direct 10.99.3.7:10250"),
        ("api.shop", NO, NO, "denied", "direct api.shop:10250"),
        ("web.shop.svc.cluster.local", NO, NO, "denied", "direct web.shop.svc.cluster.local:10250"),
        // Loopback, also where a node has that name; a virtual address; an address that belongs to no node.
        ("127.0.0.1", NO, NO, "denied", NO),
        ("[::ffff:127.0.0.1]", NO, NO, "denied", NO),
        ("[::]", NO, NO, "denied", NO),
        ("198.18.0.1", NO, NO, "denied", NO),
        ("10.9.9.9", NO, NO, "direct 10.9.9.9:10250", "direct 10.9.9.9:10250"),
        // The name of a node, but no node's address.
        ("10.8.0.5", NO, NO, "direct 10.8.0.5:10250", "direct 10.8.0.5:10250"),
        ("10.8.0.66", NO, NO, NO, NO),
        ("nowhere", NO, NO, NO, NO),
        ("edge-9", NO, NO, NO, "direct edge-9:10250"),
    ] {
        assert_eq!(at_http(host, &router).await, http, "http: {host}");
        assert_eq!(at_map(host, &router).as_deref().unwrap_or(http), http, "map: {host}");
        assert_eq!(at_sni(host, &router), sni, "https: {host}");
        assert_eq!(at_connect(host, &router).await, connect, "connect: {host}");
        assert_eq!(leads_at_egress(host, PORT, &router), egress, "egress: {host}");
    }
}

#[test]
fn a_port_of_the_nodes_loopback_is_not_the_pods() {
    let router = router();
    router.set_ports(&[].into(), &[9100].into());
    let dialled = |host: &str| router.dialled(&router.resolve(host).on_edge().unwrap(), 9100).to_string();
    assert_eq!(dialled("edge-2"), "127.0.0.1:9100");
    assert_eq!(dialled("10.244.2.7"), "10.244.2.7:9100");
}

#[test]
fn an_endpoint_is_its_nodes_and_nobody_elses() {
    let router = router();
    let leads = |endpoint: &str, node| match router.resolve_endpoint(endpoint.parse().unwrap(), node) {
        Resolved::Edge(found) => to(&found.node, router.dialled(&found, PORT)),
        Resolved::Pod(pod) => format!("pod {}", to(&pod.node, router.dialled(&pod, PORT))),
        Resolved::Elsewhere(address) => format!("cloud {address}"),
        other => other.to_string(),
    };
    // Each with the node that its slice names.
    for (endpoint, node, expected) in [
        // A cloud node's, and one's whose Node is not known yet, whatever edge nodes name.
        ("10.9.9.9:443", Some("cloud-1"), "cloud 10.9.9.9"),
        ("10.8.0.1:443", Some("cloud-1"), "cloud 10.8.0.1"),
        ("10.8.0.66:443", Some("cloud-1"), "cloud 10.8.0.66"),
        ("10.8.0.1:443", Some("new"), "cloud 10.8.0.1"),
        ("10.99.3.7:443", Some("cloud-1"), "cloud 10.99.3.7"),
        // The redirect would lead this server's own connect to the edge node.
        (
            "10.8.0.1:10250",
            Some("cloud-1"),
            "10.8.0.1 is the address of cloud-1, edge-1: name the node instead",
        ),
        (
            "10.244.2.7:443",
            Some("cloud-1"),
            "10.244.2.7 is the address of cloud-1, edge-2: name the node instead",
        ),
        // An edge node's, whose agent decides about what is not its own.
        ("10.8.0.1:443", Some("edge-1"), "edge-1 10.8.0.1:10250"),
        ("10.8.0.66:443", Some("twin-2"), "twin-2 10.8.0.66:10250"),
        ("10.8.0.2:443", Some("edge-1"), "pod edge-1 10.8.0.2:10250"),
        ("10.244.2.7:443", Some("edge-2"), "pod edge-2 10.244.2.7:10250"),
        ("10.244.2.7:443", Some("edge-1"), "pod edge-1 10.244.2.7:10250"),
        ("10.99.3.7:443", Some("edge-3"), "pod edge-3 10.99.3.7:10250"),
        ("10.70.0.5:443", Some("edge-1"), "pod edge-1 10.70.0.5:10250"),
        // Nobody's: as any other address.
        ("10.8.0.1:443", None, "edge-1 10.8.0.1:10250"),
        ("10.8.0.66:443", None, "10.8.0.66 is the address of twin-1, twin-2: name the node instead"),
        ("10.9.9.9:443", None, "cloud 10.9.9.9"),
        ("127.0.0.1:443", Some("edge-1"), "127.0.0.1 is not the address of an edge node"),
        ("198.18.0.1:443", Some("edge-1"), "198.18.0.1 is not the address of an edge node"),
    ] {
        assert_eq!(leads(endpoint, node), expected, "{endpoint} of {node:?}");
    }
}

/// A Node may have the name of a Service.
#[test]
fn a_service_that_a_rule_opens_comes_before_a_node_of_its_name() {
    let services = "- {service: web.shop, ports: [443]}\n";
    let (router, client) = (router(), "10.0.0.1".parse().unwrap());
    let meant = |policy: &str, host: &str, port| {
        let policy = Policy::parse(policy).unwrap();
        let meant = gatekeeper(policy, &router).meant(&Identity::None, client, host, port);
        matches!(meant, Resolved::Service { .. })
    };
    let with = format!("{POLICY}  {services}");
    for host in ["web.shop", "WEB.shop.", "web.shop.svc", "web.shop.svc.cluster.local"] {
        assert!(meant(&with, host, 443), "{host}");
    }
    assert!(!meant(&with, "web.shop", 80) && !meant(POLICY, "web.shop", 443) && !meant(&with, "edge-1", 443));
    // Nobody else has such a name.
    assert!(meant(POLICY, "web.shop.svc", 443) && meant(POLICY, "web.shop.svc.cluster.local", 443));
}

#[test]
fn a_host_and_a_port() {
    for (text, host, port) in [
        ("edge-1:10250", "edge-1", Some(10250)),
        ("edge-1", "edge-1", None),
        ("10.0.0.1:1", "10.0.0.1", Some(1)),
        ("[fd00::1]:443", "fd00::1", Some(443)),
        ("[fd00::1]", "fd00::1", None),
        ("web.shop.svc.:443", "web.shop.svc.", Some(443)),
    ] {
        assert_eq!(split_host(text), Ok((host, port)), "{text}");
    }
    let long = "a".repeat(256);
    for text in [
        "",
        ":",
        "edge-1:",
        "edge-1:0",
        "edge-1:+1",
        "edge-1:65536",
        ":443",
        "fd00::1:443",
        "[fd00::1]443",
        "[fd00::1",
        "user@edge-1:1",
        "a b:1",
        "a\r\n:1",
        &long,
    ] {
        assert!(split_host(text).is_err(), "{text:?}");
    }
}

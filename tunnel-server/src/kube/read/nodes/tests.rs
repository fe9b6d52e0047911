use serde_json::{Value, json};

use super::*;

fn slim(node: &Value) -> SlimNode {
    serde_json::from_value(node.clone()).unwrap()
}

fn node(name: &str, address: &str) -> SlimNode {
    slim(&json!({
        "metadata": {"name": name, "resourceVersion": "1", "labels": {"superedge.io/edge-node": "enable"}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    }))
}

fn listed(nodes: &mut Nodes, items: &[SlimNode]) -> bool {
    assert!(!nodes.apply(Event::Init));
    for item in items {
        assert!(!nodes.apply(Event::InitApply(item.clone())));
    }
    nodes.apply(Event::InitDone)
}

#[test]
fn a_node_that_drops_its_edge_label_was_one() {
    let labelled = |label: &str, created: &str| {
        slim(&json!({"metadata": {"name": "edge-1", "creationTimestamp": created,
            "labels": {"superedge.io/edge-node": label}}}))
    };
    let (first, again) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    let was_edge = |nodes: &Nodes| nodes.inventory.get("edge-1").map(|node| node.was_edge);
    let mut nodes = Nodes::new(Selector::default(), false);
    assert!(listed(&mut nodes, &[labelled("enable", first)]));
    assert_eq!(was_edge(&nodes), Some(false));
    assert!(nodes.apply(Event::Apply(labelled("", first))));
    assert_eq!(was_edge(&nodes), Some(true));
    // Whatever it writes next, and when the nodes are listed anew, by this run or another one.
    nodes.apply(Event::Apply(labelled("x", first)));
    listed(&mut nodes, &[labelled("", first)]);
    assert_eq!(was_edge(&nodes), Some(true));
    let kept = serde_json::to_string(&nodes.inventory).unwrap();
    let mut nodes = Nodes::new(Selector::default(), false);
    assert!(nodes.is_first_list());
    nodes.inventory = serde_json::from_str(&kept).unwrap();
    listed(&mut nodes, &[labelled("", first)]);
    assert_eq!(was_edge(&nodes), Some(true));
    // Another Node of that name is another one.
    nodes.apply(Event::Apply(labelled("", again)));
    assert_eq!(was_edge(&nodes), Some(false));
}

fn names(nodes: &Nodes) -> Vec<String> {
    nodes.inventory.iter().map(|node| node.name.to_string()).collect()
}

#[test]
fn absent_and_null_fields_are_empty() {
    for node in [
        json!({"metadata": {"name": "bare"}}),
        json!({"metadata": {"name": "nulls", "labels": null},
            "spec": {"podCIDR": "", "podCIDRs": null}, "status": {"addresses": null, "daemonEndpoints": {}}}),
    ] {
        let Known { node, skipped } = read(&slim(&node), &Selector::default());
        let node = node.unwrap();
        assert_eq!((skipped, node.edge, node.kubelet_port), (Vec::new(), false, 10250));
        assert_eq!((node.addresses, node.pod_cidrs), (Vec::new(), Vec::new()));
    }
}

#[test]
fn unusable_fields_are_left_out_and_the_rest_stays() {
    let odd = slim(&json!({
        "metadata": {"name": "edge-1"},
        "spec": {"podCIDRs": ["10.244.1.0/24", "10.244/16"]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "10.0.0"}, {"type": "InternalIP", "address": "10.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 70000}},
        },
    }));
    let Known { node, skipped } = read(&odd, &Selector::default());
    let node = node.unwrap();
    assert_eq!(node.addresses, ["10.0.0.1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(node.pod_cidrs, ["10.244.1.0/24".parse().unwrap()]);
    assert_eq!(node.kubelet_port, 10250);
    let skipped: Vec<_> =
        skipped.iter().map(|field| (field.key, field.value.as_str(), field.reason.as_str())).collect();
    assert_eq!(
        skipped,
        [
            ("status.addresses", "10.0.0", "not an IP address"),
            ("status.daemonEndpoints.kubeletEndpoint.Port", "70000", "not a port"),
            ("spec.podCIDRs", "10.244/16", "not an address range"),
        ]
    );

    let mut nodes = Nodes::new(Selector::default(), false);
    assert!(listed(&mut nodes, &[node_with_bad_name(), node_named("edge-1")]));
    assert_eq!(names(&nodes), ["edge-1"]);
    assert!(!nodes.apply(Event::Apply(node_with_bad_name())), "it is not in the inventory");
}

#[test]
fn unusual_values_are_what_they_are_or_are_left_out() {
    let field = |spec: Value, status: Value| {
        let odd = slim(&json!({"metadata": {"name": "edge-1"}, "spec": spec, "status": status}));
        let Known { node, skipped } = read(&odd, &Selector::default());
        (node.unwrap(), skipped.len())
    };
    for (text, address) in [
        ("10.0.0.1", Some("10.0.0.1")),
        ("::ffff:10.0.0.1", Some("10.0.0.1")),
        ("FD00:0::00A", Some("fd00::a")),
        ("010.0.0.1", None),
        ("10.0.1", None),
        ("167772161", None),
        ("0x0a.0.0.1", None),
        ("10.0.0.1/24", None),
        ("10.0.0.1:10250", None),
        ("[fd00::1]", None),
        ("fe80::1%eth0", None),
        (" 10.0.0.1", None),
        ("edge-1", None),
        ("", None),
    ] {
        let status = json!({"addresses": [{"type": "InternalIP", "address": text}]});
        let (node, skipped) = field(json!({}), status);
        let read: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(read, address.into_iter().collect::<Vec<_>>(), "{text:?}");
        assert_eq!(skipped == 0, address.is_some(), "{text:?}");
    }
    let types = ["Hostname", "ExternalIP", "InternalDNS", "ExternalDNS", "internalip", "", "InternalIP"];
    let typed =
        types.iter().zip(1..).map(|(r#type, n)| json!({"type": r#type, "address": format!("10.0.0.{n}")}));
    let (node, skipped) = field(json!({}), json!({"addresses": typed.collect::<Vec<_>>()}));
    let read: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
    assert_eq!((read, skipped), (vec!["10.0.0.7".to_owned(), "10.0.0.2".to_owned()], 0));
    for (port, read) in [(0, 10250), (1, 1), (65535, 65535), (65536, 10250), (-1, 10250), (i64::MIN, 10250)] {
        let (node, skipped) =
            field(json!({}), json!({"daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}));
        assert_eq!(node.kubelet_port, read, "{port}");
        assert_eq!(skipped, usize::from(!(0..=65535).contains(&port)), "{port}");
    }
    for (range, read) in [
        ("0.0.0.0/0", Some("0.0.0.0/0")),
        ("10.244.1.77/24", Some("10.244.1.0/24")),
        ("10.244.1.77/32", Some("10.244.1.77/32")),
        ("FD00::1/64", Some("fd00::/64")),
        ("10.244.1.0/33", None),
        ("10.244.1.0/-1", None),
        ("10.244.1.0", None),
        // Kubernetes accepts leading zeros too.
        ("010.244.1.0/24", Some("10.244.1.0/24")),
    ] {
        let (node, skipped) = field(json!({"podCIDR": range, "podCIDRs": [range]}), json!({}));
        let ranges: Vec<_> = node.pod_cidrs.iter().map(ToString::to_string).collect();
        assert_eq!(ranges, read.into_iter().collect::<Vec<_>>(), "{range}");
        assert_eq!(skipped == 0, read.is_some(), "{range}");
    }
}

fn node_with_bad_name() -> SlimNode {
    node("Edge_1", "10.0.0.9")
}

fn node_named(name: &str) -> SlimNode {
    node(name, "10.0.0.1")
}

#[test]
fn only_fields_that_the_tunnel_needs_are_a_change() {
    let mut nodes = Nodes::new(Selector::default(), false);
    assert!(listed(&mut nodes, &[]), "the first list counts even when it is empty");
    assert!(!listed(&mut nodes, &[]));
    assert!(nodes.apply(Event::Apply(node("a", "10.0.0.1"))));
    assert!(!nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
    assert!(nodes.apply(Event::Apply(node("a", "10.0.0.2"))));
    assert!(!listed(&mut nodes, &[node("a", "10.0.0.2")]), "a list of the same");
    assert!(nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
    assert!(!nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
}

#[test]
fn a_complete_list_replaces_everything() {
    let mut nodes = Nodes::new(Selector::default(), false);
    listed(&mut nodes, &[node("a", "10.0.0.1"), node("b", "10.0.0.2")]);
    nodes.apply(Event::Init);
    nodes.apply(Event::InitApply(node("c", "10.0.0.3")));
    assert_eq!(names(&nodes), ["a", "b"], "half a list is not visible");
    nodes.apply(Event::Init);
    nodes.apply(Event::InitApply(node("b", "10.0.0.2")));
    assert!(nodes.apply(Event::InitDone));
    assert_eq!(names(&nodes), ["b"], "a list that starts over starts empty");
}

#[test]
fn a_list_without_nodes_is_refused() {
    let mut nodes = Nodes::new(Selector::default(), false);
    listed(&mut nodes, &[node("a", "10.0.0.1"), node("b", "10.0.0.2")]);
    assert!(!listed(&mut nodes, &[]));
    assert!(!listed(&mut nodes, &[node_with_bad_name()]), "none of them can be used");
    assert!(nodes.apply(Event::Apply(node("c", "10.0.0.3"))));
    assert_eq!(names(&nodes), ["a", "b", "c"]);
    assert!(listed(&mut nodes, &[node("c", "10.0.0.3")]));
    assert_eq!(names(&nodes), ["c"], "a list with nodes is true");
    // Nodes may be removed one by one.
    assert!(nodes.apply(Event::Delete(node("c", "10.0.0.3"))));
    assert!(names(&nodes).is_empty());

    let mut nodes = Nodes::new(Selector::default(), true);
    listed(&mut nodes, &[node("a", "10.0.0.1")]);
    assert!(listed(&mut nodes, &[]));
    assert!(names(&nodes).is_empty(), "it is allowed");
}

#[test]
fn after_a_first_list_without_nodes_those_known_before_count_with_the_first_that_comes() {
    let mut nodes = Nodes::new(Selector::default(), false);
    nodes.apply(Event::Init);
    assert!(nodes.is_first_list());
    nodes.inventory = [node("a", "10.0.0.1"), node("b", "10.0.0.2")]
        .iter()
        .filter_map(|node| read(node, &Selector::default()).node)
        .collect();
    assert!(!nodes.apply(Event::InitDone));
    assert!(nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "it is as it was");
    assert_eq!(names(&nodes), ["a", "b"]);
    assert!(!nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
    nodes.apply(Event::Init);
    assert!(!nodes.is_first_list());
}

#[test]
fn a_warning_is_not_repeated_for_heartbeats() {
    let mut nodes = Nodes::new(Selector::default(), false);
    let warnings = |nodes: &mut Nodes, address| {
        let skipped = read(&node("a", address), &nodes.selector).skipped;
        nodes.worth_logging("a", &skipped, std::time::Instant::now()).len()
    };
    assert_eq!(warnings(&mut nodes, "10.0.0"), 1);
    listed(&mut nodes, &[node("a", "10.0.0")]);
    assert_eq!(warnings(&mut nodes, "10.0.0"), 0);
    assert_eq!(warnings(&mut nodes, "10.0"), 1);
    assert_eq!(warnings(&mut nodes, "10.0.0.1"), 0);
    nodes.apply(Event::Delete(node("a", "10.0.0")));
    assert_eq!(warnings(&mut nodes, "10.0.0"), 1, "another node of that name");
}

#[test]
fn a_node_that_names_ever_other_things_does_not_fill_the_log() {
    let mut nodes = Nodes::new(Selector::default(), false);
    let now = std::time::Instant::now();
    let mut lines = 0;
    for n in 0..1000 {
        let known = read(&node("a", &format!("10.0.{n}")), &nodes.selector);
        assert_eq!(known.skipped.len(), 1);
        lines += nodes.worth_logging("a", &known.skipped, now).len();
        nodes.set("a", known);
    }
    assert_eq!(lines, 100);
}

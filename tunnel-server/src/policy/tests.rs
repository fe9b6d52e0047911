use super::*;
use crate::caller::Caller;
use proptest::prelude::*;
use tunnel_routing::inventory::InventoryNode;

fn node(name: &str, labels: &[(&str, &str)]) -> InventoryNode {
    InventoryNode {
        edge: true,
        addresses: vec!["10.8.0.7".parse().unwrap()],
        labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..InventoryNode::new(name.parse().unwrap())
    }
}

fn caller(name: &str, groups: &[&str]) -> Caller {
    Caller::new(name.to_owned(), groups.iter().map(|&group| group.to_owned()).collect())
}

fn certificate(cn: &str, organizations: &[&str]) -> Identity {
    Identity::Certificate(caller(cn, organizations))
}

fn token(user: &str, groups: &[&str]) -> Identity {
    Identity::Token(caller(user, groups))
}

const POLICY: &str = r#"
rules:
- name: operators
  from:
  - organization: ops
  - cn: alice
    clients: [10.0.0.0/8]
  to:
  - nodes: site=berlin
    ports: [22, 9100-9199]
- name: monitoring
  from:
  - serviceAccount: monitoring/prometheus
  - group: scrapers
  to:
  - nodes: "site in (berlin, rome)"
    ports: [9100]
  - node: edge-7
    addresses: [127.0.0.1, 10.244.7.0/24]
    ports: ["*"]
- name: from the edge
  from:
  - nodes: node-restriction.kubernetes.io/site=berlin
  to:
  - service: Prometheus.Monitoring
    ports: [9090]
  - addresses: [10.96.0.0/12]
    ports: [443]
- name: local
  from:
  - clients: [192.168.1.0/24]
  to:
  - node: edge-7
    ports: [8080]
"#;

#[test]
fn rules_permit_and_everything_else_is_denied() {
    let policy = Policy::parse(POLICY).unwrap();
    let berlin = node("edge-7", &[("site", "berlin")]);
    let rome = node("edge-8", &[("site", "rome")]);
    let own = "10.8.0.7";
    let ask = |identity: &Identity, client: &str, node: &InventoryNode, address: &str, port: u16| {
        let caller = Origin { identity, client: client.parse().unwrap(), node: None };
        let to = Destination::Edge { node, address: address.parse().unwrap() };
        policy.permits(caller, to, port).map(str::to_owned)
    };
    let (ops, alice) = (certificate("bob", &["dev", "ops"]), certificate("alice", &[]));
    let prometheus = token("system:serviceaccount:monitoring:prometheus", &[]);
    let scraper = token("anyone", &["scrapers"]);
    let nobody = Identity::None;
    for (identity, client, node, address, port, expected) in [
        (&ops, "1.2.3.4", &berlin, own, 22, Some("operators")),
        (&ops, "1.2.3.4", &berlin, own, 9150, Some("operators")),
        (&ops, "1.2.3.4", &berlin, own, 10250, None),
        (&ops, "1.2.3.4", &rome, own, 22, None),
        // Only the node's own addresses, unless the rule says otherwise.
        (&ops, "1.2.3.4", &berlin, "127.0.0.1", 22, None),
        (&alice, "10.1.2.3", &berlin, own, 22, Some("operators")),
        (&alice, "::ffff:10.1.2.3", &berlin, own, 22, Some("operators")),
        (&alice, "11.1.2.3", &berlin, own, 22, None),
        (&prometheus, "1.2.3.4", &rome, own, 9100, Some("monitoring")),
        (&scraper, "1.2.3.4", &berlin, "10.244.7.9", 1, Some("monitoring")),
        (&scraper, "1.2.3.4", &berlin, "10.244.8.9", 1, None),
        (&nobody, "192.168.1.9", &berlin, own, 8080, Some("local")),
        (&nobody, "192.168.2.9", &berlin, own, 8080, None),
        // A caller that has shown a name keeps the permissions of its address.
        (&alice, "192.168.1.9", &berlin, own, 8080, Some("local")),
        // A token's user does not match a certificate's name.
        (&token("alice", &["ops"]), "10.1.2.3", &berlin, own, 22, None),
        (
            &certificate("system:serviceaccount:monitoring:prometheus", &["scrapers"]),
            "1.2.3.4",
            &rome,
            own,
            9100,
            None,
        ),
    ] {
        assert_eq!(
            ask(identity, client, node, address, port).as_deref(),
            expected,
            "{identity} {node:?} {address}:{port}"
        );
    }
    assert_eq!(
        Policy::default().permits(
            Origin { identity: &ops, client: own.parse().unwrap(), node: None },
            Destination::Edge { node: &berlin, address: own.parse().unwrap() },
            22
        ),
        None
    );
}

#[test]
fn workloads_on_edge_nodes_reach_what_their_node_may() {
    let policy = Policy::parse(POLICY).unwrap();
    let protected = "node-restriction.kubernetes.io/site";
    let berlin = node("edge-7", &[(protected, "berlin")]);
    let rome = node("edge-8", &[(protected, "rome"), ("site", "berlin")]);
    let api: IpAddr = "10.96.0.1".parse().unwrap();
    let ask = |from: &InventoryNode, client: &str, to, port| {
        let identity = Identity::Node(from.name.clone());
        let caller = Origin { identity: &identity, client: client.parse().unwrap(), node: Some(from) };
        policy.permits(caller, to, port).map(str::to_owned)
    };
    let cloud = |address| Destination::Cloud { address, own: false };
    let named = Destination::Service;
    assert_eq!(
        ask(&berlin, "1.1.1.1", named("prometheus.monitoring"), 9090).as_deref(),
        Some("from the edge")
    );
    assert_eq!(ask(&berlin, "1.1.1.1", named("prometheus.monitoring"), 443), None);
    assert_eq!(ask(&berlin, "1.1.1.1", named("other.monitoring"), 9090), None);
    assert_eq!(ask(&berlin, "1.1.1.1", cloud(api), 443).as_deref(), Some("from the edge"));
    assert_eq!(ask(&rome, "1.1.1.1", cloud(api), 443), None);
    // An address in the range that is on an edge node belongs to that node.
    let edge = Destination::Edge { node: &rome, address: api };
    assert_eq!(ask(&berlin, "1.1.1.1", edge, 443), None);
    // The address from which an agent connects does not identify the workload.
    let own = Destination::Edge { node: &berlin, address: "10.8.0.7".parse().unwrap() };
    assert_eq!(ask(&rome, "192.168.1.9", own, 8080), None);
}

#[test]
fn a_range_opens_the_servers_loopback_only_if_it_is_its_own() {
    let policy = |ranges: &str| {
        let to = format!("to: [{{addresses: [{ranges}], ports: [\"*\"]}}]");
        let rule = format!("rules:\n- name: a\n  from: [{{clients: [10.0.0.0/8]}}]\n  {to}\n");
        Policy::parse(&rule).unwrap()
    };
    let nobody = Identity::None;
    let permits = |policy: &Policy, address: &str| {
        let caller = Origin { identity: &nobody, client: "10.0.0.1".parse().unwrap(), node: None };
        let to = Destination::Cloud { address: address.parse().unwrap(), own: false };
        policy.permits(caller, to, 10264).is_some()
    };
    let (all, own) = (policy("0.0.0.0/0, \"::/0\""), policy("127.0.0.0/8"));
    for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
        assert!(!permits(&all, address), "{address}");
    }
    assert!(permits(&all, "10.80.0.1") && permits(&all, "fd00::1"));
    assert!(permits(&own, "127.0.0.1") && !permits(&own, "0.0.0.0") && !permits(&own, "10.80.0.1"));
}

/// They lead to edge nodes, and see the server's address as the client's.
#[test]
fn a_range_opens_posterns_own_ports_only_if_it_is_the_address_itself() {
    let policy = |range: &str| {
        let to = format!("to: [{{addresses: ['{range}'], ports: [\"*\"]}}]");
        Policy::parse(&format!("rules:\n- name: a\n  from: [{{clients: [10.0.0.0/8]}}]\n  {to}\n")).unwrap()
    };
    let identity = &Identity::None;
    let caller = Origin { identity, client: "10.0.0.1".parse().unwrap(), node: None };
    for (range, address, own, permitted) in [
        ("10.70.0.0/24", "10.70.0.1", false, true),
        ("10.70.0.0/24", "10.70.0.1", true, false),
        ("10.70.0.0/31", "10.70.0.1", true, false),
        ("10.70.0.1/32", "10.70.0.1", true, true),
        ("fd00:70::/64", "fd00:70::1", true, false),
        ("fd00:70::1", "fd00:70::1", true, true),
    ] {
        let to = Destination::Cloud { address: address.parse().unwrap(), own };
        assert_eq!(policy(range).permits(caller, to, 10263).is_some(), permitted, "{range} {address} {own}");
    }
}

#[test]
fn callers_are_told_apart_only_by_labels_that_no_kubelet_sets() {
    let parse = |selector: &str| {
        let to = "to: [{service: a.b, ports: [1]}]";
        Policy::parse(&format!("rules:\n- name: a\n  from: [{{nodes: '{selector}'}}]\n  {to}\n"))
    };
    for permitted in [
        "node-role.kubernetes.io/edge",
        "node-restriction.kubernetes.io/site in (berlin, rome),node-role.kubernetes.io/edge",
        "fleet.example.org.node-restriction.kubernetes.io/site=berlin",
        "node-role.kubernetes.io/edge,!node-restriction.kubernetes.io/guest || node-role.kubernetes.io/hq",
    ] {
        assert!(parse(permitted).is_ok(), "{permitted}");
    }
    for (refused, key) in [
        ("site=berlin", "site"),
        ("openyurt.io/is-edge-worker=true", "openyurt.io/is-edge-worker"),
        ("kubernetes.io/hostname in (a)", "kubernetes.io/hostname"),
        ("topology.kubernetes.io/zone=a", "topology.kubernetes.io/zone"),
        ("a.node.kubernetes.io/b", "a.node.kubernetes.io/b"),
        ("node-role.kubernetes.io/edge,site!=rome", "site"),
        ("node-role.kubernetes.io/edge || !x", "x"),
        ("xnode-restriction.kubernetes.io/a", "xnode-restriction.kubernetes.io/a"),
        ("x.node-role.kubernetes.io/a", "x.node-role.kubernetes.io/a"),
        ("node-restriction.kubernetes.io.example.org/a", "node-restriction.kubernetes.io.example.org/a"),
    ] {
        let error = parse(refused).expect_err(refused);
        for part in ["rules[0].from[0]", "nodes", &format!("{key:?}"), "node-restriction.kubernetes.io/"] {
            assert!(error.contains(part), "{refused}: {error:?} lacks {part:?}");
        }
    }
    // A Node that is registered anew, or by somebody else, has no label.
    for refused in
        ["!node-role.kubernetes.io/guest", "node-role.kubernetes.io/a || node-role.kubernetes.io/b!=c"]
    {
        let error = parse(refused).expect_err(refused);
        assert!(error.contains("rules[0].from[0]") && error.contains("without labels"), "{error}");
    }
    // Destinations are reached, and gain nothing.
    assert!(
        Policy::parse("rules:\n- name: a\n  from: [{cn: x}]\n  to: [{nodes: site=a, ports: [1]}]\n").is_ok()
    );
}

#[test]
fn errors_name_the_place_and_the_reason() {
    let rule = |from: &str, to: &str| format!("rules:\n- name: a\n  from: [{from}]\n  to: [{to}]\n");
    let (from, to) = ("{cn: x}", "{node: e, ports: [1]}");
    for (text, parts) in [
        (rule("", to), &["rules[0].from", "empty list"][..]),
        (rule(from, ""), &["rules[0].to", "empty list"]),
        (rule("{}", to), &["rules[0].from[0]", "names nobody"]),
        (rule("{cn: x, user: y}", to), &["rules[0].from[0]", "write two entries"]),
        (rule(from, "{node: e}"), &["rules[0].to[0]", "ports: missing"]),
        (rule(from, "{ports: [1]}"), &["rules[0].to[0]", "names nothing"]),
        (rule(from, "{service: a.b, addresses: [1.2.3.4], ports: [1]}"), &["rules[0].to[0]", "stands alone"]),
        (
            rule(from, "{node: e, ports: [70000]}"),
            &["line 4", "rules[0].to[0].ports", "\"70000\" is not a port"],
        ),
        (rule(from, "{node: e, ports: [9-1]}"), &["rules[0].to[0].ports", "\"9-1\" is not a port"]),
        (rule(from, "{node: e, ports: []}"), &["rules[0].to[0].ports", "no port given"]),
        (rule(from, "{nodes: 'a b', ports: [1]}"), &["rules[0].to[0].nodes", "is not a requirement"]),
        (rule(from, "{node: UPPER/x, ports: [1]}"), &["rules[0].to[0].node"]),
        (rule(from, "{service: prometheus, ports: [1]}"), &["rules[0].to[0].service", "NAME.NAMESPACE"]),
        (rule("{serviceAccount: prometheus}", to), &["rules[0].from[0].serviceAccount", "NAMESPACE/NAME"]),
        (
            rule("{clients: [10.0.0.1/8]}", to),
            &["line 3", "rules[0].from[0].clients", "did you mean 10.0.0.0/8"],
        ),
        (
            rule("{organization: 'system:unauthenticated'}", to),
            &["rules[0].from[0]", "organization", "system:unauthenticated", "matches nobody"],
        ),
        (rule("{group: 'system:unauthenticated'}", to), &["rules[0].from[0]", "group", "matches nobody"]),
        (rule("{clients: []}", to), &["rules[0].from[0].clients", "matches nothing"]),
        (rule("{cm: x}", to), &["line 3", "rules[0].from[0]", "cm"]),
        (format!("{}{}", rule(from, to), &rule(from, to)[7..]), &["rules[1].name", "rules[0] already"]),
        ("rules: 3\n".to_owned(), &["line 1", "rules"]),
        ("deny: []\n".to_owned(), &["deny"]),
    ] {
        let error = Policy::parse(&text).unwrap_err();
        for part in parts {
            assert!(error.contains(part), "{text}: {error:?} lacks {part:?}");
        }
    }
    assert!(Policy::parse("rules: []\n").unwrap().is_empty());
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,60}|rules:\n- (name|from|to): [\\[{a-z0-9:,}\\] ]{0,30}\n") {
        let _ = Policy::parse(&text);
    }
}

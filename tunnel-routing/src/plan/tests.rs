//! Tests the rules for edge nodes' addresses. The rest is tested through the router.

use super::*;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn only_a_host_on_a_network_has_such_an_address() {
    for host in ["10.8.0.7", "169.253.255.255", "169.255.0.1", "223.255.255.255", "fd00::1", "2001:db8::1"] {
        assert!(is_host(ip(host)), "{host}");
    }
    for other in [
        "0.0.0.0",
        "127.0.0.1",
        "224.0.0.1",
        "169.254.1.1",
        "255.255.255.255",
        "::",
        "::1",
        "ff02::1",
        "fe80::1",
        "::ffff:10.8.0.7",
    ] {
        assert!(!is_host(ip(other)), "{other}");
    }
}

#[test]
fn a_node_with_too_many_addresses_is_a_conflict() {
    let inventory = Inventory::from(vec![
        InventoryNode::new("cloud-1".parse().unwrap()),
        InventoryNode { left_out: 2, ..InventoryNode::new("cloud-2".parse().unwrap()) },
    ]);
    let host = HashSet::new();
    let rules = Rules {
        edge_addresses: &[],
        exclude: &[],
        redirect_ranges: &[],
        foreign: &[],
        pods: &[],
        host: &host,
        networks: &HashSet::new(),
    };
    let plan = Plan::new(&inventory, &rules, &Claims::default(), Instant::now());
    let nodes = vec!["cloud-2".parse().unwrap()];
    let conflict = Conflict { kind: ConflictKind::TooMany, address: None, nodes, holder: None };
    assert_eq!(plan.conflicts, BTreeSet::from([conflict]));
}

#[test]
fn pods_keep_their_addresses_from_other_nodes() {
    let node = |name: &str, edge: bool, pods: &[&str]| InventoryNode {
        edge,
        pod_cidrs: pods.iter().map(|range| net(range)).collect(),
        ..InventoryNode::new(name.parse().unwrap())
    };
    let cloud = ["10.16.0.0/16", "10.18.0.0/15", "fd00:1::/64", "fd00:2::/63"];
    // Ordered by name.
    let (one, two) = (1, 2);
    let inventory = Inventory::from(vec![
        node("cloud-1", false, &cloud),
        node("edge-1", true, &[]),
        node("edge-2", true, &["10.244.2.0/24", "10.99.2.0/24"]),
    ]);
    let (host, pods, edge) = (HashSet::new(), [net("10.244.0.0/16")], [net("10.0.0.0/8")]);
    let ranges = |edge_addresses: &[IpNet]| {
        let rules = Rules {
            edge_addresses,
            exclude: &[],
            redirect_ranges: &[],
            foreign: &[],
            pods: &pods,
            host: &host,
            networks: &HashSet::new(),
        };
        PodRanges::new(&inventory, &rules)
    };
    for (address, nodes, of_another) in [
        ("10.16.0.1", &[one][..], true),
        ("fd00:1::1", &[one], true),
        ("10.244.2.5", &[one], true),
        ("10.244.2.5", &[one, two], true),
        ("10.244.2.5", &[two], false),
        // Wider than any node's.
        ("10.18.0.1", &[one], false),
        ("fd00:2::1", &[one], false),
        // Not redirected.
        ("10.99.2.5", &[one], false),
    ] {
        assert_eq!(ranges(&[]).of_another(ip(address), nodes), of_another, "{address} for {nodes:?}");
    }
    // The operator named the edge nodes' addresses.
    let of_another = |address: &str| ranges(&edge).of_another(ip(address), &[one]);
    assert!(!of_another("10.16.0.1") && of_another("10.244.2.5"));
}

#[test]
fn ranges_overlap_what_contains_them_and_what_they_contain() {
    let of = |nets: &[(&str, Claim)]| {
        overlapping(&nets.iter().map(|(range, claim)| (net(range), *claim)).collect::<Vec<_>>())
    };
    let (pods, excluded) = (Claim::Pods(0), Claim::Excluded);
    let nested = [("10.0.0.0/16", pods), ("10.0.0.0/24", pods), ("10.0.0.0/24", pods), ("10.1.0.0/24", pods)];
    assert_eq!(of(&nested), [true, true, true, false]);
    let siblings = [("10.0.0.0/16", pods), ("10.0.1.0/24", excluded), ("10.0.2.0/24", pods)];
    assert_eq!(of(&siblings), [true, false, true]);
    let parts = [("10.0.0.0/16", pods), ("10.0.1.0/24", excluded), ("10.1.0.0/16", pods)];
    assert_eq!(of(&parts), [false; 3], "an excluded part harms nobody");
    let whole = [("10.0.0.0/16", excluded), ("10.0.1.0/24", pods), ("10.0.1.0/25", excluded)];
    assert_eq!(of(&whole), [true, true, false]);
}

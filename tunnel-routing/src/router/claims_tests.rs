//! A node's claims about itself do not change connects to other nodes.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use super::tests::{
    HOST, clients, config, inventory, ip, metrics, name, net, node, route, router, set_live, with_pods,
};
use super::*;
use crate::inventory::InventoryNode;
use crate::{ByAddress, CLOUD_CLAIM_DELAY, Conflict, ConflictKind, MAX_ROUTES, QUARANTINE, RouteTarget};

fn of_age(created: u64, node: InventoryNode) -> InventoryNode {
    InventoryNode { created: Some(at(created)), ..node }
}

/// The time that many seconds after 1970.
fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn conflicts(router: &Router, kind: ConflictKind) -> Vec<Conflict> {
    router.snapshot().conflicts().iter().filter(|conflict| conflict.kind == kind).cloned().collect()
}

/// Target of every redirected address.
fn ways(router: &Router) -> BTreeMap<IpNet, (NodeName, IpAddr, bool)> {
    let snapshot = router.snapshot();
    let desired = router.desired();
    let way = |(net, target): (IpNet, RouteTarget)| {
        snapshot
            .by_virtual_address(target.virtual_address)
            .map(|found| (net, (found.node, found.address, target.up)))
    };
    desired.routes().filter_map(way).collect()
}

fn excluded(router: &Router) -> BTreeSet<IpNet> {
    router.desired().table.excluded.clone()
}

fn everybody() -> Vec<InventoryNode> {
    vec![
        with_pods("cloud-1", false, "10.0.0.2", "10.244.0.0/24"),
        node("edge-1", true, &["10.8.0.1"]),
        node("edge-2", true, &["10.8.0.2", "10.8.0.22"]),
        node("edge-3", true, &["10.8.0.3"]),
    ]
}

/// Adds addresses to `edge-1` that are not its own; returns the routes that it gained.
fn hijacked(router: &Router, more: &[&str]) -> Vec<String> {
    router.set_inventory(inventory(everybody()));
    (1..=3).for_each(|n| set_live(router, &format!("edge-{n}"), true));
    let (before, excluded) = (ways(router), excluded(router));
    assert_eq!(before.len(), 4);
    let mut nodes = everybody();
    nodes[1].addresses.extend(more.iter().map(|address| ip(address)));
    router.set_inventory(inventory(nodes));
    let after = ways(router);
    for (net, way) in &before {
        assert_eq!(after.get(net), Some(way), "{net}");
    }
    assert_eq!(self::excluded(router), excluded);
    after.keys().filter(|net| !before.contains_key(net)).map(|net| net.addr().to_string()).collect()
}

#[test]
fn a_node_does_not_get_what_is_somebody_elses() {
    let (router, registry) = router();
    // This host, a cloud node, its pods, a Service, the cloud node's network, a virtual address, loopback, other edge nodes.
    let others = [
        "10.0.0.1",
        "10.0.0.2",
        "10.244.0.9",
        "10.96.0.1",
        "10.0.0.9",
        "198.18.0.9",
        "127.0.0.1",
        "10.8.0.2",
        "10.8.0.3",
    ];
    assert_eq!(hijacked(&router, &others), [""; 0]);
    assert!(
        matches!(router.snapshot().by_address(ip("10.8.0.2")), ByAddress::Unique(found) if found.node == name("edge-2"))
    );
    assert_eq!(
        router.snapshot().by_address(ip("10.96.0.1")),
        ByAddress::Unknown,
        "nor by the other listeners"
    );
    let metrics = metrics(&registry);
    for (kind, count) in
        [("foreign", 3), ("cloud_and_edge", 1), ("cloud_network", 1), ("unroutable", 2), ("taken", 2)]
    {
        let line = format!("inventory_conflicts{{kind=\"{kind}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    let taken = conflicts(&router, ConflictKind::Taken);
    assert_eq!(
        taken[0].to_string(),
        "address 10.8.0.2 of edge-1: edge-2 named it first and keeps it; reach the others by name"
    );
    let nodes = (0..1000).map(|n| name(&format!("edge-{n}"))).collect();
    let text = Conflict { nodes, ..taken[0].clone() }.to_string();
    assert!(text.contains("edge-4 and 995 more: edge-2 named"), "a log line has room for a few: {text}");
}

#[test]
fn with_edge_addresses_only_these_are_routed() {
    let bounded = RouterConfig { edge_addresses: vec![net("10.8.0.0/16")], ..config() };
    let router = Router::new(bounded, &mut Registry::default());
    assert_eq!(hijacked(&router, &["10.70.0.99", "10.8.7.7"]), ["10.8.7.7"]);
    assert_eq!(conflicts(&router, ConflictKind::NotEdge)[0].address, Some(ip("10.70.0.99")));
}

#[test]
fn a_node_does_not_get_another_nodes_pod() {
    let pods = RouterConfig { pods: vec![net("10.244.0.0/16")], ..config() };
    let router = Router::new(pods, &mut Registry::default());
    let one = || with_pods("edge-1", true, "10.8.0.1", "10.244.1.0/24");
    let two = || with_pods("edge-2", true, "10.8.0.2", "10.244.2.0/24");
    router.set_inventory(inventory(vec![one(), two()]));
    let before = router.desired();
    assert_eq!(before.routes().count(), 4);
    let mut more = one();
    more.addresses.push(ip("10.244.2.5"));
    router.set_inventory(inventory(vec![more, two()]));
    assert!(router.desired().routes().eq(before.routes()));
    assert_eq!(conflicts(&router, ConflictKind::Foreign)[0].address, Some(ip("10.244.2.5")));
}

#[test]
fn the_first_node_keeps_an_address_while_it_has_it() {
    let (router, _) = router();
    let addresses = ["10.8.0.7", "10.8.0.8"];
    let (first, second) =
        (|| of_age(9, node("edge-9", true, &addresses[..1])), || of_age(1, node("edge-1", true, &addresses)));
    router.set_inventory(inventory(vec![first()]));
    let virtual_address = route(&router.desired(), "10.8.0.7").unwrap().virtual_address;
    // Even an older Node is late.
    router.set_inventory(inventory(vec![second(), first()]));
    assert_eq!(route(&router.desired(), "10.8.0.7").unwrap().virtual_address, virtual_address);
    let leads_to =
        |address: &str| ways(&router).get(&IpNet::from(ip(address))).map(|(node, ..)| node.to_string());
    assert_eq!(
        (leads_to("10.8.0.7").as_deref(), leads_to("10.8.0.8").as_deref()),
        (Some("edge-9"), Some("edge-1"))
    );
    assert_eq!(router.snapshot().by_name("edge-1").unwrap().address, ip("10.8.0.7"), "its name still works");
    router.set_inventory(inventory(vec![second()]));
    assert_eq!(leads_to("10.8.0.7").as_deref(), Some("edge-1"));
    router.set_inventory(inventory(vec![second(), first()]));
    assert_eq!(leads_to("10.8.0.7").as_deref(), Some("edge-1"), "now the other is late");
}

#[test]
fn without_history_the_older_node_has_the_address() {
    let load = |ages: [Option<u64>; 3]| {
        let (router, _) = router();
        let nodes = ages.into_iter().zip(1..);
        let nodes = nodes.map(|(age, n)| InventoryNode {
            created: age.map(at),
            ..node(&format!("edge-{n}"), true, &["10.8.0.7"])
        });
        router.set_inventory(inventory(nodes.collect()));
        match router.snapshot().by_address(ip("10.8.0.7")) {
            ByAddress::Unique(found) => Some(found.node.to_string()),
            ByAddress::Ambiguous(_) => None,
            ByAddress::Unknown => panic!("nobody has it"),
        }
    };
    assert_eq!(load([Some(5), Some(3), Some(4)]).as_deref(), Some("edge-2"));
    assert_eq!(load([Some(5), Some(3), Some(3)]), None);
    assert_eq!(load([Some(5), Some(3), None]), None, "its age is not known");
}

#[test]
fn who_was_first_survives_a_restart() {
    let (before, _) = router();
    assert_eq!(before.stored_claims(), None, "nothing is known yet");
    before.set_inventory(inventory(everybody()));
    let stored = before.stored_claims().unwrap();

    let (router, _) = router();
    router.restore_claims(stored).unwrap();
    let mut nodes = everybody();
    nodes.insert(0, of_age(1, node("edge-0", true, &["10.8.0.2"])));
    // edge-1 has become a cloud node meanwhile.
    nodes[2] = node("edge-1", false, &["10.8.0.1", "10.8.0.3"]);
    let start = Instant::now();
    router.set_inventory_at(inventory(nodes), start);
    assert!(
        matches!(router.snapshot().by_address(ip("10.8.0.2")), ByAddress::Unique(found) if found.node == name("edge-2"))
    );
    assert!(
        matches!(router.snapshot().by_address(ip("10.8.0.3")), ByAddress::Unique(found) if found.node == name("edge-3"))
    );
    let excluded = excluded(&router);
    assert!(excluded.contains(&net("10.0.0.2/32")), "a cloud node that was there before");
    assert!(!excluded.contains(&net("10.8.0.1/32")) && !excluded.contains(&net("10.8.0.3/32")));
}

#[test]
fn after_a_restart_an_address_has_its_virtual_address_only_at_its_node() {
    let (before, _) = router();
    before.set_inventory(inventory(everybody()));
    let virtual_addresses = |router: &Router| -> BTreeMap<IpNet, IpAddr> {
        router.desired().routes().map(|(net, target)| (net, target.virtual_address)).collect()
    };
    let given = virtual_addresses(&before);
    assert_eq!(given.len(), 4);

    let (router, _) = router();
    router.restore_claims(before.stored_claims().unwrap()).unwrap();
    router.take_over_addresses(&[], &given.clone().into_iter().collect::<Vec<_>>());
    // Another node has edge-1's address.
    let mut nodes = everybody();
    nodes[1] = node("edge-9", true, &["10.8.0.1"]);
    router.set_inventory(inventory(nodes));
    for (address, virtual_address) in virtual_addresses(&router) {
        let same = address != net("10.8.0.1/32");
        assert_eq!(virtual_address == given[&address], same, "{address}");
        assert!(same || !given.values().any(|other| *other == virtual_address), "{address}");
    }
}

#[test]
fn an_edge_node_that_drops_its_label_excludes_nothing_of_others() {
    let (router, registry) = router();
    let start = Instant::now();
    router.set_inventory_at(inventory(everybody()), start);
    (1..=3).for_each(|n| set_live(&router, &format!("edge-{n}"), true));
    let (before, excluded) = (ways(&router), excluded(&router));
    // It claims others' addresses, one that nobody has, and this host's, for its pods.
    let mut flipped = everybody();
    flipped[1] = with_pods("edge-1", false, "10.8.0.1", "10.244.9.0/24");
    flipped[1].was_edge = true;
    flipped[1].addresses.extend(["10.8.0.2", "10.8.0.3", "10.0.0.2", "10.70.0.99"].map(ip));
    let check = |now: Instant| {
        let after = ways(&router);
        for (net, way) in before.iter().filter(|(_, (node, ..))| node.as_str() != "edge-1") {
            assert_eq!(after.get(net), Some(way), "{net}");
        }
        assert_eq!(route(&router.desired(), "10.8.0.1"), None, "its routes end");
        let more: Vec<_> =
            self::excluded(&router).symmetric_difference(&excluded).map(ToString::to_string).collect();
        (more, *router.due().borrow() == Some(now))
    };
    router.set_inventory_at(inventory(flipped.clone()), start);
    let ripe = start + CLOUD_CLAIM_DELAY;
    assert_eq!(check(ripe), (Vec::new(), true));
    router.refresh_at(ripe - Duration::from_secs(1));
    assert_eq!(check(ripe).0, [""; 0]);
    router.refresh_at(ripe);
    assert_eq!(check(ripe).0, ["10.8.0.1/32", "10.70.0.99/32"], "what nobody else has, after a while");
    assert_eq!(conflicts(&router, ConflictKind::Taken).len(), 2);
    // Switching to and fro does not use up virtual addresses or log lines.
    let virtual_address = |router: &Router| {
        router.set_inventory(inventory(everybody()));
        route(&router.desired(), "10.8.0.1").unwrap().virtual_address
    };
    let first = virtual_address(&router);
    for _ in 0..200 {
        router.set_inventory(inventory(flipped.clone()));
        assert_eq!(virtual_address(&router), first);
    }
    assert!(metrics(&registry).contains("inventory_conflicts{kind=\"no_virtual_address\"} 0\n"));
}

/// Adds addresses of edge-1 to what is there; returns those that lead to it, at any listener.
fn got(router: &Router, nodes: &[InventoryNode], addresses: &[&str], now: Instant) -> Vec<String> {
    let nodes = nodes.iter().cloned().chain([node("edge-1", true, addresses)]);
    router.set_inventory_at(inventory(nodes.collect()), now);
    let routes = ways(router);
    let leads = |address: &&&str| {
        let found = matches!(router.snapshot().by_address(ip(address)), ByAddress::Unique(_));
        assert_eq!(found, routes.contains_key(&IpNet::from(ip(address))), "{address}");
        found
    };
    addresses.iter().filter(leads).map(ToString::to_string).collect()
}

#[test]
fn an_edge_node_gets_nothing_in_the_networks_of_the_cloud() {
    HOST.set(Some(HashSet::from([net("10.70.3.1/20"), net("fd70::1/64")])));
    let cloud = [node("cloud-2", false, &["10.71.0.2", "fd71::2"])];
    let near = ["10.70.9.9", "fd70::9", "10.71.0.99", "fd71::99"];
    let all = [&near[..], &["10.70.16.9", "10.71.1.99", "fd71:0:0:1::99"]].concat();
    let (router, registry) = router();
    assert_eq!(got(&router, &cloud, &all, Instant::now()), all[4..]);
    assert!(metrics(&registry).contains("inventory_conflicts{kind=\"cloud_network\"} 4\n"));
    let told = router.snapshot().conflicts().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(told.len() == 4 && told.iter().all(|text| text.contains("--edge-addresses")), "{told:?}");
    // Unless the operator says so.
    let edge_addresses = ["10.64.0.0/10", "fd70::/15"].map(net).to_vec();
    let router = Router::new(RouterConfig { edge_addresses, ..config() }, &mut Registry::default());
    assert_eq!(got(&router, &cloud, &all, Instant::now()), all);
}

#[test]
fn a_cloud_node_that_comes_takes_the_addresses_around_it_from_nobody() {
    let (router, _) = router();
    let start = Instant::now();
    let later = start + 2 * CLOUD_CLAIM_DELAY;
    assert_eq!(got(&router, &[node("cloud-1", false, &["10.0.0.2"])], &["10.8.0.1"], start), ["10.8.0.1"]);
    // It may be an edge node whose label is missing.
    let cloud = [node("cloud-2", false, &["10.8.0.9"])];
    assert_eq!(got(&router, &cloud, &["10.8.0.1", "10.8.0.2"], start), ["10.8.0.1"]);
    assert_eq!(got(&router, &cloud, &["10.8.0.1", "10.8.0.2"], later), ["10.8.0.1"]);
    let edge = [node("cloud-2", true, &["10.8.0.9"])];
    assert_eq!(got(&router, &edge, &["10.8.0.1", "10.8.0.2"], later), ["10.8.0.1", "10.8.0.2"]);
    let [former] = cloud;
    let former = [InventoryNode { was_edge: true, ..former }];
    assert_eq!(
        got(&router, &former, &["10.8.0.1", "10.8.0.2", "10.8.0.3"], later),
        ["10.8.0.1", "10.8.0.2", "10.8.0.3"]
    );
}

#[test]
fn a_cloud_node_that_comes_later_gets_its_address_after_a_while() {
    for edge_addresses in [vec![], vec![net("10.64.0.0/10")]] {
        let router = Router::new(RouterConfig { edge_addresses, ..config() }, &mut Registry::default());
        let (start, address) = (Instant::now(), "10.70.0.99");
        assert_eq!(got(&router, &[node("cloud-1", false, &["10.0.0.2"])], &[address], start), [address]);
        let cloud = [node("cloud-2", false, &[address])];
        assert_eq!(got(&router, &cloud, &[address], start), [address], "its label may be missing");
        assert_eq!(conflicts(&router, ConflictKind::Taken)[0].nodes, [name("cloud-2")]);
        let ripe = start + CLOUD_CLAIM_DELAY;
        assert_eq!(*router.due().borrow(), Some(ripe));
        router.refresh_at(ripe);
        assert_eq!(route(&router.desired(), address), None);
        assert_eq!(router.snapshot().by_address(ip(address)), ByAddress::Unknown);
        assert!(excluded(&router).contains(&net("10.70.0.99/32")));
        assert_eq!(conflicts(&router, ConflictKind::CloudAndEdge)[0].nodes, [name("edge-1")]);
    }
}

#[test]
fn a_node_that_was_an_edge_node_takes_nothing_as_a_cloud_node() {
    let nodes = |edge: bool| {
        let former = with_pods("former", edge, "10.8.0.2", "10.9.0.0/16");
        vec![
            InventoryNode { was_edge: !edge, ..former },
            node("cloud-1", false, &["10.0.0.2"]),
            node("edge-2", true, &["10.8.0.2"]),
        ]
    };
    let (before, _) = router();
    before.set_inventory(inventory(nodes(true).split_off(1)));
    before.set_inventory(inventory(nodes(true)));
    assert_eq!(conflicts(&before, ConflictKind::Taken)[0].nodes, [name("former")], "it holds nothing");
    let (restarted, _) = router();
    restarted.restore_claims(before.stored_claims().unwrap()).unwrap();
    for router in [before, restarted] {
        let start = Instant::now();
        router.set_inventory_at(inventory(nodes(false)), start);
        router.refresh_at(start + 2 * CLOUD_CLAIM_DELAY);
        assert_eq!(ways(&router).get(&net("10.8.0.2/32")).unwrap().0, name("edge-2"));
        // Nor do its pods' ranges keep an address from an edge node.
        let now = start + 2 * CLOUD_CLAIM_DELAY;
        assert_eq!(got(&router, &nodes(false), &["10.9.0.7"], now), ["10.9.0.7"]);
        // A Node of that name that is created later is another one.
        router.set_inventory_at(inventory(nodes(false).split_off(1)), now);
        let mut created_again = nodes(false);
        created_again[0].was_edge = false;
        router.set_inventory_at(inventory(created_again), now);
        router.refresh_at(now + CLOUD_CLAIM_DELAY);
        assert_eq!(ways(&router).get(&net("10.8.0.2/32")), None);
    }
}

#[test]
fn a_cloud_node_that_names_this_hosts_address_late_is_not_this_host() {
    let (router, _) = router();
    let here = with_pods("cloud-1", false, "10.0.0.1", "10.244.0.0/24");
    router.set_inventory(inventory(vec![here.clone(), node("edge-1", true, &["10.8.0.1"])]));
    let flipped = with_pods("edge-1", false, "10.0.0.1", "10.244.9.0/24");
    router.set_inventory(inventory(vec![flipped, here]));
    assert_eq!(clients(&router), ["10.244.0.0/24", "192.0.2.0/24"]);
}

#[test]
fn a_node_that_names_ever_new_addresses_uses_up_its_share_only() {
    let mut registry = Registry::default();
    let small = RouterConfig { redirect_range: net4("198.18.0.0/23"), ..config() };
    let router = Router::new(small, &mut registry);
    let start = Instant::now();
    let other = node("edge-2", true, &["10.8.0.2"]);
    let mut seen = BTreeSet::new();
    for round in 0..100u8 {
        let addresses: Vec<_> = (0..16).map(|n| format!("10.9.{round}.{n}")).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        router.set_inventory_at(inventory(vec![node("edge-1", true, &addresses), other.clone()]), start);
        seen.extend(router.desired().routes().map(|(_, target)| target.virtual_address));
    }
    assert!(seen.len() < 70, "{} virtual addresses were used", seen.len());
    assert_eq!(conflicts(&router, ConflictKind::NoVirtualAddress).len(), 16);
    // A new node still gets one.
    let mut nodes = vec![node("edge-1", true, &["10.9.99.0"]), other, node("edge-3", true, &["10.8.0.3"])];
    router.set_inventory_at(inventory(nodes.clone()), start);
    assert!(ways(&router).contains_key(&net("10.8.0.3/32")));
    assert_eq!(conflicts(&router, ConflictKind::NoVirtualAddress)[0].nodes, [name("edge-1")]);
    // Its own is free after the quarantine, without a change of the nodes.
    let due = router.due().borrow().unwrap();
    assert!(due <= start + QUARANTINE, "{:?}", due - start);
    router.refresh_at(due);
    assert!(ways(&router).contains_key(&net("10.9.99.0/32")));
    nodes.truncate(1);
    assert_eq!(conflicts(&router, ConflictKind::NoVirtualAddress), []);
}

fn net4(text: &str) -> ipnet::Ipv4Net {
    text.parse().unwrap()
}

#[test]
fn what_waits_for_a_virtual_address_gets_it_when_it_is_free() {
    let small = RouterConfig { redirect_range: net4("198.18.0.0/24"), ..config() };
    let router = Router::new(small, &mut Registry::default());
    let nodes =
        |from: u8, to: u8| (from..to).map(|i| node(&format!("edge-{i}"), true, &[&format!("10.8.0.{i}")]));
    let start = Instant::now();
    router.set_inventory_at(inventory(nodes(0, 238).collect()), start);
    assert_eq!((ways(&router).len(), *router.due().borrow()), (238, None));
    let later = start + Duration::from_secs(100);
    router.set_inventory_at(inventory(nodes(238, 240).collect()), later);
    assert_eq!((ways(&router).len(), *router.due().borrow()), (0, Some(later + QUARANTINE)));
    let mut changed = router.changed();
    changed.mark_unchanged();
    router.refresh_at(later + QUARANTINE);
    assert_eq!((ways(&router).len(), *router.due().borrow()), (2, None));
    assert!(changed.has_changed().unwrap(), "the redirect is notified");
}

#[test]
fn what_fits_into_the_kernel_is_routed_and_the_rest_is_a_conflict() {
    let wide = RouterConfig { redirect_range: net4("100.64.0.0/10"), ..config() };
    let router = Router::new(wide, &mut Registry::default());
    let many = |first: u32, count: u32| {
        (first..first + count).map(|i| {
            let address = IpAddr::from((u32::from(Ipv4Addr::new(11, 0, 0, 0)) + i).to_be_bytes());
            InventoryNode { addresses: vec![address], ..node(&format!("edge-{i}"), true, &[]) }
        })
    };
    let most = u32::try_from(MAX_ROUTES).unwrap();
    router.set_inventory(inventory(many(9000, 1000).collect()));
    let before = ways(&router);
    router.set_inventory(inventory(many(0, most + 10).collect()));
    let after = ways(&router);
    assert_eq!(after.len(), MAX_ROUTES);
    assert!(before.iter().all(|(net, way)| after.get(net) == Some(way)), "those that were there stay");
    let left = conflicts(&router, ConflictKind::NoRoom);
    assert_eq!(left.len(), 10);
    let address = left[0].address.unwrap();
    assert!(
        matches!(router.snapshot().by_address(address), ByAddress::Unique(_)),
        "the other listeners lead there"
    );
}

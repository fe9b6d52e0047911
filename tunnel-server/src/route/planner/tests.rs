//! What does not fit, and what one change costs.

use std::net::Ipv4Addr;

use super::*;

fn config(token_range: &str, pods: &[&str]) -> RouterConfig {
    RouterConfig {
        pods: pods.iter().map(|range| range.parse().unwrap()).collect(),
        ..RouterConfig::new(token_range.parse().unwrap(), "fd00:706f::/64".parse().unwrap(), [10250])
    }
}

fn node(name: &str, addresses: &[&str], pods: &[&str]) -> InventoryNode {
    InventoryNode {
        edge: true,
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        pod_cidrs: pods.iter().map(|range| range.parse().unwrap()).collect(),
        ..InventoryNode::without_addresses(name)
    }
}

fn plan(planner: &mut Planner, config: &RouterConfig, inventory: Arc<Inventory>, now: Instant) -> Planned {
    let planned = planner.plan(config, inventory, false, now);
    planner.done();
    planned
}

/// The n-th of many nodes, with one address.
fn nth(n: u32) -> InventoryNode {
    let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(11, 0, 0, 0)) + n);
    node(&format!("edge-{n}"), &[&address.to_string()], &[])
}

#[test]
fn addresses_and_pods_share_a_table_and_what_is_there_stays() {
    let config = config("198.18.0.0/15", &["10.244.0.0/16"]);
    let nodes = [
        node("edge-1", &["10.8.0.1", "fd00:8::1"], &["10.244.1.0/24"]),
        node("edge-2", &["10.8.0.2"], &[]),
        node("edge-3", &["10.8.0.3"], &[]),
    ];
    let left = |address: &str, node: &str| Conflict {
        kind: ConflictKind::NoRoom,
        address: Some(address.parse().unwrap()),
        nodes: vec![node.parse().unwrap()],
        holder: None,
    };
    let fitted = |most: usize| {
        let mut planner = Planner::new(&config, &mut Registry::default());
        planner.set_room(most);
        let mut routed = BTreeSet::new();
        let mut conflicts = Vec::new();
        // The second one is there already, and an address that leaves makes room.
        for nodes in [&nodes[1..2], &nodes[..], &nodes[..2], &nodes[..]] {
            let inventory = Arc::new(Inventory::from(nodes.to_vec()));
            let planned = plan(&mut planner, &config, inventory, Instant::now());
            for (net, route) in planned.routes {
                if route.is_some() {
                    routed.insert(net)
                } else {
                    routed.remove(&net)
                };
            }
            conflicts.push(planned.snapshot.conflicts().iter().cloned().collect::<Vec<_>>());
        }
        (routed.into_iter().map(|net| net.to_string()).collect::<Vec<_>>(), conflicts)
    };
    let all = ["10.8.0.1/32", "10.8.0.2/32", "10.8.0.3/32", "10.244.1.0/24", "fd00:8::1/128"];
    assert_eq!(fitted(4), (all.map(str::to_owned).to_vec(), vec![Vec::new(); 4]));
    let pods = left("10.244.1.0", "edge-1");
    // The table of IPv6 routes has room. The pods get the place of the address that left, and keep it.
    let (routed, conflicts) = fitted(3);
    assert_eq!(routed, [all[0], all[1], all[3], all[4]]);
    assert_eq!(conflicts, [vec![], vec![pods.clone()], vec![], vec![left("10.8.0.3", "edge-3")]]);
    let (routed, conflicts) = fitted(1);
    assert_eq!(routed, [all[1], all[4]]);
    assert_eq!(conflicts[3], [left("10.8.0.1", "edge-1"), left("10.8.0.3", "edge-3"), pods]);
}

#[test]
fn one_change_of_100_000_nodes_decides_one_route() {
    let config = config("100.64.0.0/10", &[]);
    let mut planner = Planner::new(&config, &mut Registry::default());
    let now = Instant::now();
    let mut inventory: Inventory = (0..100_000).map(nth).collect();
    plan(&mut planner, &config, Arc::new(inventory.clone()), now);
    let mut longest = Duration::ZERO;
    let mut counts = Vec::new();
    for n in 0..50 {
        let changed = match n % 3 {
            0 => node(&format!("edge-{}", n * 1000), &[&format!("12.0.0.{n}")], &[]),
            1 => InventoryNode { kubelet_port: 10350, ..nth(n * 1000) },
            _ => nth(200_000 + n),
        };
        inventory.insert(changed);
        let shared = Arc::new(inventory.clone());
        let started = Instant::now();
        let planned = plan(&mut planner, &config, shared, now);
        longest = longest.max(started.elapsed());
        counts.push((planned.routes.len(), planned.following.len(), planned.anew));
    }
    println!("one of 100,000 nodes changed: {longest:?} at most of 50 times");
    // Another address: the one goes, the other comes. Another port: nothing. Another node: one comes.
    let expected = [(2, 1, false), (0, 0, false), (1, 1, false)];
    for (n, count) in counts.into_iter().enumerate() {
        assert_eq!(count, expected[n % 3], "change {n}");
    }
}

#[test]
fn tokens_that_are_too_few_go_round() {
    // 238 tokens: 256 without the network's, the unassigned one and the reserved 16.
    let config = config("198.18.0.0/24", &[]);
    let mut planner = Planner::new(&config, &mut Registry::default());
    let start = Instant::now();
    let mut inventory: Inventory = (0..300).map(nth).collect();
    let planned = plan(&mut planner, &config, Arc::new(inventory.clone()), start);
    let with = |planner: &Planner| planner.entries.values().filter(|entry| entry.token.is_some()).count();
    assert_eq!((planned.routes.len(), with(&planner)), (300, 238));
    assert_eq!(planner.shortage(), Shortage { routes: [0, 0], tokens: [[62, 0], [0, 0]] });
    (0..10).for_each(|n| assert!(inventory.remove(&format!("edge-{n}"))));
    let planned = plan(&mut planner, &config, Arc::new(inventory.clone()), start);
    assert_eq!((planned.routes.len(), with(&planner)), (10, 228), "theirs are in quarantine");
    let due = planned.due.unwrap();
    let planned = plan(&mut planner, &config, Arc::new(inventory), due);
    assert_eq!((planned.routes.len(), with(&planner), planned.due), (10, 238, None));
    assert_eq!(planner.shortage().tokens, [[52, 0], [0, 0]]);
}

#[test]
fn what_was_half_done_is_done_anew() {
    let config = config("198.18.0.0/15", &[]);
    let mut planner = Planner::new(&config, &mut Registry::default());
    let (now, inventory) = (Instant::now(), Arc::new((0..300).map(nth).collect::<Inventory>()));
    let before = plan(&mut planner, &config, inventory.clone(), now);
    planner.distrust();
    let after = plan(&mut planner, &config, inventory, now);
    assert!(after.anew && !after.claims_changed);
    assert_eq!((after.routes, after.following), (before.routes, before.following), "the tokens too");
}

//! Many nodes, many connections. Times are reported, not asserted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tunnel_redirect::{Applied, Redirect, RedirectConfig, fails_at_connect, host_checks};
use tunnel_routing::inventory::InventoryNode;
use tunnel_routing::{MAX_ROUTES, RouteTarget, Router, RouterConfig, TunnelHolder};

use crate::Case;
use crate::peer::Peer;
use crate::support::{EDGE, Listener, PORT, State, World, ask, config, counter, desired, sysctl};

pub(crate) const CASES: &[Case] = &[
    ("scale::no_change_is_no_write", no_change),
    ("scale::five_thousand_nodes_and_a_hundred_thousand", many_nodes),
    ("scale::what_does_not_fit_is_left_out_and_the_rest_works", too_many),
    ("scale::a_redirect_range_that_is_too_small_serves_whom_it_can", too_few_virtual_addresses),
    ("scale::thirty_thousand_connections_to_one_node", many_connections),
];

/// `count` edge nodes, each with a route, and `cloud` excluded cloud nodes.
fn cluster(count: u32, cloud: u32) -> State {
    let edge = |n: u32| IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a20_0000 + n)));
    let virtual_address = |n: u32| IpAddr::V4(Ipv4Addr::from(0xc612_0002 + n));
    State {
        ports: [10250, 10255, 9100].into(),
        excluded: (0..cloud).map(|n| IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a10_0000 + n)))).collect(),
        clients: BTreeSet::new(),
        routes: (0..count)
            .map(|n| {
                (edge(n), RouteTarget { virtual_address: virtual_address(n), up: true, any_port: false })
            })
            .collect(),
    }
}

fn no_change() {
    let world = World::start(&cluster(100, 10));
    let mut state = cluster(100, 10);
    assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied::default());
    let first = *state.routes.keys().next().unwrap();
    state.routes.get_mut(&first).unwrap().up = false;
    assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied { writes: 1, deletes: 0 });
    assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied::default());
    state.routes.remove(&first);
    assert_eq!(
        world.redirect.apply(|| state.clone().into()).unwrap(),
        Applied { writes: 0, deletes: 2 },
        "the route and its origin"
    );
    state.ports.remove(&9100);
    assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied { writes: 0, deletes: 1 });
    assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied::default());
}

fn many_nodes() {
    let world = World::start(&State::default());
    for (count, cloud) in [(5_000, 100), (100_000, 5_000)] {
        let state = cluster(count, cloud);
        let begun = Instant::now();
        let applied = world.redirect.apply(|| state.clone().into()).unwrap();
        let full = begun.elapsed();
        let begun = Instant::now();
        assert_eq!(world.redirect.apply(|| state.clone().into()).unwrap(), Applied::default());
        let nothing = begun.elapsed();
        let mut down = state.clone();
        let first = *down.routes.keys().next().unwrap();
        down.routes.get_mut(&first).unwrap().up = false;
        let begun = Instant::now();
        assert_eq!(world.redirect.apply(|| down.clone().into()).unwrap(), Applied { writes: 1, deletes: 0 });
        println!(
            "report {count} nodes x 3 ports, {cloud} cloud nodes: {} writes in {full:?}; no change {nothing:?}; one change {:?}{}",
            applied.writes,
            begun.elapsed(),
            if cfg!(debug_assertions) { " (unoptimised build)" } else { "" }
        );
        world.redirect.apply(|| state.clone().into()).unwrap();
        // The first, the last, one in between.
        for n in [0, count / 2, count - 1] {
            let (edge, virtual_address) = (Ipv4Addr::from(0x0a20_0000 + n), Ipv4Addr::from(0xc612_0002 + n));
            assert_eq!(ask((edge, PORT).into()).unwrap().local, (virtual_address, PORT).into());
        }
        let mut times: Vec<Duration> = (0..2_000_u32)
            .map(|n| {
                let edge = Ipv4Addr::from(0x0a20_0000 + n * (count / 2_000));
                let begun = Instant::now();
                let stream = TcpStream::connect((edge, PORT)).unwrap();
                let took = begun.elapsed();
                drop(stream);
                took
            })
            .collect();
        times.sort();
        println!("report connect() among {count} nodes: p50 {:?}, p99 {:?}", times[1_000], times[1_980]);
    }
    let begun = Instant::now();
    world.redirect.stop();
    println!("report stop with 100000 nodes: {:?}", begun.elapsed());
}

/// A router whose nodes have one address each, from 11.0.0.0 on, and their sessions.
fn routed(nodes: u32, redirect_range: &str) -> (Router, Registry) {
    let config = RouterConfig::new(
        redirect_range.parse().unwrap(),
        RedirectConfig::default().redirect_range_v6,
        [PORT],
    );
    let mut registry = Registry::default();
    let router = Router::new(config, &mut registry);
    router.set_inventory((0..nodes).map(node).collect());
    (0..nodes).for_each(|n| router.set_live(&format!("edge-{n}").parse().unwrap(), TunnelHolder::This, true));
    (router, registry)
}

fn node(n: u32) -> InventoryNode {
    InventoryNode {
        name: format!("edge-{n}").parse().unwrap(),
        edge: true,
        addresses: vec![nth(n).into()],
        left_out: 0,
        kubelet_port: PORT,
        pod_cidrs: Vec::new(),
        created: None,
        was_edge: false,
        labels: BTreeMap::new(),
    }
}

fn nth(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0b00_0000 + n)
}

/// Number of addresses of the inventory that are counted under this kind.
fn counted(registry: &Registry, kind: &str) -> usize {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    let line = text.lines().find(|line| line.contains(&format!("kind=\"{kind}\"")));
    line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).expect("the metric is there")
}

fn too_many() {
    let world = World::with(
        RedirectConfig { redirect_range: "100.64.0.0/10".parse().unwrap(), ..config() },
        &State::default(),
    );
    let (router, registry) = routed(140_001, "100.64.0.0/10");
    let begun = Instant::now();
    let applied = world.redirect.apply(|| router.desired()).unwrap();
    println!("report 140,001 nodes: {} writes in {:?}", applied.writes, begun.elapsed());
    let left_out = 140_001 - MAX_ROUTES;
    assert_eq!(counted(&registry, "no_room"), left_out);
    assert_eq!(router.snapshot().conflicts().len(), left_out, "and status lists them");
    // The first and the last of those that fit.
    for n in [0, u32::try_from(MAX_ROUTES).unwrap() - 1] {
        let virtual_address = router.desired().route(IpAddr::V4(nth(n)).into()).unwrap().virtual_address;
        assert_eq!(ask((nth(n), PORT).into()).unwrap().local, (virtual_address, PORT).into());
    }
    // An agent that leaves costs one write.
    router.set_live(&"edge-7".parse().unwrap(), TunnelHolder::This, false);
    assert_eq!(world.redirect.apply(|| router.desired()).unwrap(), Applied { writes: 1, deletes: 0 });
    // A node that has gone makes room for one that waits, which is written first.
    router.set_inventory((0..140_001).filter(|n| *n != 7).map(node).collect());
    assert_eq!(world.redirect.apply(|| router.desired()).unwrap(), Applied { writes: 2, deletes: 2 });
    let next = nth(u32::try_from(MAX_ROUTES).unwrap());
    let virtual_address = router.desired().route(IpAddr::V4(next).into()).unwrap().virtual_address;
    assert_eq!(ask((next, PORT).into()).unwrap().local, (virtual_address, PORT).into());

    // Exclusions that do not fit change nothing, because no route has them. Nor do others in their place.
    for first in [0x0c00_0000_u32, 0x0d00_0000] {
        let mut state = router.desired();
        let table = Arc::make_mut(&mut state.table);
        for n in 0..131_073_u32 {
            table.excluded.insert(IpNet::from(IpAddr::V4(Ipv4Addr::from(first + n))));
        }
        world.redirect.apply(|| state).unwrap();
        assert!(world.redirect.health().left_out > 0);
    }
    println!("report {} exclusions left out", world.redirect.health().left_out);
    let virtual_address = router.desired().route(IpAddr::V4(nth(1)).into()).unwrap().virtual_address;
    assert_eq!(ask((nth(1), PORT).into()).unwrap().local, (virtual_address, PORT).into());
    world.redirect.apply(|| router.desired()).unwrap();
    assert_eq!(world.redirect.health().left_out, 0);
}

fn too_few_virtual_addresses() {
    let world = World::with(
        RedirectConfig { redirect_range: "198.18.0.0/24".parse().unwrap(), ..config() },
        &State::default(),
    );
    let (router, registry) = routed(1000, "198.18.0.0/24");
    world.redirect.apply(|| router.desired()).unwrap();
    let desired = router.desired();
    let with: Vec<u32> =
        (0..1000).filter(|n| desired.route(IpAddr::V4(nth(*n)).into()).unwrap().up).collect();
    assert_eq!(counted(&registry, "no_virtual_address"), 1000 - with.len());
    assert_eq!(with.len(), 238, "256 without the network's, the unassigned one and the reserved 16");
    for n in [with[0], with[237]] {
        let virtual_address = desired.route(IpAddr::V4(nth(n)).into()).unwrap().virtual_address;
        assert_eq!(ask((nth(n), PORT).into()).unwrap().local, (virtual_address, PORT).into());
    }
    // A node without a virtual address is not reached by another way, where the kernel can fail a connect.
    let kernel = host_checks(&config()).into_iter().find(|check| check.name == "kernel").unwrap();
    if fails_at_connect(&kernel.outcome.unwrap()) {
        let without = (0..1000).find(|n| !with.contains(n)).unwrap();
        TcpStream::connect((nth(without), PORT)).unwrap_err();
    }
}

fn many_connections() {
    const COUNT: usize = 30_000;
    sysctl("net.ipv4.ip_local_port_range", "1024 65535");
    let listener = Listener::open();
    let redirect = Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap();
    redirect.apply(|| desired(&[EDGE]).into()).unwrap();
    // As many processes on either side as the descriptor limit makes necessary.
    let each = (crate::peer::raise_descriptor_limit() - 100).min(COUNT);
    let processes = COUNT.div_ceil(each);
    // One more than needed: the kernel does not share connections out evenly.
    let _acceptors: Vec<Peer> = (0..=processes).map(|_| Peer::spawn_acceptor(&listener.v4, each)).collect();
    let mut holders = Vec::new();
    let mut times = Vec::new();
    while times.len() < COUNT {
        let (holder, took) = Peer::spawn_holder(each.min(COUNT - times.len()));
        holders.push(holder);
        times.extend(took);
    }
    assert_eq!(counter(&redirect, "connect4/redirected") as usize, COUNT + 1, "and the self-test");
    assert_eq!(established(), COUNT, "held connections");
    for (what, part) in
        [("first", &mut times[..1_000].to_vec()), ("last", &mut times[COUNT - 1_000..].to_vec())]
    {
        part.sort();
        println!(
            "report connect(), {what} 1000 of {COUNT} held to one node: p50 {:?}, p99 {:?}",
            part[500], part[990]
        );
    }
}

/// Established connections whose remote end is the edge's virtual address: the clients' ends.
fn established() -> usize {
    const ESTABLISHED: &str = "01";
    let virtual_address: Ipv4Addr = EDGE.1.parse().unwrap();
    let remote = format!("{:08X}:{PORT:04X}", u32::from_ne_bytes(virtual_address.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields
        .filter(|fields| fields.get(2) == Some(&remote.as_str()) && fields.get(3) == Some(&ESTABLISHED))
        .count()
}

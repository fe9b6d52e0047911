//! Many nodes, many connections. Times are reported, not asserted.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tunnel_server::redirect::{Applied, Desired, Redirect, RedirectError, RouteTarget};

use crate::Case;
use crate::peer::Peer;
use crate::support::{Door, EDGE, PORT, World, ask, at, config, counter, desired, sysctl};

pub(crate) const CASES: &[Case] = &[
    ("scale::no_change_is_no_write", no_change),
    ("scale::five_thousand_nodes_and_a_hundred_thousand", many_nodes),
    ("scale::more_than_fits_is_refused_and_nothing_lost", too_many),
    ("scale::thirty_thousand_connections_to_one_node", many_connections),
];

/// `count` edge nodes, each with a route, and `cloud` excluded cloud nodes.
fn cluster(count: u32, cloud: u32) -> Desired {
    let edge = |n: u32| IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a20_0000 + n)));
    let token = |n: u32| IpAddr::V4(Ipv4Addr::from(0xc612_0002 + n));
    Desired {
        ports: [10250, 10255, 9100].into(),
        excluded: (0..cloud).map(|n| IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0a10_0000 + n)))).collect(),
        clients: BTreeSet::new(),
        routes: (0..count)
            .map(|n| (edge(n), RouteTarget { token: token(n), up: true, any_port: false }))
            .collect(),
    }
}

fn no_change() {
    let world = World::start(&cluster(100, 10));
    let mut state = cluster(100, 10);
    assert_eq!(world.redirect.apply(&state).unwrap(), Applied::default());
    let first = *state.routes.keys().next().unwrap();
    state.routes.get_mut(&first).unwrap().up = false;
    assert_eq!(world.redirect.apply(&state).unwrap(), Applied { writes: 1, deletes: 0 });
    assert_eq!(world.redirect.apply(&state).unwrap(), Applied::default());
    state.routes.remove(&first);
    assert_eq!(
        world.redirect.apply(&state).unwrap(),
        Applied { writes: 0, deletes: 2 },
        "the route and its origin"
    );
    state.ports.remove(&9100);
    assert_eq!(world.redirect.apply(&state).unwrap(), Applied { writes: 0, deletes: 1 });
    assert_eq!(world.redirect.apply(&state).unwrap(), Applied::default());
}

fn many_nodes() {
    let world = World::start(&Desired::default());
    for (count, cloud) in [(5_000, 100), (100_000, 5_000)] {
        let state = cluster(count, cloud);
        let begun = Instant::now();
        let applied = world.redirect.apply(&state).unwrap();
        let full = begun.elapsed();
        let begun = Instant::now();
        assert_eq!(world.redirect.apply(&state).unwrap(), Applied::default());
        let nothing = begun.elapsed();
        let mut down = state.clone();
        down.routes.values_mut().next().unwrap().up = false;
        let begun = Instant::now();
        assert_eq!(world.redirect.apply(&down).unwrap(), Applied { writes: 1, deletes: 0 });
        println!(
            "report {count} nodes x 3 ports, {cloud} cloud nodes: {} writes in {full:?}; no change {nothing:?}; one change {:?}{}",
            applied.writes,
            begun.elapsed(),
            if cfg!(debug_assertions) { " (unoptimised build)" } else { "" }
        );
        world.redirect.apply(&state).unwrap();
        // The first, the last, one in between.
        for n in [0, count / 2, count - 1] {
            let (edge, token) = (Ipv4Addr::from(0x0a20_0000 + n), Ipv4Addr::from(0xc612_0002 + n));
            assert_eq!(ask((edge, PORT).into()).unwrap().local, (token, PORT).into());
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

fn too_many() {
    let world = World::start(&desired(&[EDGE]));
    let mut state = Desired { ports: [PORT].into(), ..Desired::default() };
    for n in 0..131_073_u32 {
        state.excluded.insert(IpNet::from(IpAddr::V4(Ipv4Addr::from(0x0b00_0000 + n))));
    }
    let error = world.redirect.apply(&state).unwrap_err();
    assert!(matches!(error, RedirectError::Full { .. }), "{error}");
    println!("report {error}");
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    assert_eq!(world.redirect.apply(&desired(&[EDGE])).unwrap(), Applied::default());
}

fn many_connections() {
    const COUNT: usize = 30_000;
    sysctl("net.ipv4.ip_local_port_range", "1024 65535");
    let door = Door::open();
    let redirect = Redirect::start(config(), &door.v4, Some(&door.v6)).unwrap();
    redirect.apply(&desired(&[EDGE])).unwrap();
    // As many processes on either side as the descriptor limit makes necessary.
    let each = (crate::peer::raise_descriptor_limit() - 100).min(COUNT);
    let processes = COUNT.div_ceil(each);
    // One more than needed: the kernel does not share connections out evenly.
    let _acceptors: Vec<Peer> = (0..=processes).map(|_| Peer::spawn_acceptor(&door.v4, each)).collect();
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

/// Established connections whose remote end is the edge's token: the clients' ends.
fn established() -> usize {
    const ESTABLISHED: &str = "01";
    let token: Ipv4Addr = EDGE.1.parse().unwrap();
    let remote = format!("{:08X}:{PORT:04X}", u32::from_ne_bytes(token.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields
        .filter(|fields| fields.get(2) == Some(&remote.as_str()) && fields.get(3) == Some(&ESTABLISHED))
        .count()
}

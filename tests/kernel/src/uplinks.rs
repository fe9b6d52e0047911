//! Interfaces that lead to other hosts, by which no packet of this host's pods comes in.

use std::fs;
use std::io::Write as _;
use std::sync::Mutex;
use std::time::Instant;

use tunnel_redirect::RedirectConfig;

use crate::Case;
use crate::by_route::{asks, by_route, pod_of_this_host, start};
use crate::lifecycle::runtime;
use crate::peer::Peer;
use crate::support::{EDGE, POD_RANGE, World, desired, ip, net_of, with_client};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_neighbour_is_no_pod_of_this_host", spoofed_pod),
    ("by_route::a_neighbour_is_no_pod_by_any_routing_table", other_tables),
    ("by_route::a_next_hop_without_an_interface_is_reported", next_hops),
    ("scale::uplinks_beside_a_full_routing_table", full_table),
];

/// A neighbour on `lan0` with an address of this host's pods. A plugin such as Calico may give other hosts' pods addresses of the
/// range that a Node's spec names.
pub(crate) fn neighbour() -> Peer {
    let neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    neighbour.ip("addr add 10.244.1.200/32 dev eth0");
    ip("route add 10.244.1.200/32 via 10.1.0.2");
    neighbour
}

/// Checks that the neighbour is refused, and the pod is not.
#[track_caller]
pub(crate) fn refused(world: &World, neighbour: &mut Peer, pod: &mut Peer, what: &str) {
    let before = (world.counter("route4/foreign_client"), world.counter("route4/steered"));
    neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap_err();
    assert!(world.counter("route4/foreign_client") > before.0, "{what}");
    assert_eq!(world.counter("route4/steered"), before.1, "{what}");
    asks(pod, "10.8.0.7:10250").unwrap();
}

fn spoofed_pod() {
    let (mut pod, mut neighbour) = (pod_of_this_host(), neighbour());
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    let world = start(desired(&[EDGE]));
    // It comes from the network of a cloud host, or that of the default route.
    state.excluded.insert(net_of("10.1.0.9"));
    world.redirect.apply(|| state.clone().into()).unwrap();
    refused(&world, &mut neighbour, &mut pod, "a cloud host's network");
    state.excluded.clear();
    ip("route add default via 10.1.0.2");
    world.redirect.apply(|| state.clone().into()).unwrap();
    refused(&world, &mut neighbour, &mut pod, "the default route");
    drop(world);
    // Unless it is named: --redirect-clients.
    let world = World::with(RedirectConfig { clients: vec![net_of("10.244.0.0/16")], ..by_route() }, &state);
    neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap();
    assert_eq!(world.counter("route4/steered"), 1);
}

/// Of a host with two networks, or of a cloud's second interface: its default route is in a table of its own.
fn other_tables() {
    let (mut pod, mut neighbour) = (pod_of_this_host(), neighbour());
    ip("rule add pref 1000 from 10.1.0.1 lookup 100");
    ip("route add default via 10.1.0.2 dev lan0 table 100");
    let world = start(desired(&[EDGE]));
    refused(&world, &mut neighbour, &mut pod, "a default route of another table");
    drop(world);
    // One of several next hops.
    ip("route replace table 100 default nexthop via 10.1.0.2 dev lan0 nexthop via 10.1.0.3 dev lan0");
    let world = start(desired(&[EDGE]));
    refused(&world, &mut neighbour, &mut pod, "several next hops");
    drop(world);
    // Routes that lead to no interface, as of Cilium's table for its proxy, and one to pods.
    ip("route flush table 100");
    ip("route add local default dev lo table 100");
    ip("route add unreachable default table 101");
    ip("route add 10.244.1.0/24 dev lan0 table 102");
    let world = start(desired(&[EDGE]));
    neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap();
    assert_eq!(world.counter("route4/steered"), 1, "lan0 is not known to lead to other hosts");
}

/// Of a host whose routing daemon makes next hops of their own, without the interfaces that old programs look for.
fn next_hops() {
    let (mut pod, mut neighbour) = (pod_of_this_host(), neighbour());
    let file = tempfile::NamedTempFile::new().unwrap();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter("warn")
        .with_ansi(false)
        .with_writer(Mutex::new(file.reopen().unwrap()))
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let warned = || fs::read_to_string(file.path()).unwrap().contains("set net.ipv4.nexthop_compat_mode=1");
    ip("nexthop add id 7 via 10.1.0.2 dev lan0");
    ip("route add default nhid 7");
    let world = start(desired(&[EDGE]));
    refused(&world, &mut neighbour, &mut pod, "a next hop with its interface");
    assert!(!warned());
    drop(world);
    fs::write("/proc/sys/net/ipv4/nexthop_compat_mode", "0").unwrap();
    let world = start(desired(&[EDGE]));
    assert!(warned());
    neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap();
    assert_eq!(world.counter("route4/steered"), 1, "it is known by its address alone");
    drop(world);
    // The other interfaces are known.
    ip("route add default via 10.1.0.2 dev lan0 table 100");
    let world = start(desired(&[EDGE]));
    refused(&world, &mut neighbour, &mut pod, "a route of another table");
}

/// Of a host that speaks BGP: what is not needed is not stored.
fn full_table() {
    const ROUTES: u32 = 200_000;
    let (mut pod, mut neighbour) = (pod_of_this_host(), neighbour());
    ip("route add default via 10.1.0.2");
    let mut batch = tempfile::NamedTempFile::new().unwrap();
    for n in 0..ROUTES {
        let [a, b, c, _] = (0x1400_0000 + (n << 8)).to_be_bytes();
        writeln!(batch, "route add {a}.{b}.{c}.0/24 via 10.1.0.2 proto bird").unwrap();
    }
    ip(&format!("-batch {}", batch.path().display()));
    let world = start(desired(&[EDGE]));
    let peak = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // The peak begins anew.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak();
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    state.excluded.insert(net_of("10.1.0.9"));
    let begun = Instant::now();
    world.redirect.apply(|| state.into()).unwrap();
    let (taken, grown) = (begun.elapsed(), peak().saturating_sub(before));
    println!("report a change beside {ROUTES} routes of others: {taken:?}, {grown} kB more");
    assert!(grown < 8192, "{grown} kB more");
    refused(&world, &mut neighbour, &mut pod, "the default route among them");
    runtime().block_on(world.redirect.verify_and_restore());
    assert_eq!(world.redirect.health().problem, None);
}

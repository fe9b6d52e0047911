//! Connections that are taken by route, with the edge node's own address.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use nix::libc;
use nix::mount::{MsFlags, mount, umount};
use tunnel_redirect::{Pods, Redirect, RedirectConfig, RedirectError};
use tunnel_routing::RouteTarget;

use crate::Case;
use crate::harness::{cgroup_mount, own_cgroup};
use crate::lifecycle::{expect_instructions, runtime};
use crate::peer::Peer;
use crate::support::{
    EDGE, EDGE_B, EDGE_V6, Greeting, Listener, POD_RANGE, PORT, State, World, address, ask, at, config,
    desired, ip, net_of, parse, route, run, sysctl, with_client,
};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_pod_arrives_with_the_true_address", pod),
    ("by_route::a_process_beyond_the_hooks", beyond_the_hooks),
    ("by_route::without_it_a_pod_is_redirected_at_connect", without),
    ("by_route::services_are_taken_from_pods_and_from_the_host", services),
    ("by_route::without_a_tun_device", no_device),
    ("by_route::without_ipv6_on_new_devices", no_ipv6_on_devices),
    ("by_route::a_node_without_a_tunnel", down),
    ("by_route::without_set_retval_down_is_taken", down_on_old_kernels),
    ("by_route::ipv6", ipv6),
    ("by_route::ports_come_and_go", ports),
    ("by_route::pods_of_edge_nodes_on_every_port", every_port),
    ("by_route::a_neighbour_is_refused", neighbour),
    ("by_route::a_neighbour_is_not_this_host", spoofed_source),
    ("by_route::programs_fit_the_instruction_budget", budget),
    ("scale::a_hundred_thousand_nodes_by_route", many),
];

pub(crate) fn by_route() -> RedirectConfig {
    RedirectConfig { pods: Pods::Route, ..config() }
}

/// A pod of this host, 10.244.1.5.
pub(crate) fn pod_of_this_host() -> Peer {
    let pod = Peer::spawn();
    pod.link("pod0", "10.244.1.1/24", "10.244.1.5/24");
    pod
}

pub(crate) fn start(desired: State) -> World {
    World::with(by_route(), &with_client(desired, POD_RANGE))
}

/// Connects as the pod; returns what the listener saw.
pub(crate) fn asks(pod: &mut Peer, to: &str) -> Result<Greeting, String> {
    let (_, peer, greeting) = pod.connect(None, to)?;
    assert_eq!(peer, to.parse().unwrap(), "the pod's getpeername");
    parse(&greeting).ok_or(greeting)
}

/// Mark of the servers' rules.
const OURS: &str = "proto 201";

/// Rules of servers.
pub(crate) fn rules() -> Vec<String> {
    let (v4, v6) = (ip("-4 rule show"), ip("-6 rule show"));
    let of_servers = v4.lines().chain(v6.lines()).filter(|line| line.contains(OURS));
    let mut rules: Vec<String> = of_servers.map(str::to_owned).collect();
    rules.sort();
    rules
}

pub(crate) fn rules_of_others() -> Vec<String> {
    ip("rule show").lines().filter(|line| !line.contains(OURS)).map(str::to_owned).collect()
}

pub(crate) fn devices() -> usize {
    ip("-o link show").lines().filter(|line| line.contains(" postern")).count()
}

pub(crate) fn routes(table: u32) -> String {
    // ip(8) fails for a table that does not exist.
    ip("-4 route show table all").lines().filter(|line| line.contains(&format!("table {table} "))).collect()
}

/// The kernel leads TCP packets for it to this host.
pub(crate) fn led_here(to: &str) -> bool {
    let to: SocketAddr = to.parse().unwrap();
    let route = format!("route get {} ipproto 6 dport {}", to.ip(), to.port());
    // Fails if there is no route.
    let output = Command::new("ip").args(route.split(' ')).output().unwrap();
    output.stdout.starts_with(b"local ")
}

fn pod() {
    // Other listeners of this host get none of it.
    let _kubelet = TcpListener::bind("0.0.0.0:10250").unwrap();
    let mut pod = pod_of_this_host();
    sysctl("net.ipv4.conf.all.rp_filter", "1");
    let world = start(desired(&[EDGE, EDGE_B]));
    assert_eq!(devices(), 1);
    for edge in [EDGE.0, EDGE_B.0] {
        let seen = asks(&mut pod, &format!("{edge}:10250")).unwrap();
        assert_eq!((seen.local, seen.client.ip()), (at(edge, PORT), address("10.244.1.5")));
    }
    assert_eq!((world.counter("connect4/by_route"), world.counter("route4/steered")), (2, 2));
    // The host's own processes are redirected at connect().
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    assert_eq!((world.counter("connect4/by_route"), world.counter("route4/steered")), (2, 2));
    // A port that is not tunnelled is left to the host's other routes, of which it has none.
    let error = asks(&mut pod, &format!("{}:8080", EDGE.0)).unwrap_err();
    assert!(error.starts_with("err "), "{error}");
    assert_eq!(world.counter("route4/steered"), 2);

    world.redirect.stop();
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

/// Moves this process into a cgroup.
pub(crate) fn enter(cgroup: &Path) {
    std::fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
}

/// A process of this host whose connects no hook sees.
fn beyond_the_hooks() {
    let world = start(desired(&[EDGE]));
    let redirected = world.counter("connect4/redirected");
    enter(&cgroup_mount());
    let seen = ask(at(EDGE.0, PORT));
    enter(&own_cgroup());
    let seen = seen.unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE.0, PORT), address("127.0.0.1")));
    assert_eq!((world.counter("connect4/redirected"), world.counter("route4/steered")), (redirected, 1));
}

fn without() {
    let mut pod = pod_of_this_host();
    let world = World::with(config(), &with_client(desired(&[EDGE]), POD_RANGE));
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.1, PORT));
    assert_eq!((rules(), devices()), (Vec::new(), 0));
    assert_eq!(world.counter("connect4/by_route"), 0);
}

/// Translates port 443 of a Service's address as kube-proxy does, in this chain.
pub(crate) fn service(tool: &str, chain: &str, address: &str, endpoint: &str) {
    run(
        tool,
        &format!("-w -t nat -A {chain} -d {address} -p tcp --dport 443 -j DNAT --to-destination {endpoint}"),
    );
}

fn services() {
    let mut pod = pod_of_this_host();
    let mut lan = Peer::spawn();
    lan.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    ip("route add default via 10.1.0.2");
    let world = start(desired(&[EDGE]));
    for chain in ["PREROUTING", "OUTPUT"] {
        service("iptables", chain, "10.96.0.10", "10.8.0.7:10250");
    }
    let seen = asks(&mut pod, "10.96.0.10:443").unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE.0, PORT), address("10.244.1.5")));
    let seen = ask(at("10.96.0.10", 443)).unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE.0, PORT), address("10.1.0.1")));
    assert_eq!(world.counter("route4/steered"), 2);
    assert_eq!(world.counter("connect4/by_route"), 0, "no hook saw the edge's address");
    // A NodePort, from outside of the cluster. The source would be translated only where the packet leaves the host.
    run(
        "iptables",
        "-w -t nat -A PREROUTING -d 10.1.0.1 -p tcp --dport 30443 -j DNAT --to-destination 10.8.0.7:10250",
    );
    run("iptables", "-w -t nat -A POSTROUTING -j MASQUERADE");
    lan.connect(None, "10.1.0.1:30443").unwrap_err();
    assert!(world.counter("route4/foreign_client") > 0, "--redirect-clients does not name it");
    assert_eq!(world.counter("route4/steered"), 2);
}

fn no_device() {
    let mut pod = pod_of_this_host();
    mount(Some("none"), "/dev/net", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let listener = Listener::open();
    let error = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap_err();
    assert!(matches!(error, RedirectError::Tun { .. }), "{error}");
    let auto = RedirectConfig { pods: Pods::Auto, ..config() };
    let world = World::with(auto.clone(), &with_client(desired(&[EDGE]), POD_RANGE));
    assert!(!world.redirect.routed);
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.1, PORT));
    drop(world);
    umount("/dev/net").unwrap();
    ip("link add cilium_host type veth peer name cilium_net");
    let world = World::with(auto.clone(), &with_client(desired(&[EDGE]), POD_RANGE));
    assert!(!world.redirect.routed, "Cilium's eBPF host routing ignores rules for ports");
    drop(world);
    ip("link del cilium_host");
    let world = World::with(auto, &with_client(desired(&[EDGE]), POD_RANGE));
    assert!(world.redirect.routed);
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
}

/// The loopback device has IPv6, and a device that is made does not.
fn no_ipv6_on_devices() {
    let mut pod = pod_of_this_host();
    sysctl("net.ipv6.conf.default.disable_ipv6", "1");
    let listener = Listener::open();
    let error = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap_err().to_string();
    assert!(error.contains("add routes") && error.contains("disable_ipv6"), "{error}");
    let auto = RedirectConfig { pods: Pods::Auto, ..config() };
    let world = World::with(auto, &with_client(desired(&[EDGE, EDGE_V6]), POD_RANGE));
    assert!(!world.redirect.routed);
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.1, PORT));
    assert_eq!(ask(at(EDGE_V6.0, PORT)).unwrap().local, at(EDGE_V6.1, PORT));
}

fn down() {
    let mut pod = pod_of_this_host();
    let mut state = desired(&[EDGE]);
    route(&mut state, EDGE.0, EDGE.1, false);
    let world = start(state.clone());
    let error = asks(&mut pod, "10.8.0.7:10250").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::EHOSTUNREACH)), "{error}");
    assert_eq!((world.counter("connect4/down"), world.counter("route4/steered")), (1, 0));
    // A Service's connection passes no hook. It reaches the listener, which has to reset it. A tunnel changes no route.
    service("iptables", "PREROUTING", "10.96.0.10", "10.8.0.7:10250");
    assert_eq!(asks(&mut pod, "10.96.0.10:443").unwrap().local, at(EDGE.0, PORT));
    let before = routes(198_180);
    let mut state = with_client(state, POD_RANGE);
    route(&mut state, EDGE.0, EDGE.1, true);
    world.redirect.apply(|| state.into()).unwrap();
    assert_eq!(routes(198_180), before);
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
}

/// Before Linux 6.1 the listener has to reset a pod's connection too.
fn down_on_old_kernels() {
    let mut pod = pod_of_this_host();
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    route(&mut state, EDGE.0, EDGE.1, false);
    let world = World::with(RedirectConfig { fail_at_connect: false, ..by_route() }, &state);
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    assert_eq!((world.counter("connect4/by_route"), world.counter("connect4/down")), (1, 0));
}

fn ipv6() {
    let mut pod = pod_of_this_host();
    pod.link_v6("pod0", "2001:db8:244::1/64", "2001:db8:244::5/64");
    let mut lan = Peer::spawn();
    lan.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    lan.link_v6("lan0", "2001:db8:1::1/64", "2001:db8:1::2/64");
    ip("-6 route add default via 2001:db8:1::2");
    let state = with_client(desired(&[EDGE_V6]), "2001:db8:244::/64");
    let world = World::with(by_route(), &state);
    let seen = asks(&mut pod, "[2001:db8:7::7]:10250").unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE_V6.0, PORT), address("2001:db8:244::5")));
    for chain in ["PREROUTING", "OUTPUT"] {
        service("ip6tables", chain, "fd00::10", "[2001:db8:7::7]:10250");
    }
    let seen = asks(&mut pod, "[fd00::10]:443").unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE_V6.0, PORT), address("2001:db8:244::5")));
    let seen = ask(at("fd00::10", 443)).unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE_V6.0, PORT), address("2001:db8:1::1")));
    assert_eq!((world.counter("connect6/by_route"), world.counter("route6/steered")), (1, 3));
    // As kube-proxy does with what it has marked. The host's own packets pass the chain on their way to the loopback.
    run("ip6tables", "-w -t nat -A POSTROUTING -j MASQUERADE --random-fully");
    let seen = ask(at("fd00::10", 443)).unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE_V6.0, PORT), address("2001:db8:1::1")));
    let error = asks(&mut lan, "[2001:db8:7::7]:10250").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::ECONNREFUSED)), "{error}");
    assert_eq!(world.counter("route6/foreign_client"), 1);
    runtime().block_on(world.redirect.verify_and_restore());
    assert_eq!((world.redirect.health().restored, world.redirect.health().problem), (0, None));
    drop(world);
    assert_eq!(rules(), Vec::<String>::new());
}

fn ports() {
    let mut pod = pod_of_this_host();
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    let world = World::with(by_route(), &state);
    let untaken = |pod: &mut Peer| {
        let before = world.counter("route4/steered");
        assert!(!led_here("10.8.0.7:9100"));
        asks(pod, "10.8.0.7:9100").unwrap_err();
        assert_eq!(world.counter("route4/steered"), before);
    };
    untaken(&mut pod);
    state.ports.insert(9100);
    world.redirect.apply(|| state.clone().into()).unwrap();
    assert_eq!(asks(&mut pod, "10.8.0.7:9100").unwrap().local, at(EDGE.0, 9100));
    state.ports.remove(&9100);
    world.redirect.apply(|| state.clone().into()).unwrap();
    untaken(&mut pod);
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    // A node that leaves, and one that a cloud node's address excludes.
    state.routes.remove(&net_of(EDGE.0));
    world.redirect.apply(|| state.clone().into()).unwrap();
    asks(&mut pod, "10.8.0.7:10250").unwrap_err();
    assert_eq!((routes(198_180), rules()), (String::new(), Vec::new()));
    route(&mut state, EDGE.0, EDGE.1, true);
    state.excluded.insert(net_of("10.8.0.0/24"));
    world.redirect.apply(|| state.clone().into()).unwrap();
    assert_eq!(routes(198_180), "");
}

fn every_port() {
    let mut pod = pod_of_this_host();
    let mut state = with_client(desired(&[]), POD_RANGE);
    let target = RouteTarget { virtual_address: address("198.18.3.0"), up: true, any_port: true };
    state.routes.insert(net_of("10.244.3.0/24"), target);
    route(&mut state, "10.244.3.8", "198.18.0.8", true);
    state.excluded.insert(net_of("10.244.3.9"));
    let world = World::with(by_route(), &state);
    for port in [1, 8080, PORT, 65_535] {
        let to = format!("10.244.3.7:{port}");
        assert_eq!(asks(&mut pod, &to).unwrap().local, to.parse().unwrap());
    }
    assert_eq!(asks(&mut pod, "10.244.3.8:10250").unwrap().local, at("10.244.3.8", PORT));
    let steered = world.counter("route4/steered");
    assert!(led_here("10.244.3.8:10250") && led_here("10.244.3.7:8080"));
    for untaken in ["10.244.3.8:8080", "10.244.3.9:10250", "10.244.3.9:8080"] {
        assert!(!led_here(untaken), "{untaken}");
        asks(&mut pod, untaken).unwrap_err();
    }
    assert_eq!(world.counter("route4/steered"), steered);
    // Nor are they refused here: the host's other routes have them.
    assert_eq!(world.counter("route4/foreign_client"), 0);
    runtime().block_on(world.redirect.verify_and_restore());
    assert_eq!((world.redirect.health().restored, world.redirect.health().problem), (0, None));
    drop(world);
    assert_eq!((rules(), routes(198_180), routes(198_181)), (Vec::new(), String::new(), String::new()));
}

fn neighbour() {
    let _kubelet = TcpListener::bind("0.0.0.0:10250").unwrap();
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    let world = World::with(by_route(), &state);
    let refused = |neighbour: &mut Peer| {
        let before = (world.counter("route4/foreign_client"), world.counter("route4/steered"));
        // The kernel answers with no reset from an IPv4 address that is not its own.
        asks(neighbour, "10.8.0.7:10250").unwrap_err();
        assert!(world.counter("route4/foreign_client") > before.0);
        assert_eq!(world.counter("route4/steered"), before.1);
    };
    refused(&mut neighbour);
    // --redirect-clients
    state.clients.insert(net_of("10.1.0.0/24"));
    world.redirect.apply(|| state.clone().into()).unwrap();
    assert_eq!(asks(&mut neighbour, "10.8.0.7:10250").unwrap().client.ip(), address("10.1.0.2"));
    state.clients.remove(&net_of("10.1.0.0/24"));
    world.redirect.apply(|| state.clone().into()).unwrap();
    refused(&mut neighbour);
}

/// Even if the host would accept such a packet at all.
fn spoofed_source() {
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    ip("addr add 10.9.0.1/32 dev lo");
    neighbour.ip("addr add 10.9.0.1/32 dev eth0");
    for interface in ["all", "lan0"] {
        sysctl(&format!("net.ipv4.conf.{interface}.accept_local"), "1");
        sysctl(&format!("net.ipv4.conf.{interface}.rp_filter"), "0");
    }
    let world = start(desired(&[EDGE]));
    neighbour.connect(Some("10.9.0.1"), "10.8.0.7:10250").unwrap_err();
    assert!(world.counter("route4/foreign_client") > 0, "the program saw and refused it");
    assert_eq!(world.counter("route4/steered"), 0);
}

fn budget() {
    let _world = start(desired(&[EDGE]));
    expect_instructions(" by route", &[("connect4", 500), ("connect6", 1400), ("sk_lookup", 1500)]);
}

fn many() {
    const NODES: u32 = 100_000;
    let nth = |n: u32| IpAddr::from((0x0b00_0000 + n).to_be_bytes());
    let virtual_address = |n: u32| IpAddr::from((0xc612_0000 + n).to_be_bytes());
    let mut pod = pod_of_this_host();
    let mut state = with_client(desired(&[]), POD_RANGE);
    for n in 0..NODES {
        let target = RouteTarget { virtual_address: virtual_address(n), up: true, any_port: false };
        state.routes.insert(nth(n).into(), target);
    }
    let apply = |world: &World, state: &State| {
        let state = state.clone().into();
        let begun = Instant::now();
        world.redirect.apply(|| state).unwrap();
        begun.elapsed()
    };
    let hooks_only = World::with(config(), &with_client(desired(&[]), POD_RANGE));
    let hooks = apply(&hooks_only, &state);
    let gone = state.routes.remove(&nth(0).into()).unwrap();
    println!("report a node less, maps only: {:?}", apply(&hooks_only, &state));
    state.routes.insert(nth(0).into(), gone);
    drop(hooks_only);
    let world = start(desired(&[]));
    println!("report all {NODES} nodes: {:?}, maps only {hooks:?}", apply(&world, &state));
    asks(&mut pod, &format!("{}:10250", nth(NODES - 1))).unwrap();
    state.routes.remove(&nth(0).into());
    let removed = apply(&world, &state);
    state.routes.insert(nth(0).into(), gone);
    println!("report a node less, and again one more: {removed:?}, {:?}", apply(&world, &state));
    let begun = Instant::now();
    runtime().block_on(world.redirect.verify_and_restore());
    println!("report verified in {:?}", begun.elapsed());
    assert_eq!((world.redirect.health().restored, world.redirect.health().problem), (0, None));
    let begun = Instant::now();
    ip("route flush table 198180");
    println!("report ip(8) flushed them in {:?}", begun.elapsed());
    let begun = Instant::now();
    runtime().block_on(world.redirect.verify_and_restore());
    println!("report restored in {:?}", begun.elapsed());
    assert_eq!(ip("route show table 198180").lines().count(), NODES as usize);
    let begun = Instant::now();
    world.redirect.stop();
    println!("report stopped in {:?}", begun.elapsed());
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

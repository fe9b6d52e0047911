//! Networks that may use the redirect, and addresses that it does not touch.

use std::net::TcpListener;
use std::sync::Arc;

use nix::libc;
use tokio_util::sync::CancellationToken;

use crate::Case;
use crate::peer::Peer;
use crate::support::{
    EDGE, EDGE_B, Listener, PORT, World, address, ask, at, config, desired, eventually, fails, ip, net_of,
    parse, route,
};

pub(crate) const CASES: &[Case] = &[
    ("networks::pod_is_accepted_and_neighbour_refused", pod_and_neighbour),
    ("networks::neighbour_cannot_claim_a_virtual_address_as_source", spoofed_source),
    ("networks::ipv6_pod_is_accepted_and_neighbour_refused", pod_and_neighbour_v6),
    ("networks::cloud_node_is_unaffected", cloud_unaffected),
    ("networks::excluded_wins", excluded_wins),
    ("networks::own_address_is_excluded_live", own_address_live),
    ("networks::empty_listener_slot_refuses", empty_slot),
    ("networks::node_address_reused_by_another_node", address_reused),
];

fn pod_and_neighbour() {
    let mut pod = Peer::spawn();
    pod.link("pod0", "10.244.1.1/24", "10.244.1.5/24");
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    let mut desired = desired(&[EDGE]);
    desired.clients.insert(net_of("10.244.1.0/24"));
    let world = World::start(&desired);

    let (_, peer, greeting) = pod.connect(None, "10.8.0.7:10250").unwrap();
    assert_eq!(peer, at(EDGE.0, PORT), "the pod's getpeername");
    let greeting = parse(&greeting).unwrap();
    assert_eq!((greeting.local, greeting.client.ip()), (at(EDGE.1, PORT), address("10.244.1.5")));

    // The neighbour routes the range to this host and connects to a virtual address directly.
    let refused = format!("err {}", libc::ECONNREFUSED);
    let error = neighbour.connect(None, "198.18.0.7:10250").unwrap_err();
    assert!(error.starts_with(&refused), "{error}");
    assert_eq!(world.counter("lookup4/foreign_client"), 1);
    // Its address becomes a client network: --redirect-clients.
    desired.clients.insert(net_of("10.1.0.0/24"));
    world.redirect.apply(|| desired.clone().into()).unwrap();
    neighbour.connect(None, "198.18.0.7:10250").unwrap();
    desired.clients.remove(&net_of("10.1.0.0/24"));
    world.redirect.apply(|| desired.clone().into()).unwrap();
    let error = neighbour.connect(None, "198.18.0.7:10250").unwrap_err();
    assert!(error.starts_with(&refused), "{error}");
}

fn spoofed_source() {
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    neighbour.ip("addr add 198.18.0.9/32 dev eth0");
    // Even if the host would accept such a packet at all.
    crate::support::sysctl("net.ipv4.conf.all.accept_local", "1");
    crate::support::sysctl("net.ipv4.conf.lan0.accept_local", "1");
    crate::support::sysctl("net.ipv4.conf.all.rp_filter", "0");
    crate::support::sysctl("net.ipv4.conf.lan0.rp_filter", "0");
    let world = World::start(&desired(&[EDGE]));
    let mut refused = || {
        let error = neighbour.connect(Some("198.18.0.9"), "198.18.0.7:10250").unwrap_err();
        assert!(error.starts_with("err "), "{error}");
        assert!(world.counter("lookup4/foreign_client") > 0, "the program saw and refused it");
    };
    // The self-tests of both families; then proof that a connection from here would be counted.
    eventually("the listener has seen the self-tests", || world.accepted() == 2);
    refused();
    assert_eq!(world.accepted(), 2);
    ask(at(EDGE.0, PORT)).unwrap();
    assert_eq!(world.accepted(), 3);
}

fn pod_and_neighbour_v6() {
    let mut pod = Peer::spawn();
    pod.link("pod0", "10.244.1.1/24", "10.244.1.5/24");
    pod.link_v6("pod0", "2001:db8:244::1/64", "2001:db8:244::5/64");
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    neighbour.link_v6("lan0", "2001:db8:1::1/64", "2001:db8:1::2/64");
    let mut desired = desired(&[crate::support::EDGE_V6]);
    desired.clients.insert(net_of("2001:db8:244::/64"));
    let world = World::start(&desired);

    let (_, peer, greeting) = pod.connect(None, "[2001:db8:7::7]:10250").unwrap();
    assert_eq!(peer, at("2001:db8:7::7", PORT));
    assert_eq!(parse(&greeting).unwrap().client.ip(), address("2001:db8:244::5"));
    let error = neighbour.connect(None, "[fd9e:706f:7374:6572::7]:10250").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::ECONNREFUSED)), "{error}");
    assert_eq!(world.counter("lookup6/foreign_client"), 1);
}

fn cloud_unaffected() {
    let mut cloud = Peer::spawn();
    cloud.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    cloud.listen("10.1.0.2:10250");
    let greets = || {
        let stream = std::net::TcpStream::connect(at("10.1.0.2", PORT)).unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(&stream), &mut line).unwrap();
        assert_eq!((line.trim(), stream.peer_addr().unwrap()), ("peer 10.1.0.2:10250", at("10.1.0.2", PORT)));
    };
    greets();
    let mut desired = desired(&[EDGE]);
    desired.excluded.insert(net_of("10.1.0.2"));
    let world = World::start(&desired);
    greets();
    assert_eq!(world.counter("connect4/excluded"), 1);
    world.redirect.set_serving(false).unwrap();
    greets();
    world.redirect.stop();
    greets();
}

fn excluded_wins() {
    // A cloud node has the edge's address; an exclusion with a shorter prefix than the route's wins too.
    let mut desired = desired(&[EDGE, EDGE_B]);
    desired.excluded.insert(net_of(EDGE.0));
    let world = World::start(&desired);
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    ask(at(EDGE_B.0, PORT)).unwrap();
    desired.excluded.insert(net_of("10.8.0.0/16"));
    world.redirect.apply(|| desired.clone().into()).unwrap();
    fails(at(EDGE_B.0, PORT), libc::ENETUNREACH);
    desired.excluded.clear();
    world.redirect.apply(|| desired.clone().into()).unwrap();
    ask(at(EDGE.0, PORT)).unwrap();
    ask(at(EDGE_B.0, PORT)).unwrap();
}

fn own_address_live() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let world = World::start(&desired(&[EDGE]));
    let cancel = CancellationToken::new();
    let watching = runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
    ask(at(EDGE.0, PORT)).unwrap();

    // The edge's address is added to this host: from now on it is this host's.
    ip("addr add 10.8.0.7/32 dev lo");
    let own = TcpListener::bind("10.8.0.7:10250").unwrap();
    own.set_nonblocking(true).unwrap();
    let to = at(EDGE.0, PORT);
    eventually("connects to the own address are direct", || {
        let stream = std::net::TcpStream::connect(to).unwrap();
        eventually_accepted(&own, &stream)
    });
    drop(own);
    ip("addr del 10.8.0.7/32 dev lo");
    eventually("the address is an edge's again", || {
        ask(to).is_ok_and(|greeting| greeting.local == at(EDGE.1, PORT))
    });

    cancel.cancel();
    runtime.block_on(watching).unwrap();
}

/// Reports whether this connection reached `listener`: one on loopback is in its queue as soon as connect() returns.
fn eventually_accepted(listener: &TcpListener, stream: &std::net::TcpStream) -> bool {
    let client = stream.local_addr().unwrap();
    std::iter::from_fn(|| listener.accept().ok()).any(|(_, peer)| peer == client)
}

fn empty_slot() {
    let _kubelet = TcpListener::bind("0.0.0.0:10250").unwrap();
    let _kubelet_v6 = crate::support::listen("[::]:10250");
    let listener = Listener::open();
    let redirect = tunnel_redirect::Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap();
    redirect.apply(|| desired(&[EDGE, crate::support::EDGE_V6]).into()).unwrap();
    // Closing the sockets empties the slots.
    drop(listener);
    fails(at(EDGE.0, PORT), libc::ECONNREFUSED);
    fails(at(crate::support::EDGE_V6.0, PORT), libc::ECONNREFUSED);
    let counters = redirect.counters().unwrap();
    let value = |name: &str| counters.iter().find(|(known, _)| *known == name).unwrap().1;
    assert_eq!((value("lookup4/no_listener"), value("lookup6/no_listener")), (1, 1));
}

fn address_reused() {
    // 10.8.0.7 leaves with its node; another node takes the address and gets another virtual address.
    let world = World::start(&desired(&[EDGE]));
    let old = std::net::TcpStream::connect(at(EDGE.0, PORT)).unwrap();
    assert_eq!(crate::support::greeting(&old).unwrap().local, at(EDGE.1, PORT));
    let mut reused = desired(&[]);
    route(&mut reused, EDGE.0, "198.18.4.4", true);
    world.redirect.apply(|| reused.clone().into()).unwrap();
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at("198.18.4.4", PORT));
    // The departed node's virtual address has no origin any more: getpeername() on an old connection returns it.
    assert_eq!(old.peer_addr().unwrap(), at(EDGE.1, PORT));
    // A connection that still goes to the departed node's virtual address arrives with that.
    assert_eq!(ask(at(EDGE.1, PORT)).unwrap().local, at(EDGE.1, PORT));
}

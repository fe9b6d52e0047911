//! A gateway's own rules and routes, and rules of others that come before a server's.

use std::io::Write as _;
use std::process::Command;

use nix::libc;
use tunnel_redirect::{Redirect, RedirectConfig};

use crate::Case;
use crate::by_route::{asks, by_route, devices, rules, start};
use crate::lifecycle::runtime;
use crate::peer::Peer;
use crate::support::{EDGE, EDGE_V6, Listener, PORT, World, at, desired, ip, net_of, sysctl};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_gateway_sends_nothing_back_into_the_network", gateway),
    ("by_route::a_gateway_learns_of_a_smaller_link_to_its_client", small_link),
    ("by_route::a_rule_before_its_own_is_told", overruled),
];

/// The network leads here what it has no other way for.
fn gateway() {
    let mut client = Peer::spawn();
    client.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    client.link_v6("lan0", "2001:db8:1::1/64", "2001:db8:1::2/64");
    ip("route add default via 10.1.0.9");
    ip("-6 route add default via 2001:db8:1::9");
    sysctl("net.ipv4.ip_forward", "1");
    sysctl("net.ipv6.conf.all.forwarding", "1");
    let mut state = desired(&[EDGE, EDGE_V6]);
    // Of --redirect-clients: they come in by the interface of the default route.
    let clients = vec![net_of("10.1.0.0/24"), net_of("2001:db8:1::/64")];
    let refused = |client: &mut Peer, to: &str, errno: i32| {
        let error = asks(client, to).unwrap_err();
        assert!(error.starts_with(&format!("err {errno}")), "{to}: {error}");
    };
    let world = World::with(RedirectConfig { gateway: true, clients, ..by_route() }, &state);
    for (edge, other, errno) in [
        ("10.8.0.7:10250", "10.8.0.7:8080", libc::EHOSTUNREACH),
        ("[2001:db8:7::7]:10250", "[2001:db8:7::7]:8080", libc::ENETUNREACH),
    ] {
        asks(&mut client, edge).unwrap();
        refused(&mut client, other, errno);
    }
    // This host's own packets take its other routes, and so do those to other addresses.
    let sent_on = |to: &str, from: &str| {
        let route = format!("route get {to} {from} ipproto 6 dport 8080");
        let output = Command::new("ip").args(route.split_whitespace()).output().unwrap();
        // The kernel's own answers to the client are limited in number.
        let refused = String::from_utf8_lossy(&output.stderr).contains("No route to host");
        assert!(refused != output.status.success(), "{to} {from}: {output:?}");
        output.status.success()
    };
    const CLIENT: &str = "from 10.1.0.2 iif lan0";
    assert!(sent_on("10.8.0.7", "") && sent_on("10.8.0.9", CLIENT) && !sent_on("10.8.0.7", CLIENT));
    runtime().block_on(world.redirect.verify_and_restore());
    assert_eq!((world.redirect.health().restored, world.redirect.health().problem), (0, None));
    for change in [
        "rule del pref 92 not iif lo lookup 198692",
        "route del unreachable 10.8.0.7/32 table 198692",
        "rule add pref 92 protocol 201 iif lan0 lookup 198692",
        "route add unreachable 10.8.0.9/32 table 198692",
    ] {
        let before = world.redirect.health().restored;
        ip(change);
        runtime().block_on(world.redirect.verify_and_restore());
        assert_eq!(world.redirect.health().restored, before + 1, "{change}");
        assert!(!sent_on("10.8.0.7", CLIENT) && sent_on("10.8.0.9", CLIENT));
    }
    // A node that leaves is no longer refused.
    state.routes.remove(&net_of(EDGE.0));
    world.redirect.apply(|| state.into()).unwrap();
    assert!(sent_on("10.8.0.7", CLIENT));
    drop(world);
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

/// Between a client and its gateway is a link with a smaller MTU than both have. The router before it tells the edge node's
/// address, whose packets they are for all it knows.
fn small_link() {
    const SIZE: usize = 200_000;
    let (router, mut client) = (Peer::spawn(), Peer::spawn());
    router.inside(|| {
        sysctl("net.ipv4.ip_forward", "1");
        sysctl("net.ipv6.conf.all.forwarding", "1");
    });
    // Neighbours ask for each other with addresses that they would have to try first.
    let at_once = || sysctl("net.ipv6.conf.default.accept_dad", "0");
    at_once();
    router.inside(at_once);
    client.inside(at_once);
    router.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    router.link_v6("lan0", "2001:db8:1::1/64", "2001:db8:1::2/64");
    let far = [("10.2.0.1/24", "10.2.0.5/24"), ("2001:db8:2::1/64", "2001:db8:2::5/64")];
    client.link_behind(&router, "far0", far);
    router.ip("link set far0 mtu 1300");
    ip("route add default via 10.1.0.2");
    ip("-6 route add default via 2001:db8:1::2");
    let listener = Listener::open();
    let clients = vec![net_of("10.2.0.0/24"), net_of("2001:db8:2::/64")];
    let config = RedirectConfig { gateway: true, clients, ..by_route() };
    let redirect = Redirect::start(config, &listener.v4, Some(&listener.v6)).unwrap();
    redirect.apply(|| desired(&[EDGE, EDGE_V6]).into()).unwrap();
    for (edge, listener) in [(EDGE, &listener.v4), (EDGE_V6, &listener.v6)] {
        let listener = listener.try_clone().unwrap();
        let sending = std::thread::spawn(move || {
            let mut stream = loop {
                let (stream, _) = listener.accept().unwrap();
                // Not a self-test's.
                if stream.local_addr().unwrap() == at(edge.0, PORT) {
                    break stream;
                }
            };
            stream.write_all(&[b"x".repeat(SIZE), b"\n".to_vec()].concat()).unwrap();
        });
        let answer = client.connect(None, &at(edge.0, PORT).to_string());
        let (_, _, line) = answer.unwrap_or_else(|error| panic!("{}: {error}", edge.0));
        assert_eq!(line.len(), SIZE);
        sending.join().unwrap();
    }
    redirect.stop();
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

fn overruled() {
    let world = start(desired(&[EDGE, EDGE_V6]));
    let verify = || {
        runtime().block_on(world.redirect.verify_and_restore());
        world.redirect.health().problem
    };
    assert_eq!(verify(), None);
    let lan = Peer::spawn();
    lan.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    ip("route add default via 10.1.0.2 table 77");
    ip("rule add pref 50 lookup 77");
    let problem = verify().unwrap();
    assert!(
        problem.contains("10.8.0.7:") && problem.contains("by lan0, by the routing table 77"),
        "{problem}"
    );
    ip("rule del pref 50");
    assert_eq!(verify(), None);
    ip("rule add pref 50 to 10.8.0.0/16 prohibit");
    let problem = verify().unwrap();
    assert!(problem.contains("nowhere (Permission denied)"), "{problem}");
    // It would be in the way of connections to other ports only.
    ip("rule del pref 50");
    ip("rule add pref 50 ipproto 6 dport 8080 lookup 77");
    assert_eq!(verify(), None);
}

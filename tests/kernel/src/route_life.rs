//! Connections that are taken by route, while servers come and go, and beside the rules of others.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use socket2::SockRef;
use tokio_util::sync::CancellationToken;
use tunnel_redirect::{Cleaned, Pods, Redirect, RedirectConfig, RedirectError, cleanup};

use crate::Case;
use crate::by_route::{
    asks, by_route, devices, led_here, pod_of_this_host, routes, rules, rules_of_others, service, start,
};
use crate::lifecycle::runtime;
use crate::others::pinned;
use crate::peer::Peer;
use crate::raw;
use crate::support::{
    EDGE, EDGE_B, Listener, POD_RANGE, PORT, State, World, ask, at, config, counter, desired, eventually,
    fails, ip, run, sysctl, with_client,
};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_killed_server_takes_nothing_and_is_replaced", killed),
    ("by_route::a_dead_servers_rule_for_another_port_takes_nothing", another_port),
    ("by_route::refusal_outlasts_a_killed_server", refused),
    ("by_route::what_a_server_leaves_that_was_killed_after_it_handed_over", killed_after_release),
    ("by_route::a_killed_servers_programs_refuse_pods", orphaned),
    ("by_route::a_server_that_dies_beside_another_takes_nothing_from_it", dies_beside),
    ("by_route::beside_other_policy_routing", beside_others),
    ("by_route::an_upgrade_keeps_connections", upgraded),
    ("by_route::what_others_change_is_restored", restored),
    ("by_route::two_servers", two_servers),
    ("by_route::released_and_resumed", released),
    ("by_route::while_a_server_stops_only_a_listener_can_refuse", drained),
];

fn killed() {
    let mut pod = pod_of_this_host();
    let server = Peer::spawn_server_as("route");
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    let left = rules();
    assert_eq!(left.len(), 2, "{left:?}");
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    assert_eq!((routes(198_180), rules()), (String::new(), left), "rules without routes stay");
    // The host's own connects go as they did before.
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);

    // A rule that the next server does not want.
    ip("rule add pref 90 protocol 201 ipproto 6 dport 999 lookup 198180");
    // Also of a server that does not come back.
    ip("rule add pref 90 protocol 201 ipproto 6 dport 999 lookup 198190");
    let world = start(desired(&[EDGE]));
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    assert_eq!(rules().len(), 2, "{:?}", rules());
    assert!(rules().iter().all(|rule| rule.contains("dport 1025")), "{:?}", rules());
    drop(world);
    assert_eq!(rules(), Vec::<String>::new());

    let server = Peer::spawn_server_as("route");
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    eventually("the programs are gone", || crate::lifecycle::programs() == (0, 0));
    assert_eq!(cleanup(&config()).unwrap().rules, 2);
    assert_eq!(rules(), Vec::<String>::new());
}

/// The next server has the dead one's number, and with it the tables that the rules for its ports lead to.
fn another_port() {
    for family in ["-4", "-6"] {
        ip(&format!("{family} rule add pref 90 protocol 201 ipproto 6 dport 999 lookup 198180"));
    }
    let listener = Listener::open();
    let next = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap();
    next.apply(|| with_client(desired(&[EDGE]), POD_RANGE).into()).unwrap();
    assert!(led_here("10.8.0.7:10250"));
    assert!(!led_here("10.8.0.7:999"), "{:?}", rules());
    // Where there is no route yet the dead one's routes may refuse connections, until the nodes are known.
    let left = || rules().iter().filter(|rule| rule.contains("dport 999")).count();
    assert_eq!(left(), 1, "{:?}", rules());
    next.remove_dead_routes().unwrap();
    assert_eq!((left(), rules().len()), (0, 2), "{:?}", rules());
}

/// With --orphan-policy=refuse nobody else gets what is meant for an edge node.
fn refused() {
    let mut pod = pod_of_this_host();
    // Only a host that forwards tells a pod that an address is unreachable.
    sysctl("net.ipv4.ip_forward", "1");
    let server = Peer::spawn_server_as("refuse");
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    eventually("the programs are gone", || crate::lifecycle::programs() == (0, 0));
    let error = asks(&mut pod, "10.8.0.7:10250").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::EHOSTUNREACH)), "{error}");
    fails(at(EDGE.0, PORT), libc::EHOSTUNREACH);
    // A successor does not know the nodes yet.
    let listener = Listener::open();
    let serving = listener.serve();
    let next = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap();
    let next = Arc::new(next);
    next.apply(|| State::default().into()).unwrap();
    runtime().block_on(next.verify_and_restore());
    let error = asks(&mut pod, "10.8.0.7:10250").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::EHOSTUNREACH)), "{error}");
    next.apply(|| with_client(desired(&[EDGE]), POD_RANGE).into()).unwrap();
    next.remove_dead_routes().unwrap();
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    drop((next, serving));
    assert_eq!((rules(), devices()), (Vec::new(), 0));

    let server = Peer::spawn_server_as("refuse");
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    assert_eq!(cleanup(&config()).unwrap().rules, 2);
    assert_eq!((rules(), routes(198_180)), (Vec::new(), String::new()));
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);

    // Also by a server that takes nothing by route.
    let server = Peer::spawn_server_as("refuse");
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    assert_eq!(rules().len(), 2, "{:?}", rules());
    let world = World::with(config(), &desired(&[EDGE]));
    assert_eq!((rules(), routes(198_180)), (Vec::new(), String::new()));
    drop(world);
}

/// It has removed its rules, and the routes that refuse connections do not end with its device.
fn killed_after_release() {
    let mut server = Peer::spawn_server_as("refuse");
    server.release();
    assert_eq!(rules(), Vec::<String>::new());
    server.kill();
    eventually("the device ends with the process", || devices() == 0);
    assert!(routes(198_180).contains("unreachable 10.8.0.7"), "{}", routes(198_180));
    let cleaned = cleanup(&config()).unwrap();
    assert_eq!((cleaned.rules, cleaned.edge_routes), (0, 1));
    assert_eq!(routes(198_180), "");
    assert_eq!(cleanup(&config()).unwrap(), Cleaned::default());

    // Beside a successor, whose own stay.
    let mut server = Peer::spawn_server_as("refuse");
    let world = start(desired(&[EDGE]));
    server.release();
    server.kill();
    eventually("the device ends with the process", || devices() == 1);
    let cleaned = cleanup(&config());
    assert!(matches!(cleaned, Err(RedirectError::RangeTaken { .. })), "{cleaned:?}");
    assert_eq!((routes(198_180), rules().len()), (String::new(), 2));
    assert!(led_here("10.8.0.7:10250"));
    drop(world);

    // The successor removes them too when it stops.
    let mut server = Peer::spawn_server_as("refuse");
    let world = start(desired(&[EDGE]));
    server.release();
    server.kill();
    eventually("the device ends with the process", || devices() == 1);
    drop(world);
    assert_eq!((routes(198_180), rules()), (String::new(), Vec::new()));
}

/// Its rules come first. With --orphan-policy=refuse they lead to routes that fail.
fn dies_beside() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut pod = pod_of_this_host();
    sysctl("net.ipv4.ip_forward", "1");
    for how in ["route", "refuse"] {
        let older = Peer::spawn_server_as(how);
        let world = start(desired(&[EDGE]));
        let cancel = CancellationToken::new();
        let watching = runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
        assert_eq!((rules().len(), devices()), (4, 2));
        older.kill();
        eventually("the dead server's rules are removed", || (rules().len(), devices()) == (2, 1));
        asks(&mut pod, "10.8.0.7:10250").unwrap();
        cancel.cancel();
        runtime.block_on(watching).unwrap();
        world.redirect.stop();
        assert_eq!(rules(), Vec::<String>::new());
    }
    // Also if the other one stops at once.
    let older = Peer::spawn_server_as("route");
    let world = start(desired(&[EDGE]));
    older.kill();
    eventually("the device ends with the process", || devices() == 1);
    drop(world);
    assert_eq!(rules(), Vec::<String>::new());
}

/// Until --orphan-timeout. Then the address leads where it does without Postern.
fn orphaned() {
    let mut pod = pod_of_this_host();
    sysctl("net.ipv4.ip_forward", "1");
    let refused_here = |pod: &mut Peer| {
        let error = asks(pod, "10.8.0.7:10250").unwrap_err();
        error.starts_with(&format!("err {}", libc::ECONNREFUSED))
    };
    for before_the_timeout in [true, false] {
        let (pinned, _folders) = pinned();
        let orphan_timeout = Duration::from_secs(if before_the_timeout { 600 } else { 1 });
        let config = RedirectConfig { pods: Pods::Route, orphan_timeout, ..pinned };
        let of_server = config.clone();
        let server = raw::fork(|| World::with(of_server, &with_client(desired(&[EDGE]), POD_RANGE)));
        eventually("the server takes what a route leads here", || led_here("10.8.0.7:10250"));
        kill(server, Signal::SIGKILL).unwrap();
        waitpid(server, None).unwrap();
        eventually("the device ends with the process", || devices() == 0);
        if before_the_timeout {
            assert!(refused_here(&mut pod));
            fails(at(EDGE.0, PORT), libc::ECONNREFUSED);
        } else {
            eventually("connects go direct", || !refused_here(&mut pod));
            let error = asks(&mut pod, "10.8.0.7:10250").unwrap_err();
            assert!(
                error.starts_with(&format!("err {}", libc::ENETUNREACH)),
                "the host has no route: {error}"
            );
        }
        assert_eq!(cleanup(&config).unwrap().pins.len(), 1);
    }
    let _next = start(desired(&[EDGE]));
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
}

/// Rules and settings as of Cilium, the AWS VPC CNI, wg-quick and Tailscale.
fn beside_others() {
    let mut pod = pod_of_this_host();
    let lan = Peer::spawn();
    lan.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    ip("route add default via 10.1.0.2");
    for change in [
        "rule add pref 100 lookup local",
        "rule del pref 0",
        "rule add pref 9 fwmark 0x200/0xf00 lookup 2004",
        "rule add pref 512 to 10.244.1.5 lookup main",
        "rule add pref 1536 from 10.244.1.5 lookup 2",
        "route add default via 10.1.0.2 table 2",
        "rule add pref 5210 fwmark 0x80000/0xff0000 lookup main",
        "rule add pref 5270 lookup 52",
        "rule add pref 32764 lookup main suppress_prefixlength 0",
        "rule add pref 32765 not fwmark 0xca6c lookup 51820",
    ] {
        ip(change);
    }
    for setting in ["rp_filter", "src_valid_mark"] {
        sysctl(&format!("net.ipv4.conf.all.{setting}"), "1");
    }
    run("iptables", "-w -t mangle -A PREROUTING -i pod0 -j MARK --set-mark 0x80000");
    let world = start(desired(&[EDGE]));
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    service("iptables", "OUTPUT", "10.96.0.10", "10.8.0.7:10250");
    assert_eq!(ask(at("10.96.0.10", 443)).unwrap().local, at(EDGE.0, PORT));
    let others = rules_of_others();
    drop(world);
    assert_eq!((rules(), rules_of_others()), (Vec::new(), others), "the others' stay");
}

/// A connection of the first server lives on while two more follow, and every connect meanwhile succeeds.
fn upgraded() {
    let mut pod = pod_of_this_host();
    let listener = Listener::open();
    let first = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap();
    let state = with_client(desired(&[EDGE]), POD_RANGE);
    first.apply(|| state.clone().into()).unwrap();
    pod.hold("10.8.0.7:10250");
    let held = loop {
        let (stream, _) = listener.v4.accept().unwrap();
        // Not a self-test's.
        if stream.local_addr().unwrap() == at(EDGE.0, PORT) {
            break stream;
        }
    };
    let echo = std::thread::spawn(move || std::io::copy(&mut &held, &mut &held));
    pod.echo_held();

    let connecting = Connecting::start("10.8.0.7:10250");
    let _serving = listener.serve();
    let mut before = Arc::new(first);
    let mut worlds = Vec::new();
    for _ in 0..2 {
        connecting.more("connects through one");
        let next = start(desired(&[EDGE]));
        connecting.more("connects with both");
        before.release();
        connecting.more("connects through the next");
        pod.echo_held();
        before.stop();
        connecting.more("connects without the one before");
        pod.echo_held();
        before = Arc::clone(&next.redirect);
        worlds.push(next);
    }
    println!("report {} connects during two upgrades", connecting.stop());
    assert_eq!(devices(), 1);
    pod.echo_held();
    drop(pod);
    echo.join().unwrap().unwrap();
}

/// A pod, 10.244.1.133, that connects without a pause.
struct Connecting {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    thread: std::thread::JoinHandle<()>,
}

impl Connecting {
    fn start(to: &'static str) -> Self {
        let mut pod = Peer::spawn();
        pod.link("pod1", "10.244.1.129/25", "10.244.1.133/25");
        let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                asks(&mut pod, to).expect("a connect during an upgrade");
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { stop, count, thread }
    }

    fn more(&self, what: &str) {
        let now = self.count.load(Ordering::Relaxed);
        eventually(what, || self.count.load(Ordering::Relaxed) > now + 20 || self.thread.is_finished());
    }

    /// Returns the number of connects, none of which has failed.
    fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.count.load(Ordering::Relaxed)
    }
}

fn restored() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut pod = pod_of_this_host();
    let world = start(desired(&[EDGE]));
    let restored = || world.redirect.health().restored;
    runtime.block_on(world.redirect.verify_and_restore());
    assert_eq!((restored(), world.redirect.health().problem), (0, None), "what it wrote is its own");
    let (rules_before, routes_before) = (rules(), routes(198_180));
    // With the device all routes go; the kernel tells of none.
    let renamed = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(renamed.path(), "link set postern0 down\nlink set postern0 name foreign0\n").unwrap();
    let rename = format!("-batch {}", renamed.path().display());
    let cancel = CancellationToken::new();
    let watching = runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
    // Not by the verification, which comes every 30 s.
    let mut longest = Duration::ZERO;
    for change in [
        "rule del pref 90 ipproto 6 dport 10250 lookup 198180",
        "route del local 10.8.0.7/32 table 198180",
        "route flush table 198180",
        "route add blackhole 10.8.0.7/32 table 198180",
        "route add 10.8.0.9/32 dev pod0 table 198180",
        "rule add pref 90 protocol 201 ipproto 6 dport 999 lookup 198180",
        "rule add pref 90 protocol 201 ipproto 6 dport 10250 iif lo lookup 198180",
        "link set postern0 down",
        "link del postern0",
        // The new device too is followed.
        "link del postern0",
        &rename,
        "route flush table 198180",
    ] {
        let (before, begun) = (restored(), Instant::now());
        // Before Linux 6.2 a device that is up keeps its name, and it may be up again already.
        eventually(change, || Command::new("ip").args(change.split(' ')).status().unwrap().success());
        eventually(change, || {
            let kernels = (rules(), routes(198_180), devices());
            restored() > before && kernels == (rules_before.clone(), routes_before.clone(), 1)
        });
        longest = longest.max(begun.elapsed());
        asks(&mut pod, "10.8.0.7:10250").unwrap();
    }
    println!("report each was restored within {longest:?}");
    cancel.cancel();
    runtime.block_on(watching).unwrap();
}

fn two_servers() {
    let mut pod = pod_of_this_host();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let config = |n: usize| RedirectConfig {
        redirect_range: format!("198.1{}.0.0/16", 8 + n).parse().unwrap(),
        redirect_range_v6: format!("fd9e:706f:7374:{n}::/64").parse().unwrap(),
        state_dir: Some(folders[n].path().into()),
        ..by_route()
    };
    let first = World::with(config(0), &with_client(desired(&[EDGE]), POD_RANGE));
    let second = World::with(config(1), &with_client(desired(&[(EDGE_B.0, "198.19.0.8")]), POD_RANGE));
    assert_eq!((rules().len(), devices()), (4, 2));
    let steered = |first, second| {
        let counters = [&first, &second].map(|world: &&World| counter(&world.redirect, "route4/steered"));
        (counters[0], counters[1])
    };
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    assert_eq!(asks(&mut pod, "10.8.0.8:10250").unwrap().local, at(EDGE_B.0, PORT));
    assert_eq!(steered(&first, &second), (1, 1), "each took its own");
    // Neither takes the other's rules for foreign ones.
    for world in [&first, &second] {
        runtime().block_on(world.redirect.verify_and_restore());
        assert_eq!((world.redirect.health().restored, world.redirect.health().problem), (0, None));
    }
    drop(first);
    assert_eq!((rules().len(), devices()), (2, 1));
    assert_eq!(asks(&mut pod, "10.8.0.8:10250").unwrap().local, at(EDGE_B.0, PORT));
}

fn released() {
    let _kubelet = TcpListener::bind("0.0.0.0:10250").unwrap();
    let mut pod = pod_of_this_host();
    let world = start(desired(&[EDGE]));
    world.redirect.release();
    assert_eq!(rules(), Vec::<String>::new());
    asks(&mut pod, "10.8.0.7:10250").unwrap_err();
    world.redirect.resume().unwrap();
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    // A successor takes over without a gap.
    let next = start(desired(&[EDGE]));
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    world.redirect.drain().unwrap();
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    assert_eq!(
        next.counter("route4/steered"),
        2,
        "the older program's choice stayed, then the next one chose"
    );
    drop(world);
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    drop(next);
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

/// The rules stay for open connections, and route new ones here too. Without a listener the kernel does not answer these: it sends
/// no RST from an IPv4 address that is not local.
fn drained() {
    let mut pod = pod_of_this_host();
    let listener = Listener::open();
    let redirect = Redirect::start(by_route(), &listener.v4, Some(&listener.v6)).unwrap();
    redirect.apply(|| with_client(desired(&[EDGE]), POD_RANGE).into()).unwrap();
    // No hook sees the edge's address, and fails the connect.
    service("iptables", "PREROUTING", "10.96.0.10", "10.8.0.7:10250");
    redirect.drain().unwrap();
    let resetting = listener.v4.try_clone().unwrap();
    SockRef::from(&resetting).set_linger(Some(Duration::ZERO)).unwrap();
    let resetting = std::thread::spawn(move || {
        // The first ones are self-tests'.
        while resetting.accept().unwrap().0.local_addr().unwrap() != at(EDGE.0, PORT) {}
    });
    let error = asks(&mut pod, "10.96.0.10:443").unwrap_err();
    assert!(error.starts_with(&format!("err {}", libc::ECONNRESET)), "{error}");
    resetting.join().unwrap();
    drop(listener);
    let error = asks(&mut pod, "10.96.0.10:443").unwrap_err();
    assert!(error.starts_with("err -1 "), "an answer: {error}");
    assert!(counter(&redirect, "route4/no_listener") > 0);
    redirect.stop();
    assert_eq!((rules(), devices()), (Vec::new(), 0));
}

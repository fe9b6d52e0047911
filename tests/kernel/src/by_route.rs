//! Connections that are taken by route, with the edge node's own address.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use tokio_util::sync::CancellationToken;
use tunnel_redirect::{Pods, Redirect, RedirectConfig, RedirectError, cleanup};
use tunnel_routing::RouteTarget;

use crate::Case;
use crate::harness::{cgroup_mount, own_cgroup};
use crate::lifecycle::{expect_instructions, runtime};
use crate::others::pinned;
use crate::peer::Peer;
use crate::raw;
use crate::support::{
    EDGE, EDGE_B, EDGE_V6, Greeting, Listener, POD_RANGE, PORT, State, World, address, ask, at, config,
    counter, desired, eventually, fails, ip, net_of, parse, route, run, sysctl, with_client,
};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_pod_arrives_with_the_true_address", pod),
    ("by_route::a_process_beyond_the_hooks", beyond_the_hooks),
    ("by_route::without_it_a_pod_is_redirected_at_connect", without),
    ("by_route::services_are_taken_from_pods_and_from_the_host", services),
    ("by_route::without_a_tun_device", no_device),
    ("by_route::a_node_without_a_tunnel", down),
    ("by_route::without_set_retval_down_is_taken", down_on_old_kernels),
    ("by_route::a_killed_server_takes_nothing_and_is_replaced", killed),
    ("by_route::refusal_outlasts_a_killed_server", refused),
    ("by_route::a_killed_servers_programs_refuse_pods", orphaned),
    ("by_route::a_server_that_dies_beside_another_takes_nothing_from_it", dies_beside),
    ("by_route::beside_other_policy_routing", beside_others),
    ("by_route::an_upgrade_keeps_connections", upgraded),
    ("by_route::what_others_change_is_restored", restored),
    ("by_route::two_servers", two_servers),
    ("by_route::ipv6", ipv6),
    ("by_route::ports_come_and_go", ports),
    ("by_route::pods_of_edge_nodes_on_every_port", every_port),
    ("by_route::a_neighbour_is_refused", neighbour),
    ("by_route::a_neighbour_is_not_this_host", spoofed_source),
    ("by_route::a_neighbour_is_no_pod_of_this_host", spoofed_pod),
    ("by_route::released_and_resumed", released),
    ("by_route::programs_fit_the_instruction_budget", budget),
    ("scale::a_hundred_thousand_nodes_by_route", many),
];

fn by_route() -> RedirectConfig {
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

/// Rules and routes of servers' tables, without those of devices.
fn rules() -> Vec<String> {
    let (v4, v6) = (ip("-4 rule show"), ip("-6 rule show"));
    let of_servers = v4.lines().chain(v6.lines()).filter(|line| line.contains("lookup 1981"));
    let mut rules: Vec<String> = of_servers.map(str::to_owned).collect();
    rules.sort();
    rules
}

fn rules_of_others() -> Vec<String> {
    ip("rule show").lines().filter(|line| !line.contains("lookup 1981")).map(str::to_owned).collect()
}

fn devices() -> usize {
    ip("-o link show").lines().filter(|line| line.contains(" postern")).count()
}

fn routes(table: u32) -> String {
    // ip(8) fails for a table that does not exist.
    ip("-4 route show table all").lines().filter(|line| line.contains(&format!("table {table} "))).collect()
}

/// The kernel leads TCP packets for it to this host.
fn led_here(to: &str) -> bool {
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
fn service(tool: &str, chain: &str, address: &str, endpoint: &str) {
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
    assert!(!world.redirect.by_route());
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.1, PORT));
    drop(world);
    umount("/dev/net").unwrap();
    ip("link add cilium_host type veth peer name cilium_net");
    let world = World::with(auto.clone(), &with_client(desired(&[EDGE]), POD_RANGE));
    assert!(!world.redirect.by_route(), "Cilium's eBPF host routing ignores rules for ports");
    drop(world);
    ip("link del cilium_host");
    let world = World::with(auto, &with_client(desired(&[EDGE]), POD_RANGE));
    assert!(world.redirect.by_route());
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
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
    assert_eq!(cleanup(&config()).unwrap().rules, 2);
    assert_eq!((rules(), routes(198_180)), (Vec::new(), String::new()));
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
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

/// A plugin such as Calico may give other hosts' pods addresses of the range that a Node's spec names.
fn spoofed_pod() {
    let mut pod = pod_of_this_host();
    let mut neighbour = Peer::spawn();
    neighbour.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    neighbour.ip("addr add 10.244.1.200/32 dev eth0");
    ip("route add 10.244.1.200/32 via 10.1.0.2");
    let mut state = with_client(desired(&[EDGE]), POD_RANGE);
    let world = start(desired(&[EDGE]));
    let mut refused = |what: &str| {
        let before = (world.counter("route4/foreign_client"), world.counter("route4/steered"));
        neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap_err();
        assert!(world.counter("route4/foreign_client") > before.0, "{what}");
        assert_eq!(world.counter("route4/steered"), before.1, "{what}");
        asks(&mut pod, "10.8.0.7:10250").unwrap();
    };
    // It comes from the network of a cloud host, or that of the default route.
    state.excluded.insert(net_of("10.1.0.9"));
    world.redirect.apply(|| state.clone().into()).unwrap();
    refused("a cloud host's network");
    state.excluded.clear();
    ip("route add default via 10.1.0.2");
    world.redirect.apply(|| state.clone().into()).unwrap();
    refused("the default route");
    drop(world);
    // Unless it is named: --redirect-clients.
    let world = World::with(RedirectConfig { clients: vec![net_of("10.244.0.0/16")], ..by_route() }, &state);
    neighbour.connect(Some("10.244.1.200"), "10.8.0.7:10250").unwrap();
    assert_eq!(world.counter("route4/steered"), 1);
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

fn budget() {
    expect_instructions(
        &start(desired(&[EDGE])),
        " by route",
        &[("connect4", 500), ("connect6", 1400), ("sk_lookup", 1500)],
    );
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

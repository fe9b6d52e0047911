//! The router by example.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use tunnel_runtime::net::identifies_host;

use super::*;
use crate::RouteTarget;
use crate::inventory::InventoryNode;
use crate::report::MAX_LOGGED;
use crate::{ByAddress, ConflictKind, host_addresses};

pub(super) fn config() -> RouterConfig {
    RouterConfig {
        foreign: vec![net("10.96.0.0/16")],
        exclude: vec![net("10.0.0.8/29")],
        clients: vec![net("192.0.2.0/24")],
        host_addresses: || HOST.with_borrow(Clone::clone),
        ..RouterConfig::new(
            "198.18.0.0/15".parse().unwrap(),
            "fd00:706f::/64".parse().unwrap(),
            [10250, 10255],
        )
    }
}

thread_local! {
    // Each test has its own thread.
    pub(super) static HOST: RefCell<Option<HashSet<IpNet>>> = RefCell::new(Some(HashSet::from([net("10.0.0.1/32")])));
}

pub(super) fn router() -> (Router, Registry) {
    let mut registry = Registry::default();
    (Router::new(config(), &mut registry), registry)
}

pub(super) fn node(name: &str, edge: bool, addresses: &[&str]) -> InventoryNode {
    InventoryNode {
        name: self::name(name),
        edge,
        addresses: addresses.iter().map(|address| ip(address)).collect(),
        left_out: 0,
        kubelet_port: 10250,
        pod_cidrs: Vec::new(),
        created: None,
        was_edge: false,
        labels: BTreeMap::new(),
    }
}

pub(super) fn with_pods(name: &str, edge: bool, address: &str, range: &str) -> InventoryNode {
    InventoryNode { pod_cidrs: vec![net(range)], ..node(name, edge, &[address]) }
}

pub(super) fn inventory(nodes: Vec<InventoryNode>) -> Inventory {
    nodes.into()
}

pub(super) fn set_live(router: &Router, node: &str, live: bool) {
    router.set_live(&name(node), TunnelHolder::This, live);
}

pub(super) fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

pub(super) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn route(desired: &Desired, address: &str) -> Option<RouteTarget> {
    desired.route(IpNet::from(ip(address)))
}

pub(super) fn metrics(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    text
}

#[test]
fn a_node_is_found_by_virtual_address_name_and_address() {
    let (router, _) = router();
    let nodes = inventory(vec![
        node("edge-1", true, &["10.8.0.7", "fd00:8::7"]),
        node("cloud", false, &["10.0.0.2"]),
    ]);
    router.set_inventory(nodes.clone());
    let desired = router.desired();
    assert_eq!(desired.ports, BTreeSet::from([10250, 10255]));
    assert!(desired.table.excluded.contains(&net("10.0.0.2/32")));
    let snapshot = router.snapshot();
    for address in ["10.8.0.7", "fd00:8::7"] {
        let target = route(&desired, address).unwrap();
        assert!(!target.up);
        assert_eq!(target.virtual_address.is_ipv4(), ip(address).is_ipv4());
        let found = snapshot.by_virtual_address(target.virtual_address).unwrap();
        assert_eq!((found.node.as_str(), found.address), ("edge-1", ip(address)));
        assert_eq!(snapshot.by_address(ip(address)), ByAddress::Unique(found));
    }
    assert_eq!(snapshot.by_name("edge-1").unwrap().address, ip("10.8.0.7"));
    assert_eq!(snapshot.by_address(ip("::ffff:10.8.0.7")), snapshot.by_address(ip("10.8.0.7")));
    assert_eq!(snapshot.by_name("cloud"), None);
    assert_eq!(snapshot.by_address(ip("10.0.0.2")), ByAddress::Unknown);
    assert_eq!(snapshot.by_virtual_address(ip("198.18.255.255")), None);
    assert_eq!(snapshot.nodes().count(), 1);
    assert_eq!(*snapshot.inventory(), nodes);
}

#[test]
fn only_this_hosts_pods_and_configured_clients_may_use_the_redirect() {
    let (router, _) = router();
    let here = with_pods("cloud-1", false, "10.0.0.1", "10.244.0.0/24");
    let other = with_pods("cloud-2", false, "10.0.0.2", "10.244.1.0/24");
    router.set_inventory(inventory(vec![here, other]));
    assert_eq!(clients(&router), ["10.244.0.0/24", "192.0.2.0/24"]);
}

#[test]
fn this_host_is_found_by_its_node_name() {
    let named = RouterConfig { host: Some(name("cloud-2")), ..config() };
    let router = Router::new(named, &mut Registry::default());
    // A node that reports this host's address does not make its pods clients.
    let liar = with_pods("cloud-1", false, "10.0.0.1", "10.244.0.0/24");
    let here = with_pods("cloud-2", false, "10.0.0.2", "10.244.1.0/24");
    router.set_inventory(inventory(vec![liar, here]));
    assert_eq!(clients(&router), ["10.244.1.0/24", "192.0.2.0/24"]);
}

pub(super) fn clients(router: &Router) -> Vec<String> {
    router.desired().table.clients.iter().map(ToString::to_string).collect()
}

#[test]
fn an_edge_node_that_reports_this_hosts_address_is_not_this_host() {
    let (router, _) = router();
    let mut liar = node("edge-1", true, &["10.0.0.1", "127.0.0.1"]);
    liar.pod_cidrs.push(net("10.244.9.0/24"));
    router.set_inventory(inventory(vec![liar]));
    assert_eq!(clients(&router), ["192.0.2.0/24"]);
}

#[test]
fn loopback_and_link_local_addresses_do_not_identify_this_host() {
    for shared in ["127.0.0.1", "127.1.2.3", "::1", "169.254.1.1", "fe80::1", "0.0.0.0"] {
        assert!(!identifies_host(ip(shared)), "{shared}");
    }
    for own in ["10.0.0.1", "203.0.113.1", "fd00::1", "2001:db8::1"] {
        assert!(identifies_host(ip(own)), "{own}");
    }
    // Every machine has 127.0.0.1, but it never counts.
    assert!(host_addresses().unwrap().iter().all(|own| identifies_host(own.addr())));
}

#[test]
fn a_change_of_this_hosts_addresses_takes_effect_without_an_inventory_change() {
    let (router, _) = router();
    let first = with_pods("cloud-1", false, "10.0.0.1", "10.244.0.0/24");
    let second = with_pods("cloud-2", false, "10.0.0.2", "10.244.1.0/24");
    let edge = node("edge-1", true, &["10.8.0.7"]);
    router.set_inventory(inventory(vec![first, second, edge]));
    set_live(&router, "edge-1", true);
    let (before, snapshot) = (router.desired(), router.snapshot());
    let mut changed = router.changed();
    changed.mark_unchanged();

    router.refresh();
    assert!(!changed.has_changed().unwrap(), "the same addresses");
    HOST.set(None);
    router.refresh();
    assert!(!changed.has_changed().unwrap(), "unknown is not gone");
    assert!(Arc::ptr_eq(&snapshot, &router.snapshot()), "nothing was computed again");
    HOST.set(Some(HashSet::from([net("10.0.0.2/32")])));
    router.refresh();
    assert!(changed.has_changed().unwrap());
    assert_eq!(clients(&router), ["10.244.1.0/24", "192.0.2.0/24"]);
    let after = router.desired();
    assert_eq!(
        (&after.table.routes, &after.up),
        (&before.table.routes, &before.up),
        "virtual addresses and tunnels stay"
    );
}

/// kube-proxy in its IPVS mode gives the address of every Service to an interface of this host.
#[test]
fn an_address_of_this_host_is_no_nodes() {
    let (router, _) = router();
    HOST.set(Some(HashSet::from([net("10.0.0.1/32"), net("10.97.0.9/32")])));
    router.refresh();
    assert!(router.is_own(ip("10.97.0.9")) && router.is_own(ip("::ffff:10.97.0.9")));
    router.set_inventory(inventory(vec![node("edge-1", true, &["10.8.0.7", "10.97.0.9"])]));
    assert!(route(&router.desired(), "10.97.0.9").is_none());
    HOST.set(Some(HashSet::from([net("10.0.0.1/32")])));
    router.refresh();
    assert!(route(&router.desired(), "10.97.0.9").is_some() && !router.is_own(ip("10.97.0.9")));
}

/// Addresses that a Node may report although others cannot reach it there.
#[test]
fn unusual_addresses_lead_nowhere_and_the_usual_one_is_reached() {
    let (router, _) = router();
    let unusual = [
        "127.0.0.1",
        "0.0.0.0",
        "169.254.169.254",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "ff02::1",
        // Virtual addresses, this host's, and a Service's.
        "198.18.0.1",
        "fd00:706f::1",
        "10.0.0.1",
        "10.96.0.1",
    ];
    let all: Vec<_> = unusual.into_iter().chain(["10.8.0.7"]).collect();
    router.set_inventory(inventory(vec![node("edge-1", true, &all), node("odd", true, &unusual)]));
    set_live(&router, "edge-1", true);
    let desired = router.desired();
    for address in unusual {
        assert!(route(&desired, address).is_none(), "{address} is redirected");
        assert_eq!(router.snapshot().by_address(ip(address)), ByAddress::Unknown, "{address}");
    }
    assert!(route(&desired, "10.8.0.7").unwrap().up);
    let named = node("edge-1", true, &[&unusual[..9], &["10.8.0.7"]].concat());
    router.set_inventory(inventory(vec![named]));
    assert_eq!(router.snapshot().by_name("edge-1").unwrap().address, ip("10.8.0.7"));
}

#[test]
fn pods_anywhere_are_no_clients() {
    let (router, _) = router();
    let mut here = node("cloud-1", false, &["10.0.0.1"]);
    here.pod_cidrs = ["0.0.0.0/0", "::/0", "10.244.0.0/24", "fd00:9::/56"].map(net).to_vec();
    router.set_inventory(inventory(vec![here]));
    assert_eq!(clients(&router), ["10.244.0.0/24", "192.0.2.0/24", "fd00:9::/56"]);
}

#[test]
fn only_the_configured_ports_are_tunnelled() {
    let (router, _) = router();
    assert!(router.tunnels(10250) && router.tunnels(10255) && !router.tunnels(22));
}

#[test]
fn conflicts_are_resolved_and_counted() {
    let (router, registry) = router();
    router.set_inventory(inventory(vec![
        node("twin-a", true, &["10.8.0.7"]),
        node("twin-b", true, &["10.8.0.7", "10.8.0.8"]),
        node("shared", true, &["10.1.0.2"]),
        node("cloud", false, &["10.1.0.2"]),
        node("excluded", true, &["10.0.0.9"]),
        node("odd", true, &["127.0.0.1", "198.19.0.1", "fe80::1"]),
        node("none", true, &[]),
    ]));
    for name in ["twin-a", "twin-b", "shared", "excluded"] {
        set_live(&router, name, true);
    }
    let (desired, snapshot) = (router.desired(), router.snapshot());
    // Ambiguous: connect fails although both are live, and its virtual address leads nowhere.
    let target = route(&desired, "10.8.0.7").unwrap();
    assert!(!target.up);
    assert_eq!(snapshot.by_virtual_address(target.virtual_address), None);
    let names = vec![name("twin-a"), name("twin-b")];
    assert_eq!(snapshot.by_address(ip("10.8.0.7")), ByAddress::Ambiguous(names));
    assert_eq!(snapshot.by_name("twin-b").unwrap().address, ip("10.8.0.7"), "its name is unambiguous");
    assert!(route(&desired, "10.8.0.8").unwrap().up);
    // The cloud node wins.
    assert_eq!(route(&desired, "10.1.0.2"), None);
    assert!(desired.table.excluded.contains(&net("10.1.0.2/32")));
    assert_eq!(snapshot.by_address(ip("10.1.0.2")), ByAddress::Unknown);
    // The operator wins, in the kernel.
    assert_eq!(route(&desired, "10.0.0.9"), None);
    assert!(matches!(snapshot.by_address(ip("10.0.0.9")), ByAddress::Unique(_)));
    assert!(["127.0.0.1", "198.19.0.1", "fe80::1"].iter().all(|a| route(&desired, a).is_none()));
    assert_eq!(snapshot.by_name("none"), None);
    let metrics = metrics(&registry);
    for (kind, count) in [
        ("ambiguous", 1),
        ("cloud_and_edge", 1),
        ("excluded", 1),
        ("unroutable", 3),
        ("no_address", 1),
        ("no_virtual_address", 0),
    ] {
        let line = format!("inventory_conflicts{{kind=\"{kind}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    assert_eq!(
        snapshot.conflicts().iter().find(|c| c.kind == ConflictKind::Ambiguous).unwrap().to_string(),
        "address 10.8.0.7 of twin-a, twin-b: several edge nodes have it; connections to it fail, use their names"
    );
    router.set_inventory(Inventory::default());
    assert!(router.snapshot().conflicts().is_empty());
}

#[test]
fn with_a_used_up_redirect_range_connects_fail() {
    let mut registry = Registry::default();
    let small = RouterConfig { redirect_range: "198.18.0.0/24".parse().unwrap(), ..config() };
    let router = Router::new(small, &mut registry);
    let nodes = (0..240).map(|i| node(&format!("edge-{i}"), true, &[&format!("10.8.0.{i}")])).collect();
    (0..240).for_each(|i| set_live(&router, &format!("edge-{i}"), true));
    router.set_inventory(inventory(nodes));
    let desired = router.desired();
    assert_eq!(desired.routes().count(), 240);
    let down: Vec<_> = desired.routes().map(|(_, target)| target).filter(|target| !target.up).collect();
    assert_eq!(down.len(), 2, "256 without the network's, the unassigned one and the reserved 16");
    assert!(down.iter().all(|target| router.snapshot().by_virtual_address(target.virtual_address).is_none()));
    assert_eq!(
        router.snapshot().conflicts().iter().filter(|c| c.kind == ConflictKind::NoVirtualAddress).count(),
        2
    );
}

#[test]
fn a_conflict_is_logged_once_and_again_when_it_comes_back() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let writer = Mutex::new(file.reopen().unwrap());
    let subscriber = tracing_subscriber::fmt().with_writer(writer).with_ansi(false).finish();
    let text = || std::fs::read_to_string(file.path()).unwrap();
    // While there is only one dispatcher, tracing asks the subscriber of the first thread that reaches a call, which
    // may be another test's, and caches its "never".
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    tracing::subscriber::with_default(subscriber, || {
        let (router, _) = router();
        let twins = || vec![node("a", true, &["10.8.0.7"]), node("b", true, &["10.8.0.7"])];
        let count = || text().matches("several edge nodes have it").count();
        router.set_inventory(inventory(twins()));
        router.set_inventory(inventory(twins()));
        let mut third = twins();
        third.push(node("c", true, &["10.8.0.9"]));
        router.set_inventory(inventory(third));
        assert_eq!(count(), 1);
        router.set_inventory(Inventory::default());
        router.set_inventory(inventory(twins()));
        assert_eq!(count(), 2);
        // A thousand conflicts are not a thousand lines.
        let many =
            (0..2000).map(|i| node(&format!("n{i}"), true, &[&format!("10.9.{}.{}", i / 512, i / 2 % 256)]));
        router.set_inventory(inventory(many.collect()));
        assert_eq!(count(), 2 + MAX_LOGGED);
        let text = text();
        assert!(text.contains("more inventory conflicts") && text.contains("conflicts=980"), "{text}");
    });
}

/// A log writer that has a session start during each write.
struct Meanwhile {
    router: Arc<std::sync::OnceLock<Arc<Router>>>,
    done: std::sync::mpsc::Sender<bool>,
}

impl std::io::Write for Meanwhile {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if let Some(router) = self.router.get().cloned() {
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                set_live(&router, "c", true);
                set_live(&router, "d", false);
                tell.send(router.desired().routes().count())
            });
            let in_time = told.recv_timeout(Duration::from_secs(20));
            self.done.send(in_time == Ok(1)).unwrap();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_session_does_not_wait_for_a_recomputation_and_is_in_its_result() {
    let slot = Arc::new(std::sync::OnceLock::new());
    let (done, seen) = std::sync::mpsc::channel();
    let writer = Mutex::new(Meanwhile { router: slot.clone(), done });
    let subscriber = tracing_subscriber::fmt().with_writer(writer).with_ansi(false).finish();
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    tracing::subscriber::with_default(subscriber, || {
        let router = Arc::new(router().0);
        set_live(&router, "d", true);
        router.set_inventory(inventory(vec![node("d", true, &["10.8.0.4"])]));
        slot.set(router.clone()).unwrap();
        // The conflict is logged during the recomputation.
        let nodes = [("a", "10.8.0.7"), ("b", "10.8.0.7"), ("c", "10.8.0.3"), ("d", "10.8.0.4")];
        router.set_inventory(inventory(nodes.map(|(name, address)| node(name, true, &[address])).to_vec()));
        assert_eq!(seen.try_recv(), Ok(true), "the session waited, or nothing was logged");
        assert!(route(&router.desired(), "10.8.0.3").unwrap().up);
        assert!(!route(&router.desired(), "10.8.0.4").unwrap().up);
    });
}

#[test]
fn only_real_changes_are_announced() {
    let (router, _) = router();
    let mut changed = router.changed();
    let nodes = || vec![node("edge-1", true, &["10.8.0.7"])];
    router.set_inventory(inventory(nodes()));
    assert!(changed.has_changed().unwrap());
    changed.mark_unchanged();
    router.set_inventory(inventory(nodes()));
    set_live(&router, "edge-2", true);
    set_live(&router, "edge-1", false);
    assert!(!changed.has_changed().unwrap());
    set_live(&router, "edge-1", true);
    assert!(changed.has_changed().unwrap());
    assert!(route(&router.desired(), "10.8.0.7").unwrap().up);
    // A node may attach before the inventory knows it.
    router.set_inventory(inventory(vec![node("edge-2", true, &["10.8.0.8"])]));
    assert!(route(&router.desired(), "10.8.0.8").unwrap().up);
}

/// Edge nodes with an address and pods of different families; all of one family would not fit into the kernel.
fn many(count: u32) -> Inventory {
    let first = u128::from("fd00:9::".parse::<std::net::Ipv6Addr>().unwrap());
    let nodes = (0..count).map(|n| InventoryNode {
        addresses: vec![Ipv4Addr::from(0x0a10_0000 + n).into()],
        pod_cidrs: vec![
            IpNet::new(IpAddr::from((first + (u128::from(n) << 16)).to_be_bytes()), 112).unwrap(),
        ],
        ..node(&format!("edge-{n}"), true, &[])
    });
    nodes.collect()
}

#[test]
fn a_node_that_changes_among_100_000_keeps_every_virtual_address_and_no_session_waits() {
    for count in [5_000, 10_000, 100_000] {
        let wide = RouterConfig { pods: vec![net("fd00:9::/64")], ..config() };
        let mut registry = Registry::default();
        let router = Router::new(wide, &mut registry);
        let nodes = many(count);
        let started = Instant::now();
        router.set_inventory(nodes.clone());
        let first = started.elapsed();
        let before = router.desired();
        assert_eq!(before.table.routes.len(), 2 * count as usize);
        let started = Instant::now();
        nodes.iter().for_each(|node| router.set_live(&node.name, TunnelHolder::This, true));
        let flips = started.elapsed();
        assert!(router.desired().routes().all(|(_, target)| target.up));

        let longest = std::thread::scope(|scope| {
            let computing = scope.spawn(|| {
                let (mut nodes, mut times) = (nodes.clone(), Vec::new());
                for n in 0..5 {
                    nodes.insert(node("edge-7", true, &[&format!("10.8.0.{n}")]));
                    let started = Instant::now();
                    router.set_inventory(nodes.clone());
                    times.push(started.elapsed());
                }
                times.sort_unstable();
                times[2]
            });
            let (session, mut longest) = (name("edge-8"), Duration::ZERO);
            while !computing.is_finished() {
                let started = Instant::now();
                router.set_live(&session, TunnelHolder::This, false);
                router.set_live(&session, TunnelHolder::This, true);
                longest = longest.max(started.elapsed());
                std::thread::yield_now();
            }
            println!("{count} nodes: {first:?} at first, one Node changes {:?}", computing.join().unwrap());
            longest
        });
        println!(
            "{count} nodes: a session waits {longest:?} at most meanwhile, {:?} on average else",
            flips / count
        );
        let mut metrics = String::new();
        let started = Instant::now();
        encode(&mut metrics, &registry).unwrap();
        println!("{count} nodes: a scrape of the routes' metrics takes {:?}", started.elapsed());
        for counted in [format!("here\"}} {count}"), "elsewhere\"} 0".into(), "away\"} 0".into()] {
            assert!(metrics.contains(&format!("nodes{{state=\"{counted}\n")), "{metrics}");
        }
        // No virtual address was reassigned.
        let after = router.desired();
        let same = after.routes().filter(|(net, target)| {
            before
                .route(*net)
                .is_some_and(|before| target.up && target.virtual_address == before.virtual_address)
        });
        assert_eq!(
            (same.count(), after.table.routes.len()),
            (2 * count as usize - 2, 2 * count as usize - 1)
        );
    }
}

fn pods_router() -> Router {
    let pods = ["10.0.0.0/8", "198.18.0.0/15", "fd00:9::/48"].map(net).to_vec();
    Router::new(RouterConfig { pods, ..config() }, &mut Registry::default())
}

#[test]
fn pods_of_edge_nodes_are_reached_on_any_port() {
    let router = pods_router();
    router.set_inventory(inventory(vec![
        with_pods("edge-1", true, "10.8.0.7", "10.244.3.0/24"),
        with_pods("cloud", false, "10.0.0.2", "10.244.0.0/24"),
    ]));
    let pods = net("10.244.3.0/24");
    let target = router.desired().route(pods).unwrap();
    assert!(target.any_port && !target.up);
    assert!(!route(&router.desired(), "10.8.0.7").unwrap().any_port);
    assert_eq!(router.desired().routes().count(), 2, "the cloud's pods are not routed");
    let IpAddr::V4(first) = target.virtual_address else { panic!("{target:?}") };
    let virtual_address = IpAddr::from((u32::from(first) + 77).to_be_bytes());
    let found = router.snapshot().by_virtual_address(virtual_address).unwrap();
    assert_eq!((found.node.as_str(), found.address), ("edge-1", ip("10.244.3.77")));
    assert!(found.pod);
    assert_eq!(
        router.snapshot().by_virtual_address(IpAddr::from((u32::from(first) + 256).to_be_bytes())),
        None
    );
    set_live(&router, "edge-1", true);
    assert!(router.desired().route(pods).unwrap().up);
    // The node keeps its block when other nodes are added.
    router.set_inventory(inventory(vec![
        with_pods("edge-0", true, "10.8.0.6", "10.244.2.0/24"),
        with_pods("edge-1", true, "10.8.0.7", "10.244.3.0/24"),
    ]));
    assert_eq!(router.desired().route(pods).unwrap(), RouteTarget { up: true, ..target });
}

#[test]
fn conflicting_pod_ranges_are_not_routed() {
    let router = pods_router();
    let mut too_large = with_pods("too-large", true, "10.8.0.9", "10.128.0.0/9");
    too_large.pod_cidrs.push(net("fd00:9::/64"));
    router.set_inventory(inventory(vec![
        with_pods("same-1", true, "10.8.0.1", "10.1.0.0/24"),
        with_pods("same-2", true, "10.8.0.2", "10.1.0.0/24"),
        with_pods("wide", true, "10.8.0.3", "10.2.0.0/16"),
        with_pods("narrow", true, "10.8.0.4", "10.2.7.0/24"),
        with_pods("like-the-clouds", true, "10.8.0.5", "10.3.0.0/24"),
        with_pods("cloud", false, "10.4.0.9", "10.3.0.0/25"),
        with_pods("tokens", true, "10.8.0.6", "198.18.4.0/24"),
        with_pods("excluded", true, "10.8.0.7", "10.0.0.8/30"),
        with_pods("services", true, "10.8.0.10", "172.30.0.0/17"),
        with_pods("the-clusters-services", true, "10.8.0.11", "10.96.3.0/24"),
        with_pods("this-hosts", true, "10.8.0.12", "10.0.0.0/30"),
        // Neither takes anything from the others.
        with_pods("everything", true, "10.8.0.13", "0.0.0.0/0"),
        with_pods("cloud-everything", false, "10.4.0.10", "0.0.0.0/0"),
        // A cloud node's address within it is excluded at connect(); the rest is routed.
        with_pods("good", true, "10.8.0.8", "10.4.0.0/24"),
        too_large,
    ]));
    let desired = router.desired();
    let routed: Vec<_> = desired.routes().filter(|(_, target)| target.any_port).map(|(net, _)| net).collect();
    assert_eq!(routed, [net("10.4.0.0/24")]);
    let snapshot = router.snapshot();
    let of = |kind| {
        let conflicts = snapshot.conflicts().iter().filter(|conflict| conflict.kind == kind);
        conflicts.map(|conflict| conflict.nodes[0].to_string()).collect::<BTreeSet<_>>()
    };
    let expected = [
        "same-1",
        "same-2",
        "wide",
        "narrow",
        "like-the-clouds",
        "tokens",
        "excluded",
        "services",
        "the-clusters-services",
        "this-hosts",
        "everything",
    ];
    assert_eq!(of(ConflictKind::PodRange), expected.iter().map(ToString::to_string).collect());
    assert_eq!(of(ConflictKind::NoVirtualRange), BTreeSet::from(["too-large".to_owned()]));
}

#[test]
fn ports_change_while_running() {
    let (router, _) = router();
    let mut changed = router.changed();
    changed.mark_unchanged();
    router.set_ports(&BTreeSet::from([9100, 10266]), &BTreeSet::from([10266]));
    assert!(changed.has_changed().unwrap());
    assert_eq!(router.desired().ports, BTreeSet::from([9100, 10250, 10255, 10266]));
    assert!(router.tunnels(9100) && router.tunnels(10250) && !router.tunnels(22));
    let dialled = |address, pod, port| {
        let found =
            NodeAddress { node: "edge-1".parse().unwrap(), address: ip(address), kubelet_port: 10250, pod };
        router.dialled(&found, port).to_string()
    };
    assert_eq!(dialled("10.8.0.7", false, 9100), "10.8.0.7:9100");
    assert_eq!(dialled("fd00::7", false, 10266), "127.0.0.1:10266");
    assert_eq!(dialled("10.8.0.7", true, 10266), "10.8.0.7:10266");
    router.set_inventory(inventory(vec![node("edge-1", true, &["10.8.0.7"])]));
    assert!(router.desired().ports.contains(&9100), "a change of the nodes keeps the ports");
    router.set_ports(&BTreeSet::new(), &BTreeSet::new());
    assert_eq!(router.desired().ports, BTreeSet::from([10250, 10255]), "the configured ones stay");
}

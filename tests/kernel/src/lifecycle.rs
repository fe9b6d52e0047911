//! Starts, kills, replacements, lost parts, stops.

use std::fs::File;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use aya::programs::loaded_programs;
use nix::libc;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tunnel_redirect::{Cleaned, RedirectConfig, RedirectError, cleanup, register_redirect};
use tunnel_runtime::net::NetChanges;

use crate::Case;
use crate::peer::Peer;
use crate::raw::{self, CONNECT4, SK_LOOKUP, attached};
use crate::support::{
    EDGE, EDGE_B, EDGE_V6, PORT, World, ask, at, config, counter, desired, eventually, fails, ip, listen,
    range_routes,
};

pub(crate) const CASES: &[Case] = &[
    ("lifecycle::stop_leaves_nothing", stop_leaves_nothing),
    ("lifecycle::killed_server_leaves_only_a_route_that_the_next_takes_over", killed),
    ("lifecycle::cleanup_removes_the_route_of_a_killed_server", cleanup_after_kill),
    ("lifecycle::replaced_under_load", replaced_under_load),
    ("lifecycle::what_was_released_is_taken_back", taken_back),
    ("lifecycle::a_late_change_is_not_older_than_the_one_before", late_change),
    ("lifecycle::a_long_change_does_not_count_as_death", long_change),
    ("lifecycle::a_scrape_does_not_wait_for_a_change", scraped),
    ("lifecycle::lost_route_is_noticed_and_restored", lost_route),
    ("lifecycle::routes_elsewhere_wake_nobody", route_changes),
    ("lifecycle::lost_programs_are_noticed_and_restored", lost_programs),
    ("lifecycle::verification_works_while_closed", verify_while_closed),
    ("lifecycle::beside_programs_of_others", beside_others),
    ("lifecycle::what_another_program_takes_is_taken_back", beside_a_taker),
    ("lifecycle::programs_fit_the_instruction_budget", budget),
    ("lifecycle::programs_log_at_debug_level", program_log),
];

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

pub(crate) fn cgroup() -> File {
    File::open(crate::harness::own_cgroup()).unwrap()
}

fn netns() -> File {
    File::open("/proc/thread-self/ns/net").unwrap()
}

/// Programs attached to this case's cgroup and namespace.
pub(crate) fn programs() -> (usize, usize) {
    (attached(&cgroup(), CONNECT4), attached(&netns(), SK_LOOKUP))
}

/// Each hook with the id of its program, where no others are attached.
fn own_programs() -> Vec<(&'static str, u32)> {
    let of_cgroup = raw::CGROUP_HOOKS.map(|(name, hook)| (name, raw::programs(&cgroup(), hook)));
    let lookup = ("sk_lookup", raw::programs(&netns(), SK_LOOKUP));
    let all = of_cgroup.into_iter().chain([lookup]);
    all.flat_map(|(name, ids)| ids.into_iter().map(move |id| (name, id))).collect()
}

fn stop_leaves_nothing() {
    let world = World::start(&desired(&[EDGE, EDGE_V6]));
    let ids: Vec<u32> = own_programs().into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids.len(), 5);
    assert_eq!(programs(), (1, 1));
    assert_eq!(range_routes().len(), 2, "{:?}", range_routes());
    ask(at(EDGE.0, PORT)).unwrap();

    world.redirect.stop();
    world.redirect.stop();
    assert_eq!(programs(), (0, 0));
    assert_eq!(range_routes(), Vec::<String>::new());
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    assert!(matches!(world.redirect.apply(|| desired(&[EDGE]).into()), Err(RedirectError::Stopped)));
    drop(world);
    eventually("the kernel unloads the programs", || {
        !loaded_programs().filter_map(Result::ok).any(|program| ids.contains(&program.id()))
    });

    // Dropping does the same as stopping.
    drop(World::start(&desired(&[EDGE])));
    assert_eq!((programs(), range_routes().len()), ((0, 0), 0));
}

fn killed() {
    let mut cloud = Peer::spawn();
    cloud.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    cloud.listen("10.1.0.2:10250");
    let server = Peer::spawn_server();
    // Accepted by the kernel on the server's behalf.
    let held = TcpStream::connect(at(EDGE.0, PORT)).unwrap();
    assert_eq!(programs(), (1, 1));
    server.kill();

    eventually("the kernel detaches the programs", || programs() == (0, 0));
    // Edge connects go direct, and fail immediately: there is no route to them here. The cloud is unaffected.
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    TcpStream::connect(at("10.1.0.2", PORT)).unwrap();
    let mut byte = [0];
    let error = std::io::Read::read(&mut &held, &mut byte);
    assert!(error.is_err() || error.unwrap() == 0, "the held connection ended");
    // Nothing listens at a virtual address.
    fails(at(EDGE.1, PORT), libc::ECONNREFUSED);
    assert_eq!(range_routes().len(), 2, "the redirect routes stay: {:?}", range_routes());

    let world = World::start(&desired(&[EDGE]));
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    drop(world);
    assert_eq!(range_routes(), Vec::<String>::new());
}

fn cleanup_after_kill() {
    let server = Peer::spawn_server();
    assert!(matches!(cleanup(&config()), Err(RedirectError::RangeTaken { .. })));
    server.kill();
    eventually("the kernel detaches the programs", || programs() == (0, 0));
    assert_eq!(cleanup(&config()).unwrap().routes.len(), 2);
    assert_eq!(range_routes(), Vec::<String>::new());
    assert_eq!(cleanup(&config()).unwrap(), Cleaned::default());
}

fn replaced_under_load() {
    let edges = [EDGE, EDGE_B];
    let first = World::start(&desired(&edges));
    let stop = Arc::new(AtomicBool::new(false));
    let connects = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = edges
        .into_iter()
        .map(|(edge, virtual_address)| {
            let (stop, connects) = (Arc::clone(&stop), Arc::clone(&connects));
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let greeting = ask(at(edge, PORT)).expect("a connect while the server is replaced");
                    assert_eq!(greeting.local, at(virtual_address, PORT), "reached another node");
                    connects.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let more = |what: &str| {
        let now = connects.load(Ordering::Relaxed);
        eventually(what, || {
            connects.load(Ordering::Relaxed) > now + 50 || clients.iter().any(|c| c.is_finished())
        });
    };
    more("connects through the first");
    let mut world = first;
    for round in 0..3 {
        let next = World::start(&desired(&edges));
        more("connects with both");
        // The older server's programs come first and still redirect every connect.
        let steered = counter(&next.redirect, "connect4/redirected");
        world.redirect.drain().unwrap();
        eventually("the next one redirects", || {
            counter(&next.redirect, "connect4/redirected") > steered + 20
                || clients.iter().any(|c| c.is_finished())
        });
        world.redirect.stop();
        assert_eq!(range_routes().len(), 2, "round {round}: the route belongs to the next one now");
        more("connects through the next");
        world = next;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().expect("no connect failed or reached another node");
    }
    println!("report {} connects during three replacements", connects.load(Ordering::Relaxed));
    drop(world);
    assert_eq!((programs(), range_routes().len()), ((0, 0), 0));
}

/// A server whose successor ends takes the redirect back. The virtual addresses' route may have gone with that one.
fn taken_back() {
    let world = World::start(&desired(&[EDGE]));
    let runtime = runtime();
    world.redirect.release();
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    assert!(!runtime.block_on(world.redirect.finds_another()), "there is none");
    ip("route del local 198.18.0.0/15 dev lo table local");
    world.redirect.resume().unwrap();
    assert_eq!(range_routes().len(), 2, "{:?}", range_routes());
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    let next = World::start(&desired(&[EDGE]));
    assert!(runtime.block_on(next.redirect.finds_another()));
    drop((world, next));
}

/// A change that has asked for the wanted state writes it before a newer state can be written.
fn late_change() {
    let world = World::start(&desired(&[]));
    let wanted = Mutex::new(desired(&[EDGE]));
    let current = || wanted.lock().unwrap().clone().into();
    let (has_asked, asked) = mpsc::channel();
    let (has_written, written) = mpsc::channel();
    thread::scope(|scope| {
        let redirect = &world.redirect;
        scope.spawn(move || {
            let late = || {
                let state = current();
                has_asked.send(()).unwrap();
                // Long enough for a newer one to be written meanwhile.
                let _ = written.recv_timeout(Duration::from_millis(500));
                state
            };
            redirect.apply(late).unwrap();
        });
        asked.recv().unwrap();
        *wanted.lock().unwrap() = desired(&[EDGE_B]);
        redirect.apply(current).unwrap();
        let _ = has_written.send(());
    });
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    assert_eq!(ask(at(EDGE_B.0, PORT)).unwrap().local, at(EDGE_B.1, PORT));
}

/// The programs get their heartbeat also while a change takes longer than --orphan-timeout.
fn long_change() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    // A busy machine may hold up the thread of the heartbeat for a second or two.
    let orphan_timeout = Duration::from_secs(5);
    let world = World::with(RedirectConfig { orphan_timeout, ..config() }, &desired(&[EDGE]));
    let cancel = CancellationToken::new();
    let watching = runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
    eventually("the watch runs", || world.redirect.health().verified.is_some());
    let (has_begun, begun) = mpsc::channel();
    let (has_connected, connected) = mpsc::channel();
    thread::scope(|scope| {
        let redirect = &world.redirect;
        scope.spawn(move || {
            let applied = redirect.apply(|| {
                has_begun.send(()).unwrap();
                let _ = connected.recv_timeout(Duration::from_secs(60));
                desired(&[EDGE]).into()
            });
            applied.unwrap();
        });
        begun.recv().unwrap();
        thread::sleep(2 * orphan_timeout);
        let greeting = ask(at(EDGE.0, PORT));
        has_connected.send(()).unwrap();
        assert_eq!(greeting.unwrap().local, at(EDGE.1, PORT));
    });
    cancel.cancel();
    runtime.block_on(watching).unwrap();
}

/// With a lock that the change holds the scrape would never end.
fn scraped() {
    let world = World::start(&desired(&[EDGE]));
    let mut registry = Registry::default();
    register_redirect(&mut registry, Arc::clone(&world.redirect));
    let mut text = String::new();
    let during_change = || {
        encode(&mut text, &registry).unwrap();
        desired(&[EDGE]).into()
    };
    world.redirect.apply(during_change).unwrap();
    assert!(text.contains("redirect_verdicts") && text.contains("redirect_exclusions_left_out"), "{text}");
}

fn lost_route() {
    let world = World::start(&desired(&[EDGE]));
    let runtime = runtime();
    runtime.block_on(world.redirect.verify()).unwrap();
    ip("route del local 198.18.0.0/15 dev lo table local");
    let error = runtime.block_on(world.redirect.verify()).unwrap_err();
    assert!(matches!(error, RedirectError::SelfTest(_)), "{error}");
    assert!(error.to_string().contains("did not reach the listener"), "{error}");
    runtime.block_on(world.redirect.verify_and_restore());
    let health = world.redirect.health();
    assert_eq!((health.problem, health.restored), (None, 1));
    runtime.block_on(world.redirect.verify()).unwrap();
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
}

/// As many changes as a router with the Internet's routes may see.
fn route_changes() {
    runtime().block_on(async {
        let ranges = [config().redirect_range.into(), config().redirect_range_v6.into()];
        let mut changes = NetChanges::of_routes(&ranges, &[77, 198_180], Some(1), None).unwrap();
        let batch = tempfile::NamedTempFile::new().unwrap();
        let first = [
            "link add many0 type veth peer name many1",
            "link set many1 up",
            "link set many0 up",
            "route add default dev many0",
            "route add 2001:db8:77::/64 dev many0",
        ];
        let mut commands: Vec<String> = first.map(str::to_owned).into();
        for net in 0..250 {
            commands.extend(["add", "del"].map(|verb| format!("route {verb} 10.77.{net}.0/24 dev many0")));
        }
        std::fs::write(batch.path(), commands.join("\n") + "\n").unwrap();
        ip(&format!("-batch {}", batch.path().display()));
        assert!(!changes.next(Duration::from_millis(300)).await.unwrap(), "a change elsewhere was told");
        for change in [
            "route add 198.19.4.0/24 dev many0",
            "route add local 198.18.0.0/15 dev lo table local",
            "route del local 198.18.0.0/15 dev lo table local",
            "-6 route add local fd9e:706f:7374:6572::/64 dev lo table local",
            "rule add priority 77 lookup 77",
            "route add 10.78.0.0/24 dev many0 table 77",
            "-6 route add 2001:db8:78::/64 dev many0 table 198180",
            "link set lo mtu 1500",
        ] {
            ip(change);
            assert!(changes.next(Duration::from_secs(5)).await.unwrap(), "not told: {change}");
        }
        // A netlink socket has its process's number as its address. The shell becomes ip(8) once it is known here.
        for own in [false, true] {
            let rule = format!("read go; exec ip rule add priority 78 lookup {}", 78 + u32::from(own));
            let mut author = Command::new("sh").args(["-c", &rule]).stdin(Stdio::piped()).spawn().unwrap();
            let but_by = if own { author.id() } else { u32::MAX };
            let mut changes = NetChanges::of_routes(&ranges, &[], None, Some(but_by)).unwrap();
            drop(author.stdin.take());
            assert!(author.wait().unwrap().success());
            assert_eq!(changes.next(Duration::from_millis(300)).await.unwrap(), !own);
        }
    });
}

fn lost_programs() {
    let world = World::start(&desired(&[EDGE, EDGE_V6]));
    let runtime = runtime();
    for (round, (hook, id)) in own_programs().into_iter().enumerate() {
        raw::detach_link_of(id);
        let error = runtime.block_on(world.redirect.verify()).unwrap_err().to_string();
        let expected = match hook {
            "sk_lookup" => "did not reach the listener".to_owned(),
            hook if hook.starts_with("getpeername") => format!("the {hook} program is not in effect"),
            hook => format!("was not redirected by {hook}"),
        };
        assert!(error.contains(&expected), "{hook}: {error}");
        runtime.block_on(world.redirect.verify_and_restore());
        let health = world.redirect.health();
        assert_eq!((health.problem, health.restored), (None, round as u64 + 1), "{hook}");
    }
    ask(at(EDGE.0, PORT)).unwrap();
    ask(at(EDGE_V6.0, PORT)).unwrap();
    runtime.block_on(world.redirect.verify()).unwrap();
}

fn verify_while_closed() {
    let world = World::start(&desired(&[EDGE]));
    world.redirect.set_serving(false).unwrap();
    runtime().block_on(world.redirect.verify()).unwrap();
    world.redirect.set_serving(true).unwrap();
    runtime().block_on(world.redirect.verify()).unwrap();
    // With no port tunnelled nothing is redirected, and verification still works.
    world.redirect.apply(tunnel_routing::Desired::default).unwrap();
    runtime().block_on(world.redirect.verify()).unwrap();
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
}

/// With programs of Cilium's kind at the same hooks, attached before and while the redirect runs.
fn beside_others() {
    let service = "10.96.0.1";
    let edge = |text: &str| text.parse().unwrap();
    let before = raw::attach_balancer(&cgroup(), edge(service), edge(EDGE.0));
    let lookup = raw::attach_lookup(&netns());
    let world = World::start(&desired(&[EDGE, EDGE_B]));
    let after = raw::attach_balancer(&cgroup(), edge("10.96.0.2"), edge(EDGE_B.0));
    assert_eq!(programs(), (3, 2));
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    // Programs run in the order in which they were attached: the first one's choice is redirected, the last one's goes
    // direct.
    assert_eq!(ask(at(service, PORT)).unwrap().local, at(EDGE.1, PORT));
    fails(at("10.96.0.2", PORT), libc::ENETUNREACH);
    runtime().block_on(world.redirect.verify()).unwrap();
    drop(world);
    assert_eq!(programs(), (2, 1), "the others' stay");
    drop((before, after, lookup));
}

/// Beside a lookup that gives everything to its own listener, and was attached before.
fn beside_a_taker() {
    let taker = listen("127.0.0.1:0");
    let lookup = raw::attach_taker(&netns(), &taker);
    let world = World::start(&desired(&[EDGE]));
    let tested = world.counter("lookup4/replaced");
    assert!(tested > 0, "the self-test's connection was taken back");
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    runtime().block_on(world.redirect.verify()).unwrap();
    assert!(world.counter("lookup4/replaced") >= tested + 2);
    assert_eq!(world.counter("lookup4/steered"), 0);
    // Connections to other addresses stay its own.
    let other = TcpStream::connect(at("127.0.0.1", 1)).unwrap();
    assert_eq!(taker.accept().unwrap().0.local_addr().unwrap(), at("127.0.0.1", 1));
    // A connection that an older server has chosen stays that server's.
    let next = World::start(&desired(&[EDGE]));
    let accepted = world.accepted();
    ask(at(EDGE.0, PORT)).unwrap();
    assert!(world.accepted() > accepted);
    assert_eq!(next.counter("lookup4/replaced"), 0);
    drop((other, world, next, lookup));
}

fn budget() {
    let _world = World::start(&desired(&[EDGE]));
    expect_instructions(
        "",
        &[
            ("connect4", 450),
            ("connect6", 1200),
            ("getpeername4", 200),
            ("getpeername6", 600),
            ("sk_lookup", 800),
        ],
    );
}

/// Compares the instructions that the verifier walks with a budget for each hook; the kernel's own limit is a million. Growth
/// beyond it needs a reason.
pub(crate) fn expect_instructions(way: &str, budgets: &[(&str, u32)]) {
    let attached = own_programs();
    for &(hook, budget) in budgets {
        let (_, id) = attached.iter().find(|(name, _)| *name == hook).expect("attached");
        let program =
            loaded_programs().filter_map(Result::ok).find(|program| program.id() == *id).expect("loaded");
        let verified = program.verified_instruction_count().expect("this kernel counts them (5.16)");
        println!(
            "report {hook}{way}: {verified} verified instructions of {budget}, {} bytes of machine code",
            program.size_jitted()
        );
        assert!(verified <= budget, "{hook}{way}: {verified} verified instructions, the budget is {budget}");
    }
}

fn program_log() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter("tunnel_ebpf=trace")
        .with_ansi(false)
        .with_writer(Mutex::new(file.reopen().unwrap()))
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let logged = |words: &str| {
        eventually(words, || std::fs::read_to_string(file.path()).unwrap().contains(words));
    };
    let world = World::start(&desired(&[EDGE, EDGE_V6]));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cancel = tokio_util::sync::CancellationToken::new();
    let watching = runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
    ask(at(EDGE.0, PORT)).unwrap();
    ask(at(EDGE_V6.0, PORT)).unwrap();
    logged("connect to 10.8.0.7:10250 redirected to 198.18.0.7");
    logged("IPv6 connect to port 10250 redirected");
    cancel.cancel();
    runtime.block_on(watching).unwrap();
}

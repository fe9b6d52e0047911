//! Causes of a failed start, and the messages.

use std::fs::{self, File};
use std::net::TcpStream;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use tunnel_redirect::{
    Pods, Redirect, RedirectConfig, RedirectError, foreign_lookups, give_up_capabilities, host_checks,
    missing_range_routes,
};
use tunnel_runtime::kernel;

use crate::Case;
use crate::by_route::rules;
use crate::harness::{cgroup_mount, own_cgroup};
use crate::lifecycle::{cgroup, runtime};
use crate::raw::{self, CONNECT4};
use crate::support::{
    EDGE, EDGE_V6, Listener, PORT, World, ask, at, config, desired, doctor, eventually, ip, range_routes,
    route, sysctl,
};

pub(crate) const CASES: &[Case] = &[
    ("failures::foreign_exclusive_program", foreign),
    ("failures::foreign_exclusive_program_in_a_parent", foreign_in_parent),
    ("failures::foreign_sk_lookup_program", foreign_lookup),
    ("failures::sk_lookup_programs_without_names", unnamed_lookups),
    ("failures::connects_that_do_not_fail_are_told", old_kernel),
    ("failures::missing_range_routes", range_routes_missing),
    ("failures::not_a_cgroup", not_a_cgroup),
    ("failures::cgroup_namespace_root", namespace_root),
    ("failures::the_hosts_cgroups_beside_the_containers_own", hierarchy_beside_own),
    ("failures::no_cgroup_v2_mounted", nothing_mounted),
    ("failures::process_outside_the_cgroup", outside),
    ("failures::missing_capabilities", unprivileged),
    ("failures::the_documented_capabilities_are_enough", documented_capabilities),
    ("failures::beside_another_server_they_are_enough", documented_capabilities_beside_another),
    ("failures::this_kernel_needs_no_perfmon", without_perfmon),
    (
        "failures::this_kernel_needs_no_perfmon_and_it_is_given_up",
        this_kernel_needs_no_perfmon_and_it_is_given_up,
    ),
    ("failures::what_only_the_start_needs_is_given_up", what_only_the_start_needs_is_given_up),
    ("failures::without_ipv6_the_rest_works", without_ipv6),
    ("failures::programs_come_back_while_ipv6_is_switched_off", ipv6_goes),
    ("failures::without_an_ipv6_listener_the_rest_works", without_v6_listener),
];

fn start(config: RedirectConfig) -> Result<Redirect, RedirectError> {
    let listener = Listener::open();
    Redirect::start(config, &listener.v4, Some(&listener.v6))
}

#[track_caller]
fn message_has(error: &RedirectError, words: &[&str]) {
    let text = error.to_string();
    println!("report {text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert_eq!(range_routes(), Vec::<String>::new(), "a failed start leaves nothing");
}

fn foreign() {
    let cgroup = File::open(own_cgroup()).unwrap();
    let program = raw::attach_exclusively(&cgroup).unwrap();
    let error = start(config()).unwrap_err();
    assert!(matches!(error, RedirectError::Foreign { hook: "connect4", .. }), "{error}");
    message_has(&error, &["EPERM", "old_cilium", "bpftool cgroup detach", "--redirect=off"]);
    let failing: Vec<_> = host_checks(&config()).into_iter().filter(|check| check.outcome.is_err()).collect();
    assert_eq!(failing.len(), 1, "{failing:?}");
    assert_eq!(failing[0].name, "other programs");
    doctor_finds("foreign-exclusive-program");
    drop(program);
}

/// Checks that the program finds this when it runs as a doctor, in a process of its own.
#[track_caller]
fn doctor_finds(code: &str) {
    let found = doctor();
    assert!(found.iter().any(|other| other == code), "{found:?}");
}

fn foreign_in_parent() {
    let parent = own_cgroup();
    let program = raw::attach_exclusively(&File::open(&parent).unwrap()).unwrap();
    let child = parent.join("child");
    fs::create_dir(&child).unwrap();
    fs::write(child.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let error = start(RedirectConfig { cgroup: Some(child), ..config() }).unwrap_err();
    match &error {
        RedirectError::Foreign { path, .. } => assert_eq!(path, &parent),
        other => panic!("{other}"),
    }
    drop(program);
}

/// A foreign program is listed, and ours beside it is not.
fn foreign_lookup() {
    let world = World::start(&desired(&[EDGE]));
    assert_eq!(foreign_lookups().unwrap(), Vec::<String>::new());
    let link = raw::attach_lookup(&File::open("/proc/thread-self/ns/net").unwrap());
    let found = foreign_lookups().unwrap();
    assert!(found.len() == 1 && found[0].starts_with("cil_lookup (id "), "{found:?}");
    doctor_finds("foreign-sk-lookup");
    drop((link, world));
}

/// The doctor tells if a connect to a node without a tunnel does not fail here, as it does from Linux 6.1 on.
fn old_kernel() {
    let mut wanted = desired(&[]);
    route(&mut wanted, EDGE.0, EDGE.1, false);
    let world = World::start(&wanted);
    let connected = TcpStream::connect_timeout(&at(EDGE.0, PORT), Duration::from_secs(5));
    let found = doctor();
    match connected {
        Ok(_) => {
            let kernel = kernel::version();
            assert!(kernel.is_none_or(|kernel| kernel < (6, 1)), "connects do not fail on Linux {kernel:?}");
            assert!(found.iter().any(|code| code == "kernel-old"), "{found:?}");
        }
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(nix::libc::EHOSTUNREACH), "{error}");
            assert!(found.iter().all(|code| code != "kernel-old"), "{found:?}");
        }
    }
    drop(world);
}

/// As for a doctor in the shipped pod, which reports that it cannot tell the owners.
fn unnamed_lookups() {
    let world = World::start(&desired(&[EDGE]));
    let link = raw::attach_lookup(&File::open("/proc/thread-self/ns/net").unwrap());
    have_only(DOCUMENTED);
    let error = foreign_lookups().unwrap_err().to_string();
    assert!(error.contains("CAP_SYS_ADMIN"), "{error}");
    drop(link);
    eventually("the other one is detached", || foreign_lookups().is_ok_and(|foreign| foreign.is_empty()));
    drop(world);
}

fn range_routes_missing() {
    let both = [config().redirect_range.to_string(), config().redirect_range_v6.to_string()];
    let missing = || -> Vec<String> {
        missing_range_routes(&config()).unwrap().iter().map(ToString::to_string).collect()
    };
    assert_eq!(missing(), both);
    let world = World::start(&desired(&[EDGE]));
    assert_eq!(missing(), Vec::<String>::new());
    drop(world);
    assert_eq!(missing(), both);
}

fn not_a_cgroup() {
    let dir = tempfile::tempdir().unwrap();
    let error = start(RedirectConfig { cgroup: Some(dir.path().into()), ..config() }).unwrap_err();
    assert!(matches!(error, RedirectError::NotCgroup { .. }), "{error}");
    message_has(&error, &["--redirect-cgroup=", "not on a cgroup v2 file system"]);
    let error = start(RedirectConfig { cgroup: Some("/nowhere".into()), ..config() }).unwrap_err();
    message_has(&error, &["--redirect-cgroup=/nowhere", "No such file"]);
}

/// Only a cgroup namespace's view of the hierarchy stays mounted, as in a container.
fn namespace_root() {
    let seen = tempfile::tempdir().unwrap();
    unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
    mount(Some("none"), seen.path(), Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    umount2(&cgroup_mount(), MntFlags::MNT_DETACH).unwrap();
    let error = start(RedirectConfig { cgroup: None, ..config() }).unwrap_err();
    assert!(matches!(error, RedirectError::NotRoot { .. }), "{error}");
    message_has(&error, &["root of a cgroup namespace", "--redirect-cgroup"]);
    // Given explicitly, the same directory is accepted.
    let redirect = start(RedirectConfig { cgroup: Some(seen.path().into()), ..config() }).unwrap();
    drop(redirect);
    umount2(seen.path(), MntFlags::MNT_DETACH).unwrap();
}

/// As in a container that has the host's hierarchy at another place than its own cgroup: the path to its own through one of
/// them does not lead to it through the other.
fn hierarchy_beside_own() {
    let seen = tempfile::tempdir().unwrap();
    unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
    mount(Some("none"), seen.path(), Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
    let redirect = start(config()).unwrap();
    drop(redirect);
    umount2(seen.path(), MntFlags::MNT_DETACH).unwrap();
}

fn nothing_mounted() {
    umount2(&cgroup_mount(), MntFlags::MNT_DETACH).unwrap();
    let error = start(RedirectConfig { cgroup: None, ..config() }).unwrap_err();
    assert!(matches!(error, RedirectError::NoCgroup), "{error}");
    message_has(&error, &["systemd.unified_cgroup_hierarchy=1"]);
}

fn outside() {
    let inner = own_cgroup().join("elsewhere");
    fs::create_dir(&inner).unwrap();
    let error = start(RedirectConfig { cgroup: Some(inner.clone()), ..config() }).unwrap_err();
    match &error {
        RedirectError::Outside { path, own } => assert_eq!((path, own), (&inner, &own_cgroup())),
        other => panic!("{other}"),
    }
    message_has(&error, &["cgroup.procs"]);

    // If that is not visible beforehand, the self-test fails.
    let mount_point = cgroup_mount();
    let hidden = tempfile::tempdir().unwrap();
    mount(Some(&inner), hidden.path(), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    umount2(&mount_point, MntFlags::MNT_DETACH).unwrap();
    let error = start(RedirectConfig { cgroup: Some(hidden.path().into()), ..config() }).unwrap_err();
    assert!(matches!(error, RedirectError::SelfTest(_)), "{error}");
    message_has(&error, &["was not redirected by connect4", "must run inside"]);
    umount2(hidden.path(), MntFlags::MNT_DETACH).unwrap();
}

fn unprivileged() {
    let listener = Listener::open();
    let unprivileged = nix::unistd::Uid::from_raw(65534);
    nix::unistd::setresuid(unprivileged, unprivileged, unprivileged).unwrap();
    let error = Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap_err();
    match &error {
        RedirectError::Capabilities { missing } => assert_eq!(missing, &["CAP_BPF", "CAP_NET_ADMIN"]),
        other => panic!("{other}"),
    }
    message_has(&error, &["run as root", "AmbientCapabilities="]);
}

/// The capabilities of the shipped pod.
pub(crate) const DOCUMENTED: CapabilitySet =
    CapabilitySet::BPF.union(CapabilitySet::PERFMON).union(CapabilitySet::NET_ADMIN);

fn documented_capabilities() {
    redirects_with(DOCUMENTED);
}

/// The older server's programs come first. With so few self-test addresses every eighth start takes the older one's.
fn documented_capabilities_beside_another() {
    have_only(DOCUMENTED);
    let small = RedirectConfig { redirect_range: "198.18.0.0/24".parse().unwrap(), ..config() };
    let older = World::with(small.clone(), &desired(&[]));
    for _ in 0..40 {
        drop(World::with(small.clone(), &desired(&[])));
    }
    drop(older);
}

/// Older kernels need it (6.1): their verifier is stricter with programs of processes without it.
fn without_perfmon() {
    redirects_with(CapabilitySet::BPF | CapabilitySet::NET_ADMIN);
}

fn this_kernel_needs_no_perfmon_and_it_is_given_up() {
    have_only(DOCUMENTED);
    assert_eq!(give_up_capabilities(Some(&config())).unwrap(), ["CAP_PERFMON"]);
    let left = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
    let has = capabilities(None).unwrap();
    assert_eq!((has.effective, has.permitted), (left, left));
    set_capabilities(None, CapabilitySets { permitted: DOCUMENTED, ..has }).unwrap_err();
    redirects_with(left);
}

/// Whatever this kernel needs, the programs load with what is left.
fn what_only_the_start_needs_is_given_up() {
    // A container's root may not have it.
    let extra = capabilities(None).unwrap().permitted & CapabilitySet::SYS_RESOURCE;
    have_only(DOCUMENTED | extra);
    give_up_capabilities(Some(&config())).unwrap();
    let has = capabilities(None).unwrap();
    assert_eq!(has.effective, has.permitted);
    assert!(!has.permitted.contains(CapabilitySet::SYS_RESOURCE));
    redirects_with(has.permitted);
    // Without the redirect nothing needs it.
    have_only(CapabilitySet::NET_ADMIN | (has.permitted & CapabilitySet::PERFMON));
    give_up_capabilities(None).unwrap();
    assert_eq!(capabilities(None).unwrap().permitted, CapabilitySet::NET_ADMIN);
}

pub(crate) fn have_only(only: CapabilitySet) {
    let sets = CapabilitySets { effective: only, permitted: only, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).unwrap();
}

fn redirects_with(only: CapabilitySet) {
    have_only(only);
    let world = World::start(&desired(&[EDGE, EDGE_V6]));
    ask(at(EDGE.0, PORT)).unwrap();
    ask(at(EDGE_V6.0, PORT)).unwrap();
    drop(world);
}

fn without_ipv6() {
    let listener = Listener::open();
    let serving = listener.serve();
    sysctl("net.ipv6.conf.all.disable_ipv6", "1");
    let redirect = Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap();
    assert!(!redirect.ipv6);
    redirect.apply(|| desired(&[EDGE, EDGE_V6]).into()).unwrap();
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    assert_eq!(range_routes().len(), 1);
    drop((redirect, serving));
    assert_eq!(range_routes().len(), 0);
}

/// The kernel takes the IPv6 range's route away, and refuses it from then on.
fn ipv6_goes() {
    let by_route = RedirectConfig { pods: Pods::Route, ..config() };
    let world = World::with(by_route, &desired(&[EDGE, EDGE_V6]));
    sysctl("net.ipv6.conf.all.disable_ipv6", "1");
    eventually("the route is gone", || range_routes().len() == 1);
    ip("-4 rule del pref 90");
    raw::detach_link_of(raw::programs(&cgroup(), CONNECT4)[0]);
    runtime().block_on(world.redirect.verify_and_restore());
    let problem = world.redirect.health().problem.unwrap();
    assert!(problem.contains("disable_ipv6"), "{problem}");
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    assert!(rules().iter().any(|rule| rule.contains("dport 10250")), "{:?}", rules());
}

fn without_v6_listener() {
    let listener = Listener::open();
    let serving = listener.serve();
    let redirect = Redirect::start(config(), &listener.v4, None).unwrap();
    redirect.apply(|| desired(&[EDGE, EDGE_V6]).into()).unwrap();
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    // An IPv6 socket to an IPv4 edge is still redirected.
    ask(at("::ffff:10.8.0.7", PORT)).unwrap();
    crate::support::fails(at(EDGE_V6.0, PORT), nix::libc::ENETUNREACH);
    drop((redirect, serving));
    // The next start succeeds.
    drop(World::start(&desired(&[EDGE])));
}

//! Processes that detach, replace or exclude the programs of others, and processes that pose as a server.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, connect, listen, socket};
use nix::sys::wait::waitpid;
use nix::unistd::{Uid, setresuid};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tunnel_redirect::{PinConfig, Redirect, RedirectConfig, RedirectError, cleanup};

use crate::Case;
use crate::lifecycle::{cgroup, programs, runtime};
use crate::raw::{self, CONNECT4};
use crate::support::{EDGE, Listener, PORT, World, ask, at, config, desired, eventually, fails};

pub(crate) const CASES: &[Case] = &[
    ("others::what_others_detach_is_attached_again", detached),
    ("others::without_pins_links_hold_the_programs", not_detachable),
    ("others::what_others_replace_is_attached_again", replaced),
    ("others::one_that_excludes_all_others_is_named_and_stays", excluded),
    ("others::balancers_that_are_attached_by_links", linked),
    ("others::programs_of_a_dead_server_are_detached_wherever_they_are", left_elsewhere),
    ("others::a_server_starts_beside_what_a_dead_one_has_left", left_here),
    ("others::a_mount_of_the_own_folder_is_enough_for_pins", a_mount_of_the_own_folder_is_enough_for_pins),
    ("others::unprivileged_processes_cannot_claim_the_ranges", squatted),
    ("others::a_server_whose_backlog_is_full_is_found", crowded),
    ("others::a_redirect_does_not_come_back_without_its_ranges", claimed_meanwhile),
];

/// A redirect with pins, which is watched.
struct Watched {
    world: World,
    cancel: CancellationToken,
    _runtime: Runtime,
    _folders: (TempDir, TempDir),
}

pub(crate) fn pinned() -> (RedirectConfig, (TempDir, TempDir)) {
    let (bpffs, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    mount(Some("bpf"), bpffs.path(), Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
    let pins = PinConfig { dir: bpffs.path().into(), state_dir: state.path().into() };
    let state_dir = Some(state.path().into());
    (RedirectConfig { pins: Some(pins), state_dir, ..config() }, (bpffs, state))
}

/// As in a pod, which has nothing else of the host's BPF file system.
fn a_mount_of_the_own_folder_is_enough_for_pins() {
    let (mut config, (host, _state)) = pinned();
    let (pod, shared) = (tempfile::tempdir().unwrap(), host.path().join("postern"));
    let inside = pod.path().join("postern");
    for folder in [&shared, &inside] {
        fs::create_dir(folder).unwrap();
    }
    mount(Some(&shared), &inside, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    config.pins.as_mut().unwrap().dir = pod.path().into();
    let world = World::with(config, &desired(&[EDGE]));
    assert_eq!(world.redirect.not_pinned, None);
    let own = world.redirect.pinned_in().unwrap();
    let pins = fs::read_dir(shared.join(own.file_name().unwrap())).unwrap().count();
    assert_eq!(pins, 7, "four programs, two maps and a link");
    ask(at(EDGE.0, PORT)).unwrap();
    drop(world);
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
}

impl Watched {
    fn start() -> Self {
        let (config, folders) = pinned();
        let world = World::with(config, &desired(&[EDGE]));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let cancel = CancellationToken::new();
        runtime.spawn(Arc::clone(&world.redirect).watch(cancel.clone()));
        Self { world, cancel, _runtime: runtime, _folders: folders }
    }

    /// Waits until it has restored so often, and redirects.
    fn restored(&self, times: u64) {
        eventually("the programs are attached again", || self.world.redirect.health().restored >= times);
        assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    }

    /// Stops it, which leaves these numbers of other programs.
    fn stop(self, others: (usize, usize)) {
        self.cancel.cancel();
        self.world.redirect.stop();
        // A check of the watch that is not over holds a link until it is.
        eventually("only the others' are left", || programs() == others);
    }
}

/// Detaches as Cilium without socket load balancing does, before and while the redirect runs: Cilium fails on an error.
fn detached() {
    raw::detach_all(&cgroup()).unwrap();
    let watched = Watched::start();
    for times in 1..=2 {
        raw::detach_all(&cgroup()).unwrap();
        watched.restored(times);
    }
    assert_eq!(programs(), (1, 1));
    watched.stop((0, 0));
}

fn not_detachable() {
    let world = World::start(&desired(&[EDGE]));
    assert_eq!(raw::detach_all(&cgroup()).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    drop(world);
}

fn replaced() {
    let watched = Watched::start();
    let own = raw::programs(&cgroup(), CONNECT4)[0];
    let other = raw::replace(&cgroup(), own);
    watched.restored(1);
    watched.stop((1, 0));
    drop(other);
}

/// No program can be beside it: the server names it, and does not detach it when it stops either.
fn excluded() {
    let watched = Watched::start();
    raw::detach_all(&cgroup()).unwrap();
    let exclusive = loop {
        // Again until it is attached before our programs are back.
        match raw::attach_exclusively(&cgroup()) {
            Ok(program) => break program,
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}"),
        }
        raw::detach_all(&cgroup()).unwrap();
    };
    let problem = || watched.world.redirect.health().problem.unwrap_or_default();
    eventually("the program is named", || problem().contains("old_cilium"));
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    watched.stop((1, 0));
    drop(exclusive);
}

fn linked() {
    let edge = |text: &str| text.parse().unwrap();
    let before = raw::link_balancer(&cgroup(), edge("10.96.0.1"), edge(EDGE.0));
    let watched = Watched::start();
    let after = raw::link_balancer(&cgroup(), edge("10.96.0.2"), edge(EDGE.0));
    assert_eq!(programs(), (3, 1));
    for address in [EDGE.0, "10.96.0.1"] {
        assert_eq!(ask(at(address, PORT)).unwrap().local, at(EDGE.1, PORT));
    }
    fails(at("10.96.0.2", PORT), libc::ENETUNREACH);
    watched.stop((2, 0));
    drop((before, after));
}

/// `cleanup` detaches them, which does not know the cgroup; the programs of others there stay.
fn left_elsewhere() {
    let (given, _folders) = pinned();
    let child = crate::harness::own_cgroup().join("child");
    std::fs::create_dir(&child).unwrap();
    std::fs::write(child.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let elsewhere = RedirectConfig { cgroup: Some(child.clone()), ..given.clone() };
    let server = raw::fork(|| World::with(elsewhere, &desired(&[EDGE])));
    let child = std::fs::File::open(child).unwrap();
    // Its ports are written last.
    eventually("the server redirects", || ask(at(EDGE.0, PORT)).is_ok());
    let edge = |text: &str| text.parse().unwrap();
    let other = raw::attach_balancer(&child, edge("10.96.0.1"), edge(EDGE.0));
    assert!(matches!(cleanup(&given), Err(RedirectError::RangeTaken { .. })));
    assert_eq!(raw::attached(&child, CONNECT4), 2, "it lives");
    kill(server, Signal::SIGKILL).unwrap();
    waitpid(server, None).unwrap();
    assert_eq!(raw::attached(&child, CONNECT4), 2, "what was attached stays");
    assert_eq!(cleanup(&given).unwrap().pins.len(), 1);
    assert_eq!(raw::programs(&child, CONNECT4).len(), 1, "the other one's");
    // The kernel releases links in the background.
    eventually("the server's are gone", || programs() == (0, 0));
    drop(other);
}

/// The dead server's programs come first. With so few self-test addresses every eighth start takes its pair.
fn left_here() {
    let (given, _folders) = pinned();
    let small = RedirectConfig { redirect_range: "198.18.0.0/24".parse().unwrap(), ..given };
    let config = small.clone();
    let server = raw::fork(move || World::with(config, &desired(&[EDGE])));
    eventually("the server redirects", || ask(at(EDGE.0, PORT)).is_ok());
    kill(server, Signal::SIGKILL).unwrap();
    waitpid(server, None).unwrap();
    for _ in 0..40 {
        drop(World::with(small.clone(), &desired(&[])));
    }
    assert_eq!(raw::attached(&cgroup(), CONNECT4), 1, "what was attached stays");
    assert_eq!(cleanup(&small).unwrap().pins.len(), 1);
}

/// A name of another server with these ranges.
fn name() -> String {
    format!("postern,198.18.0.0/15,fd9e:706f:7374:6572::/64,1-2,{}", std::process::id())
}

fn squat() -> UnixListener {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name()).unwrap()).unwrap()
}

/// Any process may take a socket's name, so the server asks the kernel for the process that listens there.
fn squatted() {
    raw::fork(|| {
        let nobody = Uid::from_raw(65534);
        setresuid(nobody, nobody, nobody).unwrap();
        squat()
    });
    eventually("the other process listens", || {
        std::fs::read_to_string("/proc/thread-self/net/unix").unwrap().contains("@postern,")
    });
    drop(World::start(&desired(&[EDGE])));

    let _privileged = squat();
    let listener = Listener::open();
    let error = Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap_err();
    assert!(matches!(error, RedirectError::RangeTaken { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("pid {}", std::process::id())), "{text}");
}

/// Anybody may fill a server's backlog, which the server empties each second.
fn crowded() {
    let server = squat();
    listen(&server, Backlog::new(1).unwrap()).unwrap();
    let mut waiting = Vec::new();
    loop {
        let client = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap();
        match connect(client.as_raw_fd(), &UnixAddr::new_abstract(name().as_bytes()).unwrap()) {
            Ok(()) => waiting.push(client),
            Err(error) => break assert_eq!(error, Errno::EAGAIN),
        }
    }
    server.set_nonblocking(true).unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let emptying = std::thread::spawn(move || {
        while stopped.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
            while server.accept().is_ok() {}
        }
    });
    let listener = Listener::open();
    let error = Redirect::start(config(), &listener.v4, Some(&listener.v6)).unwrap_err();
    assert!(matches!(error, RedirectError::RangeTaken { .. }), "{error}");
    drop((stop, waiting));
    emptying.join().unwrap();
}

/// Another server takes the ranges while this one has released them.
fn claimed_meanwhile() {
    let world = World::start(&desired(&[EDGE]));
    let (redirect, runtime) = (&world.redirect, runtime());
    redirect.release();
    let other = squat();
    let error = redirect.resume().unwrap_err();
    assert!(matches!(error, RedirectError::RangeTaken { .. }), "{error}");
    runtime.block_on(redirect.verify_and_restore());
    assert!(redirect.health().problem.is_some_and(|problem| problem.contains("--redirect-range")));
    fails(at(EDGE.0, PORT), libc::ENETUNREACH);
    drop(other);
    runtime.block_on(redirect.verify_and_restore());
    assert_eq!(redirect.health().problem, None);
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
}

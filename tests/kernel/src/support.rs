//! Shared by the cases: the listeners behind the redirect, clients, and small tools.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use socket2::{Domain, SockRef, Socket, Type};
use tunnel_redirect::{Pods, Redirect, RedirectConfig};
use tunnel_routing::{Desired, Route, RouteTarget, Table};

/// An edge node: its address, its virtual address.
pub(crate) type Edge = (&'static str, &'static str);
pub(crate) const EDGE: Edge = ("10.8.0.7", "198.18.0.7");
pub(crate) const EDGE_B: Edge = ("10.8.0.8", "198.18.0.8");
pub(crate) const EDGE_V6: Edge = ("2001:db8:7::7", "fd9e:706f:7374:6572::7");
pub(crate) const PORT: u16 = 10250;

/// A configuration that attaches to the case's own cgroup, and redirects pods at connect(), as cases did before there was
/// another way; [`crate::by_route`] has the other one.
pub(crate) fn config() -> RedirectConfig {
    let cgroup = Some(crate::harness::own_cgroup());
    RedirectConfig { cgroup, pods: Pods::Connect, ..RedirectConfig::default() }
}

/// State that the kernel should have, each route up or down by itself.
#[derive(Clone, Default)]
pub(crate) struct State {
    pub(crate) ports: BTreeSet<u16>,
    pub(crate) excluded: BTreeSet<IpNet>,
    pub(crate) clients: BTreeSet<IpNet>,
    pub(crate) routes: BTreeMap<IpNet, RouteTarget>,
}

impl From<State> for Desired {
    fn from(state: State) -> Self {
        let State { ports, excluded, clients, routes } = state;
        let up = routes.values().map(|target| target.up).collect();
        // A node for each route.
        let node = |(n, net): (usize, &IpNet)| (format!("edge-{n:07}").parse().expect("a name"), vec![*net]);
        let nodes = routes.keys().enumerate().map(node).collect();
        let routes = routes.into_iter().enumerate().map(
            |(n, (net, RouteTarget { virtual_address, any_port, .. }))| {
                (net, Route { virtual_address, any_port, node: Some(n) })
            },
        );
        let table = Table { excluded, clients, routes: routes.collect(), nodes, edge: Vec::new() };
        Self { ports, table: Arc::new(table), up }
    }
}

/// The edges' routes, up, on ports 10250 and 10255.
pub(crate) fn desired(edges: &[Edge]) -> State {
    let target = |virtual_address| RouteTarget {
        virtual_address: address(virtual_address),
        up: true,
        any_port: false,
    };
    let routes = edges.iter().map(|(net, virtual_address)| (net_of(net), target(virtual_address))).collect();
    State { ports: [PORT, 10255].into(), routes, ..State::default() }
}

/// Addresses of the pods of [`crate::by_route`].
pub(crate) const POD_RANGE: &str = "10.244.1.0/24";

pub(crate) fn with_client(mut desired: State, net: &str) -> State {
    desired.clients.insert(net_of(net));
    desired
}

pub(crate) fn route(desired: &mut State, net: &str, virtual_address: &str, up: bool) {
    desired
        .routes
        .insert(net_of(net), RouteTarget { virtual_address: address(virtual_address), up, any_port: false });
}

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A network, or an address as a network.
pub(crate) fn net_of(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|_| IpNet::from(address(text)))
}

pub(crate) fn at(text: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address(text), port)
}

/// The listeners behind the redirect.
pub(crate) struct Listener {
    pub(crate) v4: TcpListener,
    pub(crate) v6: TcpListener,
}

impl Listener {
    pub(crate) fn open() -> Self {
        Self { v4: listen("127.0.0.1:0"), v6: listen("[::1]:0") }
    }

    /// Accepts and greets every client with "<local address> <its address>".
    pub(crate) fn serve(&self) -> Serving {
        let stop = Arc::new(AtomicBool::new(false));
        let accepted = Arc::new(AtomicUsize::new(0));
        let threads = [&self.v4, &self.v6].map(|listener| {
            let listener = listener.try_clone().expect("dup");
            // It applies to accept() too, so that the thread notices the flag.
            SockRef::from(&listener).set_read_timeout(Some(Duration::from_millis(20))).expect("timeout");
            let (stop, accepted) = (Arc::clone(&stop), Arc::clone(&accepted));
            thread::spawn(move || {
                // Closing with unread bytes would reset the client.
                let mut recent = VecDeque::new();
                while !stop.load(Ordering::Relaxed) {
                    let Ok((mut stream, peer)) = listener.accept() else { continue };
                    accepted.fetch_add(1, Ordering::SeqCst);
                    greet(&mut stream, peer);
                    recent.push_back(stream);
                    if recent.len() > 64 {
                        recent.pop_front();
                    }
                }
            })
        });
        Serving { stop, threads: threads.into(), accepted }
    }
}

/// Sends a client the address at which it arrived, and its own.
pub(crate) fn greet(stream: &mut TcpStream, peer: SocketAddr) {
    let greeting = format!("{} {peer}\n", stream.local_addr().expect("local"));
    // A self-test may have closed its connection already.
    drop(stream.write_all(greeting.as_bytes()));
}

/// A [`Listener`] that serves; dropping it ends the threads.
pub(crate) struct Serving {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    accepted: Arc<AtomicUsize>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

pub(crate) fn listen(at: &str) -> TcpListener {
    let at: SocketAddr = at.parse().expect("an address");
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None).expect("socket");
    if at.is_ipv6() {
        socket.set_only_v6(true).expect("v6only");
    }
    socket.set_reuse_address(true).expect("reuse");
    socket.bind(&at.into()).expect("bind");
    socket.listen(4096).expect("listen");
    socket.into()
}

/// A started redirect with its listener serving.
pub(crate) struct World {
    // Dropped in this order: the redirect first.
    pub(crate) redirect: Arc<Redirect>,
    _listener: Listener,
    serving: Serving,
}

impl World {
    pub(crate) fn start(desired: &State) -> Self {
        Self::with(config(), desired)
    }

    pub(crate) fn with(config: RedirectConfig, desired: &State) -> Self {
        let listener = Listener::open();
        let serving = listener.serve();
        let redirect = Redirect::start(config, &listener.v4, Some(&listener.v6)).expect("start");
        redirect.apply(|| desired.clone().into()).expect("apply");
        redirect.remove_dead_routes().expect("remove the routes of dead servers");
        Self { redirect: Arc::new(redirect), _listener: listener, serving }
    }

    /// Number of connections that the listener has accepted and greeted.
    pub(crate) fn accepted(&self) -> usize {
        self.serving.accepted.load(Ordering::SeqCst)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        counter(&self.redirect, name)
    }
}

pub(crate) fn counter(redirect: &Redirect, name: &str) -> u64 {
    let counters = redirect.counters().expect("counters");
    counters.iter().find(|(known, _)| *known == name).expect("a known counter").1
}

/// Greeting of the listener: the address that it accepted on, and the client's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) local: SocketAddr,
    pub(crate) client: SocketAddr,
}

pub(crate) fn greeting(stream: &TcpStream) -> io::Result<Greeting> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    parse(line.trim()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("greeting {line:?}")))
}

pub(crate) fn parse(line: &str) -> Option<Greeting> {
    let (local, client) = line.split_once(' ')?;
    Some(Greeting { local: local.parse().ok()?, client: client.parse().ok()? })
}

/// Connects and reads the greeting.
pub(crate) fn ask(to: SocketAddr) -> io::Result<Greeting> {
    greeting(&TcpStream::connect_timeout(&to, Duration::from_secs(5))?)
}

/// Checks that connecting fails with this errno.
#[track_caller]
pub(crate) fn fails(to: SocketAddr, errno: i32) {
    let begun = Instant::now();
    let error = match ask(to) {
        Err(error) => error,
        Ok(greeting) => panic!("connect to {to} succeeded: {greeting:?}"),
    };
    assert_eq!(error.raw_os_error(), Some(errno), "connect to {to}: {error}");
    assert!(begun.elapsed() < Duration::from_secs(4), "connect to {to} did not fail immediately");
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    // On a busy machine everything may take ten times as long.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 60 s: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a program that must succeed.
#[track_caller]
pub(crate) fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).output().expect(program);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
pub(crate) fn ip(arguments: &str) -> String {
    run("ip", arguments)
}

/// Codes of the findings of `tunnel-server doctor` on the case's host, on which no server runs.
pub(crate) fn doctor() -> Vec<String> {
    // Beside this program, also in the virtual machine of another kernel.
    let program = std::env::current_exe().expect("this program").with_file_name("tunnel-server");
    let state = tempfile::tempdir().expect("a folder");
    let output = Command::new(program)
        .args(["doctor", "-o", "json", "--inventory=/nowhere", "--bpffs=off"])
        .arg(format!("--state-dir={}", state.path().display()))
        .arg(format!("--redirect-cgroup={}", crate::harness::own_cgroup().display()))
        .output()
        .expect("tunnel-server doctor");
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}{errors}");
    let report: serde_json::Value = serde_json::from_str(&out).expect("a report");
    let checks = report["checks"].as_array().expect("checks").iter();
    let findings = checks.flat_map(|check| check["findings"].as_array().into_iter().flatten());
    findings.map(|finding| finding["code"].as_str().expect("a code").to_owned()).collect()
}

/// Routes of the virtual addresses in this namespace.
pub(crate) fn range_routes() -> Vec<String> {
    let v4 = ip("-4 route show table local");
    let v6 = ip("-6 route show table local");
    let lines = v4.lines().chain(v6.lines());
    lines.filter(|line| line.contains("198.18.") || line.contains("fd9e:706f")).map(str::to_owned).collect()
}

pub(crate) fn sysctl(name: &str, value: &str) {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

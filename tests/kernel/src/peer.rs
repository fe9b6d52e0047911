//! Helper processes of a case: another machine or pod in its own network namespace, and a server to be killed.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};
use tunnel_redirect::{OrphanPolicy, Pods, Redirect, RedirectConfig};

use crate::harness::{ROLE, isolate};
use crate::support::{
    EDGE, Listener, POD_RANGE, PORT, address, config, desired, greet, greeting, ip, run, with_client,
};

/// The connection of [`Peer::hold`].
static HELD: Mutex<Option<TcpStream>> = Mutex::new(None);

/// A process in its own network namespace, in the case's cgroup, that executes commands.
pub(crate) struct Peer {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    /// Spawns a peer in a namespace that has only loopback.
    pub(crate) fn spawn() -> Self {
        let mut peer = spawn_role("peer");
        assert_eq!(peer.line(), "ready");
        peer
    }

    /// Spawns a server process with one edge node, [`EDGE`], in the case's own namespace.
    pub(crate) fn spawn_server() -> Self {
        Self::spawn_server_as("connect")
    }

    /// One that redirects at connect (`connect`) or by route (`route`), also with --orphan-policy=refuse (`refuse`).
    pub(crate) fn spawn_server_as(how: &str) -> Self {
        let mut peer = spawn_role(&format!("server {how}"));
        assert_eq!(peer.line(), "ready");
        peer
    }

    /// Accepts from a listener, greets, and holds up to `limit` connections.
    pub(crate) fn spawn_acceptor(listener: &TcpListener, limit: usize) -> Self {
        let listener = listener.try_clone().expect("dup");
        let mut peer = spawn_with(&format!("acceptor {limit}"), Stdio::from(OwnedFd::from(listener)));
        assert_eq!(peer.line(), "ready");
        peer
    }

    /// Opens `count` connections to [`EDGE`] and holds them; returns the time of each connect().
    pub(crate) fn spawn_holder(count: usize) -> (Self, Vec<Duration>) {
        let mut peer = spawn_role(&format!("holder {count}"));
        let times = peer.line();
        let times =
            times.split(' ').map(|nanos| Duration::from_nanos(nanos.parse().expect(&times))).collect();
        (peer, times)
    }

    /// Has a server hand the redirect over, as to a successor.
    pub(crate) fn release(&mut self) {
        assert_eq!(self.command("release"), "released");
    }

    /// Ends it with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a helper's answer");
        assert!(!line.is_empty(), "the helper died; see its stderr");
        line.trim().to_owned()
    }

    fn command(&mut self, command: &str) -> String {
        let stdin = self.stdin.as_mut().expect("a helper that executes commands");
        writeln!(stdin, "{command}").expect("a helper's stdin");
        self.line()
    }

    /// Connects, from `from` if given, and reads the greeting: local address, peer, greeting.
    pub(crate) fn connect(
        &mut self,
        from: Option<&str>,
        to: &str,
    ) -> Result<(SocketAddr, SocketAddr, String), String> {
        let answer = self.command(&format!("connect {} {to}", from.unwrap_or("-")));
        let mut words = answer.splitn(4, ' ');
        match words.next() {
            Some("ok") => {
                let mut address = || words.next().expect("an address").parse().expect("an address");
                let (local, remote) = (address(), address());
                Ok((local, remote, words.next().unwrap_or_default().to_owned()))
            }
            _ => Err(answer),
        }
    }

    /// Connects and keeps the connection.
    pub(crate) fn hold(&mut self, to: &str) {
        assert_eq!(self.command(&format!("hold {to}")), "ok");
    }

    /// Sends the kept connection a line and checks that it comes back.
    pub(crate) fn echo_held(&mut self) {
        assert_eq!(self.command("echo"), "ok");
    }

    /// Listens and greets with "peer <address>".
    pub(crate) fn listen(&mut self, at: &str) {
        assert_eq!(self.command(&format!("listen {at}")), "ok");
    }

    /// Runs `ip` in the peer's namespace.
    pub(crate) fn ip(&self, arguments: &str) {
        run("nsenter", &format!("--target {} --net ip {arguments}", self.child.id()));
    }

    /// Runs `work` on a thread in the peer's namespace; sockets and devices that it makes belong there.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.child.id())).expect("its namespace");
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(namespace, CloneFlags::CLONE_NEWNET).expect("setns");
                work()
            });
            thread.join().expect("a thread in a peer's namespace")
        })
    }

    /// Gives the pair of [`Self::link`] IPv6 addresses too.
    pub(crate) fn link_v6(&self, name: &str, here: &str, there: &str) {
        ip(&format!("-6 addr add {here} dev {name} nodad"));
        self.ip(&format!("-6 addr add {there} dev eth0 nodad"));
        let gateway = here.split('/').next().expect("an address");
        self.ip(&format!("-6 route add default via {gateway}"));
    }

    /// Joins the namespaces by a veth pair: `name` here, eth0 there, with the default route through here.
    pub(crate) fn link(&self, name: &str, here: &str, there: &str) {
        self.join(&|arguments| drop(ip(arguments)), name, here, there);
    }

    /// The same with another peer, its router, in place of the case's own namespace; of both families.
    pub(crate) fn link_behind(&self, router: &Self, name: &str, addresses: [(&str, &str); 2]) {
        let [(here, there), (here_v6, there_v6)] = addresses;
        self.join(&|arguments| router.ip(arguments), name, here, there);
        router.ip(&format!("-6 addr add {here_v6} dev {name} nodad"));
        self.ip(&format!("-6 addr add {there_v6} dev eth0 nodad"));
        let gateway = here_v6.split('/').next().expect("an address");
        self.ip(&format!("-6 route add default via {gateway}"));
    }

    fn join(&self, ip_here: &dyn Fn(&str), name: &str, here: &str, there: &str) {
        ip_here(&format!("link add {name} type veth peer name eth0 netns {}", self.child.id()));
        ip_here(&format!("addr add {here} dev {name}"));
        ip_here(&format!("link set {name} up"));
        self.ip(&format!("addr add {there} dev eth0"));
        self.ip("link set eth0 up");
        let gateway = here.split('/').next().expect("an address");
        self.ip(&format!("route add default via {gateway}"));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn spawn_role(role: &str) -> Peer {
    spawn_with(role, Stdio::piped())
}

fn spawn_with(role: &str, stdin: Stdio) -> Peer {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .env(ROLE, role)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a helper process");
    let stdin = child.stdin.take();
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    Peer { child, stdin, stdout }
}

/// Entry point of a helper process.
pub(crate) fn run_role(role: &str) -> ExitCode {
    set_pdeathsig(Signal::SIGKILL).expect("prctl");
    let words: Vec<&str> = role.split(' ').collect();
    match words.as_slice() {
        ["peer"] => {
            isolate();
            println!("ready");
            for line in std::io::stdin().lines() {
                println!("{}", execute(&line.expect("a command")));
            }
        }
        ["server", how] => {
            let listener = Listener::open();
            let by_route = *how != "connect";
            let pods = if by_route { Pods::Route } else { Pods::Connect };
            let orphan_policy = if *how == "refuse" { OrphanPolicy::Refuse } else { OrphanPolicy::Direct };
            let config = RedirectConfig { pods, orphan_policy, ..config() };
            let redirect = Redirect::start(config, &listener.v4, Some(&listener.v6)).expect("start");
            redirect.apply(|| with_client(desired(&[EDGE]), POD_RANGE).into()).expect("apply");
            let _serving = by_route.then(|| listener.serve());
            println!("ready");
            // Runs until it is killed. Each line releases the redirect.
            for _ in std::io::stdin().lines() {
                redirect.release();
                println!("released");
            }
        }
        ["acceptor", limit] => accept_and_hold(limit.parse().expect("a number")),
        ["holder", count] => connect_and_hold(count.parse().expect("a number")),
        _ => panic!("unknown role {role}"),
    }
    ExitCode::SUCCESS
}

/// Raises this process's limit of descriptors as far as it may; returns the limit.
pub(crate) fn raise_descriptor_limit() -> usize {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("getrlimit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("setrlimit");
    usize::try_from(hard).expect("a number of descriptors")
}

fn accept_and_hold(limit: usize) {
    raise_descriptor_limit();
    let listener = TcpListener::from(std::io::stdin().as_fd().try_clone_to_owned().expect("the listener"));
    println!("ready");
    let mut held = Vec::with_capacity(limit);
    while held.len() < limit {
        let (mut stream, peer) = listener.accept().expect("accept");
        greet(&mut stream, peer);
        held.push(stream);
    }
    loop {
        thread::park();
    }
}

fn connect_and_hold(count: usize) {
    raise_descriptor_limit();
    let to = SocketAddr::new(address(EDGE.0), PORT);
    let mut times = Vec::with_capacity(count);
    let held: Vec<TcpStream> = (0..count)
        .map(|n| {
            let begun = Instant::now();
            let stream = TcpStream::connect(to).unwrap_or_else(|error| panic!("connection {n}: {error}"));
            times.push(begun.elapsed().as_nanos().to_string());
            // Waiting for the greeting also keeps the accept queue from overflowing.
            if n % 500 == 0 {
                assert_eq!(
                    greeting(&stream).expect("a greeting").local,
                    SocketAddr::new(address(EDGE.1), PORT)
                );
                assert_eq!(stream.peer_addr().expect("a peer"), to);
            }
            stream
        })
        .collect();
    println!("{}", times.join(" "));
    for _ in std::io::stdin().lines() {}
    drop(held);
}

fn execute(command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    match words.as_slice() {
        ["connect", from, to] => connect(from, to.parse().expect("an address"))
            .unwrap_or_else(|error| format!("err {} {error}", error.raw_os_error().unwrap_or(-1))),
        ["hold", to] => match TcpStream::connect(to) {
            Ok(stream) => {
                *HELD.lock().expect("no panic") = Some(stream);
                "ok".into()
            }
            Err(error) => error.to_string(),
        },
        ["echo"] => echo(HELD.lock().expect("no panic").as_ref().expect("a held connection"))
            .unwrap_or_else(|error| error.to_string()),
        ["listen", at] => {
            let listener = TcpListener::bind(at).expect("bind");
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut stream = stream;
                    let greeting = format!("peer {}\n", stream.local_addr().expect("local"));
                    drop(stream.write_all(greeting.as_bytes()));
                }
            });
            "ok".into()
        }
        _ => panic!("unknown command {command}"),
    }
}

fn echo(stream: &TcpStream) -> std::io::Result<String> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    writeln!(&mut &*stream, "ping")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(if line == "ping\n" { "ok".into() } else { format!("read {line:?}") })
}

fn connect(from: &str, to: SocketAddr) -> std::io::Result<String> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    if from != "-" {
        let from: IpAddr = from.parse().expect("an address");
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    socket.connect_timeout(&to.into(), Duration::from_secs(2))?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    let stream = std::net::TcpStream::from(socket);
    let mut greeting = String::new();
    BufReader::new(&stream).read_line(&mut greeting)?;
    Ok(format!("ok {} {} {}", stream.local_addr()?, stream.peer_addr()?, greeting.trim()))
}

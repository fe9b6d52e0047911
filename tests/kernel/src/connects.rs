//! Every way to connect().

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use nix::libc;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tunnel_routing::RouteTarget;

use crate::Case;
use crate::raw;
use crate::support::{
    EDGE, EDGE_B, EDGE_V6, PORT, World, address, ask, at, desired, eventually, fails, greeting, ip, net_of,
    route, sysctl,
};

pub(crate) const CASES: &[Case] = &[
    ("connects::redirected_and_peer_name_is_the_original", redirected),
    ("connects::tcp_fast_open", tcp_fast_open),
    ("connects::failed_then_retried_on_one_socket", retried),
    ("connects::dissolved_by_af_unspec_then_elsewhere", af_unspec),
    ("connects::ipv4_mapped", mapped),
    ("connects::ipv6", ipv6),
    ("connects::mptcp", mptcp),
    ("connects::bound_to_a_device", bound_to_device),
    ("connects::non_blocking_repeat_counts_once", non_blocking),
    ("connects::udp_is_untouched", udp),
    ("connects::down_and_closed_fail_at_connect", down),
    ("connects::without_set_retval_down_is_accepted", down_on_old_kernels),
    ("connects::blocks_map_one_to_one", blocks),
    ("connects::routes_of_any_port", any_port),
    ("connects::source_address_chosen_by_the_client", bound_source),
];

fn tcp(domain: Domain) -> Socket {
    Socket::new(domain, Type::STREAM, None).unwrap()
}

/// Checks that the connection arrived at that edge's virtual address, and that the client's socket names the edge's own
/// address as its peer.
#[track_caller]
fn arrived(stream: &TcpStream, asked: SocketAddr, virtual_address: &str) {
    // The greeting first: with data in the SYN the socket has no peer until it is answered.
    assert_eq!(greeting(stream).unwrap().local, at(virtual_address, asked.port()));
    assert_eq!(stream.peer_addr().unwrap(), asked, "getpeername");
}

fn redirected() {
    let world = World::start(&desired(&[EDGE, EDGE_B]));
    for (edge, virtual_address) in [EDGE, EDGE_B] {
        for port in [PORT, 10255] {
            arrived(&TcpStream::connect(at(edge, port)).unwrap(), at(edge, port), virtual_address);
        }
    }
    // A host's own client has the virtual address as its source. accept() shows the edge's, as getpeername() does; the
    // server takes that back.
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().client.ip(), address(EDGE.0));
    assert_eq!(world.counter("connect4/redirected"), 6, "five connects and the self-test");
    // A SYN that is sent again, as on an emulated processor that is busy, may be looked up again.
    let steered = world.counter("lookup4/steered");
    assert!(steered >= 6, "{steered}");
    // Other ports and other addresses go direct; this namespace has no route to either.
    fails(at(EDGE.0, 22), libc::ENETUNREACH);
    fails(at("10.8.0.9", PORT), libc::ENETUNREACH);
    assert_eq!((world.counter("connect4/port"), world.counter("connect4/no_route")), (1, 1));
}

fn tcp_fast_open() {
    sysctl("net.ipv4.tcp_fastopen", "3");
    let world = World::start(&desired(&[EDGE]));
    let to = SockAddr::from(at(EDGE.0, PORT));
    for round in 1..=3 {
        let socket = tcp(Domain::IPV4);
        let sent = SockRef::from(&socket).send_to_with_flags(b"hello", &to, libc::MSG_FASTOPEN).unwrap();
        assert_eq!(sent, 5);
        arrived(&socket.into(), at(EDGE.0, PORT), EDGE.1);
        assert_eq!(world.counter("connect4/redirected"), 1 + round);
    }
    let socket = tcp(Domain::IPV4);
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::TcpFastOpenConnect, &true).unwrap();
    socket.connect(&to).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.write_all(b"hello").unwrap();
    arrived(&stream, at(EDGE.0, PORT), EDGE.1);
}

fn retried() {
    let up = desired(&[EDGE]);
    let mut down = up.clone();
    route(&mut down, EDGE.0, EDGE.1, false);
    let world = World::start(&down);
    let to = SockAddr::from(at(EDGE.0, PORT));

    let socket = tcp(Domain::IPV4);
    assert_eq!(socket.connect(&to).unwrap_err().raw_os_error(), Some(libc::EHOSTUNREACH));
    world.redirect.apply(|| up.clone().into()).unwrap();
    socket.connect(&to).unwrap();
    arrived(&socket.into(), at(EDGE.0, PORT), EDGE.1);

    // Refused on the wire (nothing listens at the direct address), then redirected, on one descriptor.
    ip("addr add 10.9.0.1/32 dev lo");
    let socket = tcp(Domain::IPV4);
    assert_eq!(
        socket.connect(&at("10.9.0.1", PORT).into()).unwrap_err().raw_os_error(),
        Some(libc::ECONNREFUSED)
    );
    let before = world.counter("connect4/redirected");
    socket.connect(&to).unwrap();
    arrived(&socket.into(), at(EDGE.0, PORT), EDGE.1);
    assert_eq!(world.counter("connect4/redirected"), before + 1);
}

fn af_unspec() {
    ip("addr add 10.9.0.1/32 dev lo");
    let direct = TcpListener::bind("10.9.0.1:10250").unwrap();
    let _world = World::start(&desired(&[EDGE, EDGE_B]));
    let socket = tcp(Domain::IPV4);
    socket.connect(&at(EDGE.0, PORT).into()).unwrap();
    assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(at(EDGE.0, PORT)));
    raw::disconnect(&socket);
    socket.connect(&at(EDGE_B.0, PORT).into()).unwrap();
    assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(at(EDGE_B.0, PORT)));
    raw::disconnect(&socket);
    socket.connect(&at("10.9.0.1", PORT).into()).unwrap();
    assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(at("10.9.0.1", PORT)));
    let (accepted, _) = direct.accept().unwrap();
    assert_eq!(accepted.local_addr().unwrap(), at("10.9.0.1", PORT));
    drop(accepted);
    raw::disconnect(&socket);
    socket.connect(&at(EDGE.0, PORT).into()).unwrap();
    arrived(&socket.into(), at(EDGE.0, PORT), EDGE.1);
}

fn mapped() {
    let mut desired = desired(&[EDGE]);
    desired.excluded.insert(net_of("10.8.0.9"));
    route(&mut desired, "10.8.0.9", "198.18.0.9", true);
    let world = World::start(&desired);
    let asked = at("::ffff:10.8.0.7", PORT);
    let socket = tcp(Domain::IPV6);
    socket.set_only_v6(false).unwrap();
    socket.connect(&asked.into()).unwrap();
    arrived(&socket.into(), asked, EDGE.1);
    assert_eq!(world.counter("connect6/redirected"), 2, "one connect and the self-test");
    assert_eq!(world.counter("getpeername6/restored"), 2);
    fails(at("::ffff:10.8.0.9", PORT), libc::ENETUNREACH);
    assert_eq!(world.counter("connect6/excluded"), 1);
}

fn ipv6() {
    let mut desired = desired(&[EDGE_V6]);
    route(&mut desired, "2001:db8:7::8", "fd9e:706f:7374:6572::8", false);
    let world = World::start(&desired);
    assert!(world.redirect.ipv6);
    let asked = at(EDGE_V6.0, PORT);
    arrived(&TcpStream::connect(asked).unwrap(), asked, EDGE_V6.1);
    // Also of a packet that comes after its connection was reset.
    assert!(world.counter("lookup6/steered") >= 2, "one connect and the self-test");
    fails(at("2001:db8:7::8", PORT), libc::EHOSTUNREACH);
    fails(at("2001:db8:7::9", PORT), libc::ENETUNREACH);
}

fn mptcp() {
    const IPPROTO_MPTCP: i32 = 262;
    sysctl("net.mptcp.enabled", "1");
    let world = World::start(&desired(&[EDGE]));
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::from(IPPROTO_MPTCP))).unwrap();
    socket.connect(&at(EDGE.0, PORT).into()).unwrap();
    let stream = TcpStream::from(socket);
    assert_eq!(greeting(&stream).unwrap().local, at(EDGE.1, PORT));
    assert_eq!(stream.peer_addr().unwrap(), at(EDGE.0, PORT));
    assert_eq!(world.counter("connect4/redirected"), 2, "one connect and the self-test");
}

fn bound_to_device() {
    let world = World::start(&desired(&[EDGE]));
    let socket = tcp(Domain::IPV4);
    socket.bind_device(Some(b"lo")).unwrap();
    // Not redirected: over that device it would never reach the listener.
    assert_eq!(
        socket.connect_timeout(&at(EDGE.0, PORT).into(), Duration::from_secs(1)).unwrap_err().kind(),
        std::io::ErrorKind::TimedOut,
    );
    assert_eq!(world.counter("connect4/bound_device"), 1);
}

fn non_blocking() {
    let world = World::start(&desired(&[EDGE]));
    let before = world.counter("connect4/redirected");
    let socket = tcp(Domain::IPV4);
    socket.set_nonblocking(true).unwrap();
    let to = SockAddr::from(at(EDGE.0, PORT));
    let first = socket.connect(&to);
    assert!(first.is_ok() || first.unwrap_err().raw_os_error() == Some(libc::EINPROGRESS));
    eventually("the connect completes", || match socket.connect(&to) {
        Ok(()) => true,
        Err(error) => error.raw_os_error() == Some(libc::EISCONN),
    });
    assert_eq!(world.counter("connect4/redirected"), before + 1);
    socket.set_nonblocking(false).unwrap();
    arrived(&socket.into(), at(EDGE.0, PORT), EDGE.1);
}

fn udp() {
    ip("addr add 10.9.0.1/32 dev lo");
    let receiver = UdpSocket::bind("10.9.0.1:10250").unwrap();
    // Even an address with a route is not redirected for UDP.
    let world = World::start(&desired(&[EDGE]));
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let error = socket.connect(at(EDGE.0, PORT)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH), "not redirected: no route to the edge itself");
    socket.connect(at("10.9.0.1", PORT)).unwrap();
    socket.send(b"datagram").unwrap();
    let mut bytes = [0; 16];
    receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(receiver.recv(&mut bytes).unwrap(), 8);
    assert_eq!(world.counter("connect4/not_tcp"), 2);
}

fn down() {
    let mut some_down = desired(&[EDGE, EDGE_B]);
    route(&mut some_down, EDGE.0, EDGE.1, false);
    let world = World::start(&some_down);
    // With bpf_set_retval (6.1).
    fails(at(EDGE.0, PORT), libc::EHOSTUNREACH);
    fails(at("::ffff:10.8.0.7", PORT), libc::EHOSTUNREACH);
    ask(at(EDGE_B.0, PORT)).unwrap();
    assert_eq!((world.counter("connect4/down"), world.counter("connect6/down")), (1, 1));

    world.redirect.set_serving(false).unwrap();
    fails(at(EDGE_B.0, PORT), libc::EHOSTUNREACH);
    world.redirect.set_serving(true).unwrap();
    ask(at(EDGE_B.0, PORT)).unwrap();
}

fn down_on_old_kernels() {
    let mut some_down = desired(&[EDGE]);
    route(&mut some_down, EDGE.0, EDGE.1, false);
    let config = tunnel_redirect::RedirectConfig { fail_at_connect: false, ..crate::support::config() };
    let world = World::with(config, &some_down);
    // Redirected nevertheless: the server must reset it.
    assert_eq!(ask(at(EDGE.0, PORT)).unwrap().local, at(EDGE.1, PORT));
    assert_eq!(world.counter("connect4/down"), 1);
}

fn blocks() {
    let mut desired = desired(&[]);
    route(&mut desired, "10.244.3.0/24", "198.18.3.0", true);
    route(&mut desired, "10.244.3.77", "198.18.9.1", true);
    route(&mut desired, "2001:db8:9::/120", "fd9e:706f:7374:6572::900", true);
    let _world = World::start(&desired);
    for (asked, virtual_address) in [
        ("10.244.3.0", "198.18.3.0"),
        ("10.244.3.200", "198.18.3.200"),
        ("10.244.3.77", "198.18.9.1"),
        ("2001:db8:9::3f", "fd9e:706f:7374:6572::93f"),
    ] {
        arrived(&TcpStream::connect(at(asked, PORT)).unwrap(), at(asked, PORT), virtual_address);
    }
}

fn any_port() {
    let mut desired = desired(&[EDGE]);
    let pods = net_of("10.244.3.0/24");
    desired
        .routes
        .insert(pods, RouteTarget { virtual_address: address("198.18.3.0"), up: true, any_port: true });
    desired.excluded.insert(net_of("10.244.3.9"));
    let world = World::start(&desired);
    for port in [1, 80, PORT, 65_535] {
        arrived(&TcpStream::connect(at("10.244.3.7", port)).unwrap(), at("10.244.3.7", port), "198.18.3.7");
    }
    arrived(&TcpStream::connect(at("10.244.3.8", 8080)).unwrap(), at("10.244.3.8", 8080), "198.18.3.8");
    let mapped = at("::ffff:10.244.3.8", 8080);
    assert_eq!(TcpStream::connect(mapped).unwrap().peer_addr().unwrap(), mapped);
    // The node itself is still reached on the tunnelled ports only, and exclusion wins.
    let ports = world.counter("connect4/port");
    assert!(ask(at(EDGE.0, 8080)).is_err());
    assert_eq!(world.counter("connect4/port"), ports + 1);
    let excluded = world.counter("connect4/excluded");
    assert!(ask(at("10.244.3.9", 8080)).is_err());
    assert_eq!(world.counter("connect4/excluded"), excluded + 1);
    ask(at(EDGE.0, PORT)).unwrap();

    desired.routes.get_mut(&pods).unwrap().up = false;
    world.redirect.apply(|| desired.clone().into()).unwrap();
    fails(at("10.244.3.7", 8080), libc::EHOSTUNREACH);
    desired.routes.remove(&pods);
    world.redirect.apply(|| desired.clone().into()).unwrap();
    let ports = world.counter("connect4/port");
    assert!(ask(at("10.244.3.9", 8080)).is_err());
    assert_eq!(world.counter("connect4/port"), ports + 1, "without such routes no address is looked up");
}

fn bound_source() {
    ip("addr add 10.9.0.1/32 dev lo");
    let _world = World::start(&desired(&[EDGE]));
    let socket = tcp(Domain::IPV4);
    socket.bind(&at("10.9.0.1", 0).into()).unwrap();
    socket.connect(&at(EDGE.0, PORT).into()).unwrap();
    let greeting = greeting(&socket.into()).unwrap();
    assert_eq!((greeting.local, greeting.client.ip()), (at(EDGE.1, PORT), address("10.9.0.1")));
}

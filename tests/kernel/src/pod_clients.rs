//! Pods whose connections are made by something other than their own connect(): a mesh's sidecar, a sandbox's kernel.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::Case;
use crate::by_route::{asks, enter, pod_of_this_host, start};
use crate::harness::{cgroup_mount, own_cgroup};
use crate::peer::Peer;
use crate::support::{
    EDGE, POD_RANGE, PORT, World, address, ask, at, config, desired, ip, parse, run, with_client,
};

pub(crate) const CASES: &[Case] = &[
    ("by_route::a_sidecar_sees_the_true_address", sidecar),
    ("by_route::a_sandboxed_pod", sandboxed),
    ("by_route::a_rule_for_addresses_of_this_host_takes_nothing", hostports),
];

/// The mark of the sidecar's own connections; Istio tells them by their user.
const SIDECAR: u32 = 1337;
const SIDECAR_PORT: u16 = 15001;

/// Rules as of Istio and Linkerd in the pod: every connection goes to the proxy, which dials where it was going.
fn sidecar() {
    let mut pod = pod_of_this_host();
    pod.inside(|| {
        let redirect = format!("-m mark ! --mark {SIDECAR} -j REDIRECT --to-ports {SIDECAR_PORT}");
        run("iptables", &format!("-w -t nat -A OUTPUT -p tcp {redirect}"));
    });
    let (listener, dialer) = pod.inside(|| {
        let dialer = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        dialer.set_mark(SIDECAR).unwrap();
        (TcpListener::bind(("127.0.0.1", SIDECAR_PORT)).unwrap(), dialer)
    });
    let proxy = thread::spawn(move || {
        let (mut app, _) = listener.accept().unwrap();
        let to = SockRef::from(&app).original_dst_v4().unwrap().as_socket().unwrap();
        dialer.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
        let mut line = String::new();
        BufReader::new(&TcpStream::from(dialer)).read_line(&mut line).unwrap();
        app.write_all(line.as_bytes()).unwrap();
        to
    });
    let world = start(desired(&[EDGE]));
    let (_, peer, greeting) = pod.connect(None, "10.8.0.7:10250").unwrap();
    assert_eq!(peer, at(EDGE.0, PORT), "the program's getpeername");
    assert_eq!(proxy.join().unwrap(), at(EDGE.0, PORT), "a mesh's rules are about this address");
    let seen = parse(&greeting).unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE.0, PORT), address("10.244.1.5")));
    assert_eq!(world.counter("route4/steered"), 1);
}

/// As in Kata, KubeVirt and gVisor: no hook of this host sees the connect(), and packets come from a TUN device in the pod.
fn sandboxed() {
    const GUEST: &str = "10.244.1.9";
    let pod = pod_of_this_host();
    enter(&cgroup_mount());
    let mut guest = Peer::spawn();
    enter(&own_cgroup());
    let devices = [&pod, &guest].map(|peer| peer.inside(|| tun("tun0")));
    guest.ip(&format!("addr add {GUEST}/32 dev tun0"));
    guest.ip("route add default dev tun0");
    pod.ip(&format!("route add {GUEST}/32 dev tun0"));
    pod.inside(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    ip(&format!("route add {GUEST}/32 via 10.244.1.5"));
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (Arc::clone(&devices[from]), Arc::clone(&devices[to]));
        // Until the process ends.
        thread::spawn(move || forward(&from, &to));
    }
    let world = start(desired(&[EDGE]));
    let seen = asks(&mut guest, "10.8.0.7:10250").unwrap();
    assert_eq!((seen.local, seen.client.ip()), (at(EDGE.0, PORT), address(GUEST)));
    assert_eq!((world.counter("connect4/by_route"), world.counter("route4/steered")), (0, 1));
}

/// Rules as of hostPorts, NodePorts and Docker's published ports: an edge node's address is none of this host, unlike a virtual
/// one.
fn hostports() {
    // "-A" adds them, "-D" removes them.
    let rules = |action: &str| {
        for chain in ["PREROUTING", "OUTPUT"] {
            let local = format!("-p tcp --dport {PORT} -m addrtype --dst-type LOCAL");
            run("iptables", &format!("-w -t nat {action} {chain} {local} -j REDIRECT --to-ports 9"));
        }
    };
    let mut pod = pod_of_this_host();
    let world = start(desired(&[EDGE]));
    rules("-A");
    assert_eq!(asks(&mut pod, "10.8.0.7:10250").unwrap().local, at(EDGE.0, PORT));
    enter(&cgroup_mount());
    let seen = ask(at(EDGE.0, PORT));
    enter(&own_cgroup());
    assert_eq!(seen.unwrap().local, at(EDGE.0, PORT));
    drop(world);
    rules("-D");
    let _at_connect = World::with(config(), &with_client(desired(&[EDGE]), POD_RANGE));
    asks(&mut pod, "10.8.0.7:10250").unwrap();
    rules("-A");
    asks(&mut pod, "10.8.0.7:10250").unwrap_err();
}

fn tun(name: &str) -> Arc<SyncDevice> {
    Arc::new(DeviceBuilder::new().name(name).mtu(1500).build_sync().expect("a TUN device"))
}

fn forward(from: &SyncDevice, to: &SyncDevice) {
    let mut packet = [0; 1 << 16];
    while let Ok(length) = from.recv(&mut packet) {
        // A queue that is full drops it, as a network does.
        drop(to.send(&packet[..length]));
    }
}

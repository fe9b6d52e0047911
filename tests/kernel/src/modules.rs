//! Cases that need a kernel module which not every machine has: in a virtual machine only.

use tunnel_routing::RouteTarget;

use crate::Case;
use crate::by_route::{asks, pod_of_this_host, start};
use crate::peer::Peer;
use crate::support::{EDGE, PORT, address, ask, at, desired, ip, net_of, run, sysctl};
use crate::uplinks::{neighbour, refused};

pub(crate) const CASES: &[Case] =
    &[("modules::a_neighbour_of_a_vrf_is_no_pod", vrf), ("modules::services_of_ipvs_are_taken", ipvs)];

/// The kernel names the VRF as the interface of a packet that came in by one of its own.
fn vrf() {
    let (mut pod, mut neighbour) = (pod_of_this_host(), neighbour());
    ip("link add blue type vrf table 100");
    ip("link set blue up");
    ip("link set lan0 master blue");
    ip("route add default via 10.1.0.2 dev lan0 table 100");
    let world = start(desired(&[EDGE]));
    refused(&world, &mut neighbour, &mut pod, "a VRF");
}

/// IPVS looks up the way to a real server without ports, for which no rule is. The connection tracking that kube-proxy
/// switches on has the packet routed once more, as it has another destination then.
fn ipvs() {
    let mut pod = pod_of_this_host();
    // It has these addresses without Postern.
    let mut lan = Peer::spawn();
    lan.link("lan0", "10.1.0.1/24", "10.1.0.2/24");
    ip("route add default via 10.1.0.2");
    let endpoints = [("10.96.0.10", at(EDGE.0, PORT)), ("10.96.0.11", at("10.244.3.7", 8080))];
    for (service, endpoint) in endpoints {
        lan.ip(&format!("addr add {}/32 dev lo", endpoint.ip()));
        lan.listen(&endpoint.to_string());
        ip(&format!("addr add {service}/32 dev lo"));
        run("ipvsadm", &format!("-A -t {service}:443 -s rr"));
        run("ipvsadm", &format!("-a -t {service}:443 -r {endpoint} -m"));
    }
    // As of kube-proxy, which has the host's own connections masqueraded: they come from the Service's address.
    sysctl("net.ipv4.ip_forward", "1");
    run("iptables", "-w -t nat -A OUTPUT -d 10.96.0.0/16 -j MARK --set-mark 0x4000");
    run("iptables", "-w -t nat -A POSTROUTING -m mark --mark 0x4000 -j MASQUERADE");
    let mut state = desired(&[EDGE]);
    let target = RouteTarget { virtual_address: address("198.18.3.0"), up: true, any_port: true };
    state.routes.insert(net_of("10.244.3.0/24"), target);
    let world = start(state);
    sysctl("net.ipv4.vs.conntrack", "1");
    for (service, endpoint) in endpoints {
        let seen = asks(&mut pod, &format!("{service}:443")).unwrap();
        assert_eq!((seen.local, seen.client.ip()), (endpoint, address("10.244.1.5")));
        assert_eq!(ask(at(service, 443)).unwrap().local, endpoint);
    }
    assert_eq!(world.counter("route4/steered"), 4);
}

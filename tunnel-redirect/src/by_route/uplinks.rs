//! Interfaces that lead to other hosts, by which no packet of this host's pods comes in. Makes no system calls.

use std::collections::BTreeSet;
use std::net::IpAddr;

use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};

use crate::netlink::destination;

/// True for default routes, and routes to one of these hosts. A network plugin may lead to other hosts' pods by the
/// interface of its own ones, as Antrea does, so that a gateway is no sign.
pub(super) fn leads_to(route: &RouteMessage, hosts: &BTreeSet<IpAddr>) -> bool {
    route.header.kind == RouteType::Unicast
        && destination(route).is_none_or(|net| {
            net.prefix_len() < net.max_prefix_len()
                && hosts.range(net.network()..=net.broadcast()).next().is_some()
        })
}

pub(super) fn interfaces(route: &RouteMessage) -> Vec<u32> {
    let of = |attribute: &RouteAttribute| match attribute {
        RouteAttribute::Oif(index) => vec![*index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    };
    route.attributes.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::{RouteAddress, RouteNextHop};

    use super::*;

    fn route(net: Option<&str>, interface: RouteAttribute) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.kind = RouteType::Unicast;
        route.attributes = vec![interface];
        if let Some(ipnet::IpNet::V4(net)) = net.map(|net| net.parse().unwrap()) {
            route.header.destination_prefix_length = net.prefix_len();
            route.attributes.push(RouteAttribute::Destination(RouteAddress::Inet(net.network())));
        }
        route
    }

    #[test]
    fn default_routes_and_networks_of_cloud_hosts_are_uplinks_and_pods_networks_are_not() {
        let by = RouteAttribute::Oif;
        let hop = |index| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = index;
            hop
        };
        let mut local = route(None, by(9));
        local.header.kind = RouteType::Unreachable;
        let routes = [
            route(None, by(2)),
            route(None, RouteAttribute::MultiPath(vec![hop(3), hop(4)])),
            route(Some("10.1.0.0/24"), by(5)),
            route(Some("10.2.0.0/24"), by(6)),
            // flannel; Calico, also with a host of the cloud; Antrea, by the interface of this host's pods.
            route(Some("10.244.1.0/24"), by(7)),
            route(Some("10.1.0.9/32"), by(8)),
            route(Some("10.244.2.0/24"), by(7)),
            local,
        ];
        let hosts = ["10.1.0.9".parse().unwrap()].into();
        let uplinks: Vec<u32> =
            routes.iter().filter(|route| leads_to(route, &hosts)).flat_map(interfaces).collect();
        assert_eq!(uplinks, [2, 3, 4, 5]);
    }
}

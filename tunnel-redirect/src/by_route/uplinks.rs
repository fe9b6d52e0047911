//! Interfaces that lead to other hosts, by which no packet of this host's pods comes in. Makes no system calls.

use std::collections::BTreeSet;
use std::net::IpAddr;

use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};

use crate::error::RedirectError;
use crate::netlink::{attribute, destination};

/// True for default routes, and routes to one of these hosts. A network plugin may lead to other hosts' pods by the
/// interface of its own ones, as Antrea does, so that a gateway is no sign.
pub(super) fn leads_to(route: &RouteMessage, hosts: &BTreeSet<IpAddr>) -> bool {
    route.header.kind == RouteType::Unicast
        && destination(route).is_none_or(|net| {
            net.prefix_len() < net.max_prefix_len()
                && hosts.range(net.network()..=net.broadcast()).next().is_some()
        })
}

/// The interfaces that were found, and a reason for which there may be more.
#[derive(Default)]
pub(crate) struct Uplinks {
    pub(crate) interfaces: BTreeSet<u32>,
    pub(crate) incomplete: Option<RedirectError>,
}

impl Uplinks {
    pub(super) fn add(&mut self, route: &RouteMessage) {
        let interfaces = interfaces(route);
        let next_hop = attribute!(route, RouteAttribute::NhId);
        if let Some(id) = next_hop.filter(|_| interfaces.is_empty()) {
            self.incomplete = Some(RedirectError::Netlink {
                operation: "list the routes of --redirect-pods=route".into(),
                reason: format!(
                    "a route names no interface, only the next hop {id}: set net.ipv4.nexthop_compat_mode=1"
                ),
            });
        }
        self.interfaces.extend(interfaces);
    }
}

fn interfaces(route: &RouteMessage) -> Vec<u32> {
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

    #[test]
    fn a_next_hop_without_an_interface_is_reported() {
        let mut uplinks = Uplinks::default();
        let mut both = route(None, RouteAttribute::NhId(7));
        both.attributes.push(RouteAttribute::Oif(2));
        uplinks.add(&both);
        assert!(uplinks.incomplete.is_none());
        uplinks.add(&route(None, RouteAttribute::NhId(8)));
        uplinks.add(&route(None, RouteAttribute::Oif(3)));
        assert_eq!(uplinks.interfaces, [2, 3].into());
        let incomplete = uplinks.incomplete.unwrap().to_string();
        assert!(
            incomplete.contains("only the next hop 8: set net.ipv4.nexthop_compat_mode=1"),
            "{incomplete}"
        );
    }
}

//! Parts of rtnetlink's messages.

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};

/// The value of a message's first attribute of a kind, by reference.
macro_rules! attribute {
    ($message:expr, $kind:path) => {
        $message.attributes.iter().find_map(|attribute| match attribute {
            $kind(value) => Some(value),
            _ => None,
        })
    };
}
pub(super) use attribute;

pub(super) fn family(ipv6: bool) -> AddressFamily {
    if ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

pub(super) fn destination(message: &RouteMessage) -> Option<IpNet> {
    let length = message.header.destination_prefix_length;
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => {
            IpNet::new((*address).into(), length).ok()
        }
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => {
            IpNet::new((*address).into(), length).ok()
        }
        _ => None,
    })
}

//! Rules and routes as rtnetlink has them. Makes no system calls.

use std::net::Ipv4Addr;

use ipnet::IpNet;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{
    RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage, RulePortRange,
};
use netlink_packet_route::{AddressFamily, IpProtocol};

use super::wanted::{Kind, Packets, Route, Rule, Table};
use crate::netlink::{attribute, destination, family};

/// Marks rules and routes as Postern's. Not in `/etc/iproute2/rt_protos`, nor used by FRR or BIRD.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(201);
/// Before the rules of container networks. Two more follow: for every port, and for what is not taken.
const PRIORITY: u32 = 90;
/// The first routing table; each server has two, by its device's number.
const FIRST_TABLE: u32 = 198_180;
/// The first table for packets that are not taken.
const FIRST_NOT_TAKEN: u32 = FIRST_TABLE + 2 * super::device::MOST;
const ICMPV6: IpProtocol = IpProtocol::Other(58);
/// Packets that this host sends come in there for a rule.
const LOOPBACK: &str = "lo";

/// The device, and with it the tables, of a server.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) number: u32,
    pub(super) index: u32,
}

impl Place {
    pub(super) fn table(self, table: Table) -> u32 {
        match table {
            Table::Ports => FIRST_TABLE + 2 * self.number,
            Table::AnyPort => FIRST_TABLE + 2 * self.number + 1,
            Table::NotTaken => FIRST_NOT_TAKEN + self.number,
        }
    }

    /// The number of the server that has this table.
    pub(super) fn of_table(table: u32) -> Option<u32> {
        let number = match table.checked_sub(FIRST_NOT_TAKEN) {
            Some(number) => number,
            None => table.checked_sub(FIRST_TABLE)? / 2,
        };
        (number < super::device::MOST).then_some(number)
    }
}

/// A rule with Postern's protocol number.
pub(super) struct ListedRule {
    pub(super) message: RuleMessage,
    /// Number of the server's device.
    pub(super) number: u32,
    /// Its meaning, if it is one that a server writes.
    pub(super) rule: Option<Rule>,
}

pub(super) struct ListedRoute {
    pub(super) message: RouteMessage,
    /// Its meaning, if it is one that the server with this device writes.
    pub(super) route: Option<Route>,
}

impl Rule {
    pub(super) fn message(self, place: Place) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header =
            RuleHeader { family: family(self.ipv6), action: RuleAction::ToTable, ..RuleHeader::default() };
        let order = match self.table() {
            Table::Ports => 0,
            Table::AnyPort => 1,
            Table::NotTaken => 2,
        };
        let which = match self.packets {
            Packets::Port(port) => {
                let port = RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port });
                vec![RuleAttribute::IpProtocol(IpProtocol::Tcp), port]
            }
            Packets::EveryPort => vec![RuleAttribute::IpProtocol(IpProtocol::Tcp)],
            Packets::Icmp(_) => {
                vec![RuleAttribute::IpProtocol(if self.ipv6 { ICMPV6 } else { IpProtocol::Icmp })]
            }
            Packets::OfOthers => {
                message.header.flags = RuleFlags::Invert;
                vec![RuleAttribute::Iifname(LOOPBACK.to_owned())]
            }
        };
        message.attributes = vec![
            RuleAttribute::Priority(PRIORITY + order),
            RuleAttribute::Table(place.table(self.table())),
            RuleAttribute::Protocol(PROTOCOL),
        ];
        message.attributes.extend(which);
        message
    }
}

impl ListedRule {
    /// Returns None if the rule is not a server's.
    pub(super) fn read(mut message: RuleMessage) -> Option<Self> {
        // The kernel lists more than was set, and more with each version (masks of ports since 6.15): what is not known
        // here counts as unset.
        let known = |attribute: &RuleAttribute| {
            !matches!(
                attribute,
                RuleAttribute::Other(_)
                    | RuleAttribute::SuppressPrefixLen(_)
                    | RuleAttribute::SuppressIfGroup(_)
            )
        };
        message.attributes.retain(known);
        if !message.attributes.contains(&RuleAttribute::Protocol(PROTOCOL)) {
            return None;
        }
        let number = Place::of_table(*attribute!(message, RuleAttribute::Table)?)?;
        let ports = attribute!(message, RuleAttribute::DestinationPortRange);
        let port = ports.map(|range| Packets::Port(range.start));
        let icmp = [Packets::Icmp(Table::Ports), Packets::Icmp(Table::AnyPort)];
        let others = [Packets::EveryPort, Packets::OfOthers].into_iter().chain(icmp);
        let ipv6 = message.header.family == AddressFamily::Inet6;
        let rule = port.into_iter().chain(others).map(|packets| Rule { ipv6, packets }).find(|rule| {
            let as_written = rule.message(Place { number, index: 0 });
            let inverted = |rule: &RuleMessage| rule.header.flags.contains(RuleFlags::Invert);
            as_written.attributes.iter().all(|one| message.attributes.contains(one))
                && message.attributes.len() == as_written.attributes.len()
                && message.header.action == RuleAction::ToTable
                && inverted(&message) == inverted(&as_written)
                && (message.header.dst_len, message.header.src_len, message.header.tos) == (0, 0, 0)
        });
        Some(Self { message, number, rule })
    }
}

impl Route {
    pub(super) fn message(self, place: Place) -> RouteMessage {
        let mut message = RouteMessage::default();
        let ipv4 = matches!(self.net, IpNet::V4(_));
        let local = self.kind == Kind::Local;
        message.header.address_family = family(!ipv4);
        message.header.destination_prefix_length = self.net.prefix_len();
        message.header.protocol = PROTOCOL;
        message.header.scope = if local && ipv4 { RouteScope::Host } else { RouteScope::Universe };
        message.header.kind = match self.kind {
            Kind::Local => RouteType::Local,
            Kind::Throw => RouteType::Throw,
            Kind::Unreachable => RouteType::Unreachable,
        };
        message.attributes = vec![
            RouteAttribute::Destination(self.net.network().into()),
            RouteAttribute::Table(place.table(self.table)),
            RouteAttribute::Priority(if self.kind == Kind::Unreachable { 2 } else { 1 }),
        ];
        if local {
            message.attributes.push(RouteAttribute::Oif(place.index));
        }
        if local && ipv4 {
            // Otherwise the source would be the edge node's address, which this host does not take for its own.
            message.attributes.push(RouteAttribute::PrefSource(RouteAddress::Inet(Ipv4Addr::LOCALHOST)));
        }
        message
    }
}

impl ListedRoute {
    /// The number of the server that has written this route; None if none has.
    pub(super) fn server_of(message: &RouteMessage) -> Option<u32> {
        if message.header.protocol != PROTOCOL {
            return None;
        }
        Place::of_table(*attribute!(message, RouteAttribute::Table)?)
    }

    pub(super) fn read(mut message: RouteMessage, table: Table, place: Place) -> Self {
        let known = |attribute: &RouteAttribute| {
            matches!(
                attribute,
                RouteAttribute::Destination(_)
                    | RouteAttribute::Table(_)
                    | RouteAttribute::Priority(_)
                    | RouteAttribute::Oif(_)
                    | RouteAttribute::Gateway(_)
                    | RouteAttribute::PrefSource(_)
            )
        };
        message.attributes.retain(known);
        // IPv6 lists routes that fail with the loopback device.
        let kind = match message.header.kind {
            RouteType::Local => Some(Kind::Local),
            RouteType::Throw => Some(Kind::Throw),
            RouteType::Unreachable => Some(Kind::Unreachable),
            _ => None,
        };
        if kind != Some(Kind::Local) {
            message.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
        }
        message.header.flags = RouteFlags::empty();
        let meant = destination(&message).zip(kind).map(|(net, kind)| Route { table, net, kind });
        let route = meant.filter(|route| {
            let as_written = route.message(place);
            message.header.protocol == PROTOCOL
                && message.header.tos == 0
                && as_written.attributes.iter().all(|one| message.attributes.contains(one))
                && as_written.attributes.len() == message.attributes.len()
        });
        Self { message, route }
    }
}

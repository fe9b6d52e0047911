//! Reads and writes rules and routes by rtnetlink, many in one system call.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{
    RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage, RulePortRange,
};
use netlink_packet_route::{AddressFamily, IpProtocol, RouteNetlinkMessage};
use nix::libc;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkMessage, NetlinkPayload,
};
use rtnetlink::sys::{Socket, protocols::NETLINK_ROUTE};
use socket2::SockRef;

use super::wanted::{Kind, Packets, Route, Rule, Table};
use crate::error::RedirectError;
use crate::netlink::destination;

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
/// Messages in one system call: their answers fit into a socket's default buffer.
const BATCH: usize = 64;
/// The kernel answers at once; this allows for a change of its tables that others make.
const DEADLINE: Duration = Duration::from_secs(10);
/// The kernel's largest piece of a list.
const BUFFER: usize = 64 * 1024;
/// Attempts at a list that changes while it is read.
const ATTEMPTS: usize = 5;

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

pub(super) struct Kernel {
    socket: Socket,
    sequence: u32,
    /// Address of the socket, which the kernel names as the author of a change.
    pub(super) port: u32,
}

impl Kernel {
    pub(super) fn open() -> Result<Self, RedirectError> {
        let open = || {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            let port = socket.bind_auto()?.port_number();
            // Lists are then of one table only.
            socket.set_netlink_get_strict_chk(true)?;
            SockRef::from(&socket).set_read_timeout(Some(DEADLINE))?;
            Ok(Self { socket, sequence: 0, port })
        };
        open().map_err(|error: io::Error| failed("open a connection", &error))
    }

    /// Reports whether this interface is up; None if there is none with this number and name.
    pub(super) fn is_up(&mut self, index: u32, name: &str) -> Result<Option<bool>, RedirectError> {
        let name = LinkAttribute::IfName(name.to_owned());
        let link = self.link(index)?.filter(|link| link.attributes.contains(&name));
        Ok(link.map(|link| link.header.flags.contains(LinkFlags::Up)))
    }

    /// The device that an interface is part of, such as a VRF, which the kernel then names as the one of its packets.
    pub(super) fn controller(&mut self, interface: u32) -> Result<Option<u32>, RedirectError> {
        let attributes = self.link(interface)?.map(|link| link.attributes).unwrap_or_default();
        let mut controllers = attributes.into_iter().filter_map(|attribute| match attribute {
            LinkAttribute::Controller(index) => Some(index),
            _ => None,
        });
        Ok(controllers.next())
    }

    fn link(&mut self, index: u32) -> Result<Option<LinkMessage>, RedirectError> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let operation = "read an interface";
        match self.get(operation, RouteNetlinkMessage::GetLink(link))? {
            Ok(found) => Ok(found.into_iter().find_map(|message| match message {
                RouteNetlinkMessage::NewLink(link) => Some(link),
                _ => None,
            })),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(failed(operation, &error)),
        }
    }

    /// Brings up a device, without the addresses that the kernel would give it.
    pub(super) fn bring_up(&mut self, index: u32) -> Result<(), RedirectError> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let without = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
        let mut quiet = link.clone();
        quiet.attributes = vec![LinkAttribute::AfSpecUnspec(vec![without])];
        // Fails where there is no IPv6, which then gives none.
        _ = self.change("configure the TUN device", 0, [RouteNetlinkMessage::SetLink(quiet)]);
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        self.change("bring up the TUN device", 0, [RouteNetlinkMessage::NewLink(link)])
    }

    pub(super) fn add_rules(&mut self, rules: Vec<RuleMessage>) -> Result<(), RedirectError> {
        // Without NLM_F_EXCL the kernel takes the same rule twice.
        self.change(
            "add rules",
            NLM_F_CREATE | NLM_F_EXCL,
            rules.into_iter().map(RouteNetlinkMessage::NewRule),
        )
    }

    pub(super) fn remove_rules(&mut self, rules: Vec<RuleMessage>) -> Result<(), RedirectError> {
        self.change("remove rules", 0, rules.into_iter().map(RouteNetlinkMessage::DelRule))
    }

    pub(super) fn add_routes(
        &mut self,
        routes: impl Iterator<Item = RouteMessage>,
    ) -> Result<(), RedirectError> {
        self.change("add routes", NLM_F_CREATE | NLM_F_REPLACE, routes.map(RouteNetlinkMessage::NewRoute))
    }

    pub(super) fn remove_routes(
        &mut self,
        routes: impl Iterator<Item = RouteMessage>,
    ) -> Result<(), RedirectError> {
        self.change("remove routes", 0, routes.map(RouteNetlinkMessage::DelRoute))
    }

    /// Rules of all servers of this namespace, running or dead.
    pub(super) fn rules(&mut self, ipv6: bool) -> Result<Vec<ListedRule>, RedirectError> {
        let mut request = RuleMessage::default();
        request.header.family = family(ipv6);
        self.list("list the rules", &RouteNetlinkMessage::GetRule(request), |message| match message {
            RouteNetlinkMessage::NewRule(message) => ListedRule::read(message),
            _ => None,
        })
    }

    /// Everything in a table of the server with this device.
    pub(super) fn routes(
        &mut self,
        ipv6: bool,
        table: Table,
        place: Place,
    ) -> Result<Vec<ListedRoute>, RedirectError> {
        let number = RouteAttribute::Table(place.table(table));
        let mut request = any_route(ipv6);
        request.attributes = vec![number.clone()];
        self.list("list the routes", &RouteNetlinkMessage::GetRoute(request), |message| match message {
            // The kernel may list more than it was asked for.
            RouteNetlinkMessage::NewRoute(message) if message.attributes.contains(&number) => {
                Some(ListedRoute::read(message, table, place))
            }
            _ => None,
        })
    }

    /// Routes of all tables that lead to an interface, as far as `keep` wants them. The others are not stored: there may be a
    /// million.
    pub(super) fn unicast_routes(
        &mut self,
        ipv6: bool,
        keep: impl Fn(&RouteMessage) -> bool,
    ) -> Result<Vec<RouteMessage>, RedirectError> {
        let mut request = any_route(ipv6);
        request.header.table = 0;
        request.header.kind = RouteType::Unicast;
        self.list("list the routes", &RouteNetlinkMessage::GetRoute(request), |message| match message {
            RouteNetlinkMessage::NewRoute(route) => keep(&route).then_some(route),
            _ => None,
        })
    }

    /// The route that the kernel's rules find for a TCP packet, or the error with which it would fail.
    pub(super) fn route_of(&mut self, to: SocketAddr) -> Result<io::Result<RouteMessage>, RedirectError> {
        let mut request = any_route(to.is_ipv6());
        request.header.destination_prefix_length = IpNet::from(to.ip()).prefix_len();
        request.header.table = 0;
        // Otherwise IPv4 does not name the table; IPv6 does, and does not know this.
        if to.is_ipv4() {
            request.header.flags = RouteFlags::LookupTable;
        }
        request.attributes = vec![
            RouteAttribute::Destination(to.ip().into()),
            RouteAttribute::IpProto(libc::IPPROTO_TCP as u8),
            RouteAttribute::Dport(to.port()),
        ];
        let found = self.get("look up a route", RouteNetlinkMessage::GetRoute(request))?;
        Ok(found.and_then(|found| {
            let route = found.into_iter().find_map(|message| match message {
                RouteNetlinkMessage::NewRoute(route) => Some(route),
                _ => None,
            });
            route.ok_or_else(|| io::Error::other("no route"))
        }))
    }

    /// Asks for one object. The inner error is the kernel's answer.
    fn get(
        &mut self,
        operation: &str,
        request: RouteNetlinkMessage,
    ) -> Result<io::Result<Vec<RouteNetlinkMessage>>, RedirectError> {
        let (mut buffer, mut found) = (Vec::new(), Vec::new());
        self.append(&mut buffer, request, NLM_F_REQUEST | NLM_F_ACK);
        let answers = self
            .exchange(&buffer, |message| found.push(message))
            .map_err(|error| failed(operation, &error))?;
        Ok(answers.errors.into_iter().next().map_or(Ok(found), Err))
    }

    /// Makes changes, the last of each batch with an acknowledgement; the kernel answers the others only if they fail.
    /// One that is there already, or already gone, is no failure.
    fn change(
        &mut self,
        operation: &str,
        flags: u16,
        messages: impl IntoIterator<Item = RouteNetlinkMessage>,
    ) -> Result<(), RedirectError> {
        let mut messages = messages.into_iter().peekable();
        let mut buffer = Vec::new();
        while messages.peek().is_some() {
            buffer.clear();
            let mut taken = 0;
            while let Some(message) = messages.next_if(|_| taken < BATCH) {
                taken += 1;
                let acknowledge = if taken == BATCH || messages.peek().is_none() { NLM_F_ACK } else { 0 };
                self.append(&mut buffer, message, NLM_F_REQUEST | flags | acknowledge);
            }
            let answers = self.exchange(&buffer, drop).map_err(|error| failed(operation, &error))?;
            let harmless = [libc::EEXIST, libc::ENOENT, libc::ESRCH];
            if let Some(error) = answers
                .errors
                .iter()
                .find(|error| error.raw_os_error().is_none_or(|errno| !harmless.contains(&errno)))
            {
                return Err(failed(operation, error));
            }
        }
        Ok(())
    }

    /// Returns what `keep` makes of the messages of a list.
    fn list<T>(
        &mut self,
        operation: &str,
        request: &RouteNetlinkMessage,
        keep: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, RedirectError> {
        let mut buffer = Vec::new();
        for _ in 0..ATTEMPTS {
            buffer.clear();
            self.append(&mut buffer, request.clone(), NLM_F_REQUEST | NLM_F_DUMP);
            let mut found = Vec::new();
            let answers = self
                .exchange(&buffer, |message| found.extend(keep(message)))
                .map_err(|error| failed(operation, &error))?;
            match answers.errors.first() {
                // The table does not exist yet, or the kernel has no such family.
                Some(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP)
                    ) =>
                {
                    return Ok(Vec::new());
                }
                Some(error) => return Err(failed(operation, error)),
                None if !answers.interrupted => return Ok(found),
                None => {}
            }
        }
        Err(failed(operation, &io::Error::other("they change all the time")))
    }

    fn append(&mut self, buffer: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        let mut message = NetlinkMessage::from(message);
        self.sequence = self.sequence.wrapping_add(1);
        message.header.sequence_number = self.sequence;
        message.header.flags = flags;
        message.finalize();
        let start = buffer.len();
        // The kernel looks for the next message at a multiple of four.
        buffer.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut buffer[start..]);
    }

    /// Sends requests and reads the answers, up to the one to the last request, whose messages go to `see`.
    fn exchange(&mut self, requests: &[u8], mut see: impl FnMut(RouteNetlinkMessage)) -> io::Result<Answers> {
        self.socket.send(requests, 0)?;
        let first = self.sequence.wrapping_sub(BATCH as u32);
        let mut answers = Answers::default();
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            self.socket.recv(&mut buffer, 0)?;
            let mut rest = &buffer[..];
            while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length)) {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest);
                let message = message.map_err(|error| io::Error::other(error.to_string()))?;
                rest = rest.get((length as usize).next_multiple_of(4)..).unwrap_or_default();
                let last = message.header.sequence_number == self.sequence;
                if !last && message.header.sequence_number.wrapping_sub(first) > BATCH as u32 {
                    // The rest of an answer that was given up.
                    continue;
                }
                answers.interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
                match message.payload {
                    NetlinkPayload::Error(error) => {
                        answers.errors.extend(error.code.map(|_| error.to_io()));
                        if last {
                            return Ok(answers);
                        }
                    }
                    NetlinkPayload::Done(done) if last => {
                        if done.code < 0 {
                            answers.errors.push(io::Error::from_raw_os_error(-done.code));
                        }
                        return Ok(answers);
                    }
                    NetlinkPayload::InnerMessage(message) if last => see(message),
                    // The rest of an answer that was given up.
                    _ => {}
                }
            }
        }
    }
}

/// Answers to requests, without the messages.
#[derive(Default)]
struct Answers {
    errors: Vec<io::Error>,
    /// What was listed changed meanwhile.
    interrupted: bool,
}

fn failed(operation: &str, error: &io::Error) -> RedirectError {
    RedirectError::Netlink {
        operation: format!("{operation} of --redirect-pods=route"),
        reason: error.to_string(),
    }
}

/// A request for routes of any kind.
fn any_route(ipv6: bool) -> RouteMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = family(ipv6);
    request.header.kind = RouteType::Unspec;
    request.header.scope = RouteScope::Universe;
    request.header.protocol = RouteProtocol::Unspec;
    request
}

fn family(ipv6: bool) -> AddressFamily {
    if ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet }
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
    fn read(mut message: RuleMessage) -> Option<Self> {
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
        let table = message.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::Table(table) => Some(*table),
            _ => None,
        })?;
        let number = Place::of_table(table)?;
        let port = message.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::DestinationPortRange(range) => Some(Packets::Port(range.start)),
            _ => None,
        });
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
    fn read(mut message: RouteMessage, table: Table, place: Place) -> Self {
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

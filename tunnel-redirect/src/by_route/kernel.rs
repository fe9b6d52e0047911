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
        let mut link = LinkMessage::default();
        link.header.index = index;
        let operation = "read the TUN device";
        let found = match self.get(operation, RouteNetlinkMessage::GetLink(link))? {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            Err(error) => return Err(failed(operation, &error)),
        };
        Ok(found.iter().find_map(|message| match message {
            RouteNetlinkMessage::NewLink(link)
                if link.attributes.contains(&LinkAttribute::IfName(name.to_owned())) =>
            {
                Some(link.header.flags.contains(LinkFlags::Up))
            }
            _ => None,
        }))
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
        let listed = self.list("list the rules", &RouteNetlinkMessage::GetRule(request))?;
        let rules = listed.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewRule(message) => ListedRule::read(message),
            _ => None,
        });
        Ok(rules.collect())
    }

    /// Everything in a table of the server with this device.
    pub(super) fn routes(
        &mut self,
        ipv6: bool,
        table: Table,
        place: Place,
    ) -> Result<Vec<ListedRoute>, RedirectError> {
        let listed = self.table(ipv6, place.table(table))?;
        Ok(listed.into_iter().map(|message| ListedRoute::read(message, table, place)).collect())
    }

    /// Everything in a table.
    pub(super) fn table(&mut self, ipv6: bool, number: u32) -> Result<Vec<RouteMessage>, RedirectError> {
        let mut request = any_route(ipv6);
        request.attributes = vec![RouteAttribute::Table(number)];
        let listed = self.list("list the routes", &RouteNetlinkMessage::GetRoute(request))?;
        let routes = listed.into_iter().filter_map(|message| match message {
            // The kernel may list more than it was asked for.
            RouteNetlinkMessage::NewRoute(message)
                if message.attributes.contains(&RouteAttribute::Table(number)) =>
            {
                Some(message)
            }
            _ => None,
        });
        Ok(routes.collect())
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
        let mut buffer = Vec::new();
        self.append(&mut buffer, request, NLM_F_REQUEST | NLM_F_ACK);
        let mut list = List::default();
        let errors = self.exchange(&buffer, Some(&mut list)).map_err(|error| failed(operation, &error))?;
        Ok(errors.into_iter().next().map_or(Ok(list.messages), Err))
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
            let errors = self.exchange(&buffer, None).map_err(|error| failed(operation, &error))?;
            let harmless = [libc::EEXIST, libc::ENOENT, libc::ESRCH];
            if let Some(error) = errors
                .iter()
                .find(|error| error.raw_os_error().is_none_or(|errno| !harmless.contains(&errno)))
            {
                return Err(failed(operation, error));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        operation: &str,
        request: &RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, RedirectError> {
        let mut buffer = Vec::new();
        for _ in 0..ATTEMPTS {
            buffer.clear();
            self.append(&mut buffer, request.clone(), NLM_F_REQUEST | NLM_F_DUMP);
            let mut list = List::default();
            let errors =
                self.exchange(&buffer, Some(&mut list)).map_err(|error| failed(operation, &error))?;
            match errors.first() {
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
                None if !list.interrupted => return Ok(list.messages),
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

    /// Sends requests and reads the answers, up to the one to the last request. Returns the errors.
    fn exchange(&mut self, requests: &[u8], mut list: Option<&mut List>) -> io::Result<Vec<io::Error>> {
        self.socket.send(requests, 0)?;
        let first = self.sequence.wrapping_sub(BATCH as u32);
        let mut errors = Vec::new();
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
                if let Some(list) = &mut list {
                    list.interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
                }
                match (message.payload, &mut list) {
                    (NetlinkPayload::Error(error), _) => {
                        errors.extend(error.code.map(|_| error.to_io()));
                        if last {
                            return Ok(errors);
                        }
                    }
                    (NetlinkPayload::Done(done), _) if last => {
                        if done.code < 0 {
                            errors.push(io::Error::from_raw_os_error(-done.code));
                        }
                        return Ok(errors);
                    }
                    (NetlinkPayload::InnerMessage(message), Some(list)) if last => {
                        list.messages.push(message);
                    }
                    // The rest of an answer that was given up.
                    _ => {}
                }
            }
        }
    }
}

#[derive(Default)]
struct List {
    messages: Vec<RouteNetlinkMessage>,
    /// It changed while it was read.
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
        let (order, which) = match self.packets {
            Packets::Port(port) => {
                let port = RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port });
                (0, vec![RuleAttribute::IpProtocol(IpProtocol::Tcp), port])
            }
            Packets::EveryPort => (1, vec![RuleAttribute::IpProtocol(IpProtocol::Tcp)]),
            Packets::OfOthers => {
                message.header.flags = RuleFlags::Invert;
                (2, vec![RuleAttribute::Iifname(LOOPBACK.to_owned())])
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
        let ports = message.attributes.iter().find_map(|attribute| match attribute {
            RuleAttribute::DestinationPortRange(range) => Some(*range),
            _ => None,
        });
        let ipv6 = message.header.family == AddressFamily::Inet6;
        let packets = match ports {
            _ if table >= FIRST_NOT_TAKEN => Packets::OfOthers,
            Some(range) => Packets::Port(range.start),
            None => Packets::EveryPort,
        };
        let rule = Some(Rule { ipv6, packets }).filter(|rule| {
            let as_written = rule.message(Place { number, index: 0 });
            let same = as_written.attributes.iter().all(|one| message.attributes.contains(one))
                && message.attributes.len() == as_written.attributes.len();
            let plain = message.header.action == RuleAction::ToTable
                && message.header.flags.contains(RuleFlags::Invert) == (packets == Packets::OfOthers)
                && (message.header.dst_len, message.header.src_len, message.header.tos) == (0, 0, 0);
            same && plain
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

//! Reads and writes interfaces, addresses, rules and routes by rtnetlink, many in one system call.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::RuleMessage;
use nix::libc;
use rtnetlink::packet_core::{
    DecodeError, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE,
    NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::sys::{Socket, protocols::NETLINK_ROUTE};
use socket2::SockRef;
use tunnel_abi::LOOPBACK_IFINDEX;

use super::error::RedirectError;
use super::netlink::{attribute, family};

/// Messages in one system call: their answers fit into a socket's default buffer.
const BATCH: usize = 64;
/// The kernel answers at once; this allows for a change of its tables that others make.
const DEADLINE: Duration = Duration::from_secs(10);
/// The kernel's largest piece of a list.
const BUFFER: usize = 64 * 1024;
/// Attempts at a list that changes while it is read.
const ATTEMPTS: usize = 20;
/// It was logged that something in a list is not understood: one process may read the same lists again and again.
static WARNED: AtomicBool = AtomicBool::new(false);

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
            // Lists are then of what was asked for only.
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
        let link = self.link(interface)?;
        Ok(link.and_then(|link| attribute!(link, LinkAttribute::Controller).copied()))
    }

    fn link(&mut self, index: u32) -> Result<Option<LinkMessage>, RedirectError> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let operation = "read an interface";
        match self.ask(operation, RouteNetlinkMessage::GetLink(link), 0)? {
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
            "add rules of --redirect-pods=route",
            NLM_F_CREATE | NLM_F_EXCL,
            rules.into_iter().map(RouteNetlinkMessage::NewRule),
        )
    }

    pub(super) fn remove_rules(&mut self, rules: Vec<RuleMessage>) -> Result<(), RedirectError> {
        let rules = rules.into_iter().map(RouteNetlinkMessage::DelRule);
        self.change("remove rules of --redirect-pods=route", 0, rules)
    }

    pub(super) fn add_routes(
        &mut self,
        routes: impl Iterator<Item = RouteMessage>,
    ) -> Result<(), RedirectError> {
        let routes = routes.map(RouteNetlinkMessage::NewRoute);
        self.change("add routes of --redirect-pods=route", NLM_F_CREATE | NLM_F_REPLACE, routes)
    }

    pub(super) fn remove_routes(
        &mut self,
        routes: impl Iterator<Item = RouteMessage>,
    ) -> Result<(), RedirectError> {
        let routes = routes.map(RouteNetlinkMessage::DelRoute);
        self.change("remove routes of --redirect-pods=route", 0, routes)
    }

    /// Adds the redirect route of a range. Returns false if it was there, left by a killed server; it is taken over.
    pub(super) fn add_range_route(&mut self, range: IpNet) -> Result<bool, RedirectError> {
        let operation = format!("add the route `local {range} dev lo`");
        let message = RouteNetlinkMessage::NewRoute(range_route(range));
        let answer = self.ask(&operation, message, NLM_F_CREATE | NLM_F_EXCL)?;
        changed(answer, libc::EEXIST, &operation)
    }

    /// Removes the redirect route of a range. Returns false if there was none.
    pub(super) fn remove_range_route(&mut self, range: IpNet) -> Result<bool, RedirectError> {
        let operation = format!("remove the route `local {range} dev lo`");
        let answer = self.ask(&operation, RouteNetlinkMessage::DelRoute(range_route(range)), 0)?;
        changed(answer, libc::ESRCH, &operation)
    }

    /// Addresses of all interfaces.
    pub(super) fn addresses(&mut self) -> Result<Vec<AddressMessage>, RedirectError> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.list("list the addresses", &request, |message| match message {
            RouteNetlinkMessage::NewAddress(address) => Some(address),
            _ => None,
        })
    }

    /// All rules of a family, in the order in which the kernel follows them.
    pub(super) fn rules(&mut self, ipv6: bool) -> Result<Vec<RuleMessage>, RedirectError> {
        let mut request = RuleMessage::default();
        request.header.family = family(ipv6);
        self.list("list the rules", &RouteNetlinkMessage::GetRule(request), |message| match message {
            RouteNetlinkMessage::NewRule(rule) => Some(rule),
            _ => None,
        })
    }

    /// Everything in a table.
    pub(super) fn routes_in(&mut self, ipv6: bool, table: u32) -> Result<Vec<RouteMessage>, RedirectError> {
        let table = RouteAttribute::Table(table);
        let mut request = any_route(ipv6);
        request.attributes = vec![table.clone()];
        self.list("list the routes", &RouteNetlinkMessage::GetRoute(request), |message| match message {
            // The kernel may list more than it was asked for.
            RouteNetlinkMessage::NewRoute(route) => route.attributes.contains(&table).then_some(route),
            _ => None,
        })
    }

    /// Routes of all tables and both families, as far as `keep` wants them. The others are not stored: there may be a million. The
    /// kernel may list other types than this one.
    pub(super) fn routes_of(
        &mut self,
        kind: RouteType,
        keep: impl Fn(&RouteMessage) -> bool,
    ) -> Result<Vec<RouteMessage>, RedirectError> {
        let mut found = Vec::new();
        for ipv6 in [false, true] {
            let mut request = any_route(ipv6);
            request.header.kind = kind;
            let request = RouteNetlinkMessage::GetRoute(request);
            found.extend(self.list("list the routes", &request, |message| match message {
                RouteNetlinkMessage::NewRoute(route) => keep(&route).then_some(route),
                _ => None,
            })?);
        }
        Ok(found)
    }

    /// The route that the kernel's rules find for a TCP packet, or the error with which it would fail.
    pub(super) fn route_of(&mut self, to: SocketAddr) -> Result<io::Result<RouteMessage>, RedirectError> {
        let mut request = any_route(to.is_ipv6());
        request.header.destination_prefix_length = IpNet::from(to.ip()).prefix_len();
        // Otherwise IPv4 does not name the table; IPv6 does, and does not know this.
        if to.is_ipv4() {
            request.header.flags = RouteFlags::LookupTable;
        }
        request.attributes = vec![
            RouteAttribute::Destination(to.ip().into()),
            RouteAttribute::IpProto(libc::IPPROTO_TCP as u8),
            RouteAttribute::Dport(to.port()),
        ];
        let found = self.ask("look up a route", RouteNetlinkMessage::GetRoute(request), 0)?;
        Ok(found.and_then(|found| {
            let route = found.into_iter().find_map(|message| match message {
                RouteNetlinkMessage::NewRoute(route) => Some(route),
                _ => None,
            });
            route.ok_or_else(|| io::Error::other("no route"))
        }))
    }

    /// Asks for one object, or for one change. The inner error is the kernel's answer.
    fn ask(
        &mut self,
        operation: &str,
        request: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<io::Result<Vec<RouteNetlinkMessage>>, RedirectError> {
        let (mut buffer, mut found) = (Vec::new(), Vec::new());
        self.append(&mut buffer, request, NLM_F_REQUEST | NLM_F_ACK | flags);
        let answers = self
            .exchange(&buffer, |message| found.push(message))
            .map_err(|error| failed(operation, &error))?;
        Ok(answers.errors.into_iter().chain(answers.unknown).next().map_or(Ok(found), Err))
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

    /// Returns what `keep` makes of the messages of a list. Those of others that are not understood are left out.
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
                None if !answers.interrupted => {
                    if let Some(reason) = answers.unknown.filter(|_| !WARNED.swap(true, Ordering::Relaxed)) {
                        tracing::warn!(operation, %reason, "left out entries that are not understood");
                    }
                    return Ok(found);
                }
                None => {}
            }
        }
        Err(failed(operation, &io::Error::other(format!("the list changed during each of {ATTEMPTS} reads"))))
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
        let mut answers = Answers::default();
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            match self.socket.recv(&mut buffer, 0) {
                // Not restarted by the kernel, because of the timeout.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                received => received?,
            };
            if answers.read(&buffer, self.sequence, &mut see)? {
                return Ok(answers);
            }
        }
    }
}

/// Answers to requests, without the messages.
#[derive(Default)]
struct Answers {
    errors: Vec<io::Error>,
    /// The list changed meanwhile.
    interrupted: bool,
    /// The first message that is not understood. The others are read nevertheless: a list that is not read to its end stays on the
    /// socket, and the kernel begins no other one.
    unknown: Option<io::Error>,
}

impl Answers {
    /// Reads what one system call returned. Returns true at the end of the answer to the last request, which has this number.
    fn read(
        &mut self,
        mut rest: &[u8],
        sequence: u32,
        see: &mut impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<bool> {
        let undecoded = |error: DecodeError| io::Error::other(error.to_string());
        let first = sequence.wrapping_sub(BATCH as u32);
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest).map_err(undecoded)?;
            let (number, kind) = (message.sequence_number(), message.message_type());
            let decoded = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest);
            rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
            let last = number == sequence;
            if !last && number.wrapping_sub(first) > BATCH as u32 {
                // The rest of an answer that was given up.
                continue;
            }
            self.interrupted |= message.flags() & NLM_F_DUMP_INTR != 0;
            match decoded.map(|message| message.payload) {
                Ok(NetlinkPayload::Error(error)) => {
                    self.errors.extend(error.code.map(|_| error.to_io()));
                    if last {
                        return Ok(true);
                    }
                }
                Ok(NetlinkPayload::Done(done)) if last => {
                    if done.code < 0 {
                        self.errors.push(io::Error::from_raw_os_error(-done.code));
                    }
                    return Ok(true);
                }
                Ok(NetlinkPayload::InnerMessage(message)) if last => see(message),
                // The rest of an answer that was given up.
                Ok(_) => {}
                Err(error) if matches!(kind, NLMSG_ERROR | NLMSG_DONE) => return Err(undecoded(error)),
                Err(error) => {
                    self.unknown.get_or_insert_with(|| undecoded(error));
                }
            }
        }
        Ok(false)
    }
}

fn failed(operation: &str, error: &io::Error) -> RedirectError {
    RedirectError::Netlink { operation: operation.to_owned(), reason: error.to_string() }
}

/// Returns false if the error is `needless`: there was nothing to change.
fn changed<T>(answer: io::Result<T>, needless: i32, operation: &str) -> Result<bool, RedirectError> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(needless) => Ok(false),
        Err(error) => Err(failed(operation, &error)),
    }
}

/// The route `local <range> dev lo`: every address of the range belongs to this host.
fn range_route(range: IpNet) -> RouteMessage {
    let ipv4 = matches!(range, IpNet::V4(_));
    let mut route = any_route(!ipv4);
    route.header.destination_prefix_length = range.prefix_len();
    route.header.table = libc::RT_TABLE_LOCAL;
    route.header.protocol = RouteProtocol::Boot;
    route.header.scope = if ipv4 { RouteScope::Host } else { RouteScope::Universe };
    route.header.kind = RouteType::Local;
    route.attributes =
        vec![RouteAttribute::Destination(range.network().into()), RouteAttribute::Oif(LOOPBACK_IFINDEX)];
    route
}

/// A request for routes of any kind and table.
fn any_route(ipv6: bool) -> RouteMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = family(ipv6);
    request.header.kind = RouteType::Unspec;
    request.header.scope = RouteScope::Universe;
    request.header.protocol = RouteProtocol::Unspec;
    request
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::{DoneMessage, NetlinkHeader};

    use super::*;

    /// As from the kernel, for a request with this number.
    fn bytes(payload: NetlinkPayload<RouteNetlinkMessage>, sequence: u32) -> Vec<u8> {
        let mut message = NetlinkMessage::new(NetlinkHeader::default(), payload);
        message.header.sequence_number = sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    #[test]
    fn a_message_that_is_not_understood_does_not_end_a_list() {
        let route = |index| {
            let mut route = any_route(false);
            route.attributes = vec![RouteAttribute::Oif(index)];
            bytes(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)), 7)
        };
        // An attribute that is longer than its message.
        let mut broken = route(3);
        let attribute = broken.len() - 8;
        broken[attribute..attribute + 2].copy_from_slice(&400_u16.to_ne_bytes());
        let done = bytes(NetlinkPayload::Done(DoneMessage::default()), 7);
        let others_end =
            bytes(NetlinkPayload::Done(DoneMessage::default()), 6_u32.wrapping_sub(BATCH as u32));
        let list = [route(2), broken, others_end, route(4)].concat();

        let (mut answers, mut seen) = (Answers::default(), Vec::new());
        let mut see = |message| match message {
            RouteNetlinkMessage::NewRoute(route) => seen.extend(route.attributes),
            other => panic!("{other:?}"),
        };
        assert!(!answers.read(&list, 7, &mut see).unwrap());
        assert!(answers.read(&done, 7, &mut see).unwrap(), "the end of the list");
        assert_eq!(seen, [RouteAttribute::Oif(2), RouteAttribute::Oif(4)]);
        assert!(answers.unknown.is_some() && answers.errors.is_empty());
        // A length beyond the end.
        assert!(Answers::default().read(&done[..12], 7, &mut |_| ()).is_err());
    }

    /// Such a list may lack entries; it is read again.
    #[test]
    fn a_list_that_changed_while_it_was_read_is_known_by_any_message() {
        for changed in [0, 1] {
            let mut messages = [
                bytes(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(any_route(false))), 7),
                bytes(NetlinkPayload::Done(DoneMessage::default()), 7),
            ];
            // The flags, behind the length and the type.
            messages[changed][6..8].copy_from_slice(&NLM_F_DUMP_INTR.to_ne_bytes());
            let mut answers = Answers::default();
            assert!(answers.read(&messages.concat(), 7, &mut |_| ()).unwrap());
            assert!(answers.interrupted && answers.errors.is_empty());
        }
    }
}

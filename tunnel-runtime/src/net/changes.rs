//! Watches changes of this host's addresses or routes, by rtnetlink(7).

use std::io;
use std::time::Duration;

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket};
use nix::errno::Errno;
use socket2::{SockFilter, SockRef};
use tokio::time::timeout;

/// Quiet time after a change. Changes come in bursts: an interface goes down with all of its addresses.
const SETTLE: Duration = Duration::from_millis(20);

/// Groups of messages (linux/rtnetlink.h), one bit each.
#[derive(Clone, Copy)]
enum Group {
    Link = 1,
    Ipv4Address = 1 << 4,
    Ipv4Route = 1 << 6,
    Ipv4Rule = 1 << 7,
    Ipv6Address = 1 << 8,
    Ipv6Route = 1 << 10,
    Ipv6Rule = 1 << 18,
}

/// A subscription to changes in this network namespace. Needs no privilege. It does not parse messages: a parser of all of
/// rtnetlink is a sixteenth of the agent's program.
pub struct NetChanges {
    socket: TokioSocket,
}

/// The kernel has ended the subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel has ended the subscription to changes of addresses or routes")]
pub struct Ended;

impl NetChanges {
    /// Subscribes to changes of addresses of both families. Needs a tokio runtime.
    ///
    /// # Errors
    /// Fails if a netlink socket cannot be created.
    pub fn of_addresses() -> io::Result<Self> {
        Self::subscribe(&[Group::Ipv4Address, Group::Ipv6Address], None)
    }

    /// Subscribes to changes of routes within these networks or in these tables, of rules, and of one interface, except
    /// those that the netlink socket with the address `own` makes. A router with a full Internet routing table costs
    /// nothing here, nor do the interfaces of pods: the kernel drops messages about others. (For IPv6 it compares the first
    /// 32 bits.)
    ///
    /// # Errors
    /// Fails as [`Self::of_addresses`] does.
    pub fn of_routes(
        networks: &[IpNet],
        tables: &[u32],
        interface: Option<u32>,
        own: Option<u32>,
    ) -> io::Result<Self> {
        let mut groups = vec![Group::Ipv4Route, Group::Ipv6Route, Group::Ipv4Rule, Group::Ipv6Rule];
        groups.extend(interface.map(|_| Group::Link));
        Self::subscribe(&groups, Some(&changes_of(networks, tables, interface, own)))
    }

    fn subscribe(groups: &[Group], filter: Option<&[SockFilter]>) -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
        if let Some(filter) = filter {
            SockRef::from(socket.socket_ref()).attach_filter(filter)?;
        }
        let groups = groups.iter().fold(0, |groups, group| groups | *group as u32);
        socket.socket_mut().bind(&SocketAddr::new(0, groups))?;
        Ok(Self { socket })
    }

    async fn message(&self) -> Result<(), Ended> {
        // The kernel discards the rest of a message.
        let mut head = [0_u8; 16];
        match self.socket.recv(&mut head.as_mut_slice()).await {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => Ok(()),
            Err(_) => Err(Ended),
        }
    }

    /// Waits up to `at_most` for a change and returns true if there was one. An overflow of the socket counts as a
    /// change. After a change it waits for a quiet moment, for a limited time, so that a flapping interface does not
    /// block the caller.
    ///
    /// # Errors
    /// [`Ended`] if no more changes will be reported.
    pub async fn next(&mut self, at_most: Duration) -> Result<bool, Ended> {
        match timeout(at_most, self.message()).await {
            Err(_) => Ok(false),
            Ok(Err(ended)) => Err(ended),
            Ok(Ok(())) => {
                let burst = async { while let Ok(Ok(())) = timeout(SETTLE, self.message()).await {} };
                drop(timeout(SETTLE * 10, burst).await);
                Ok(true)
            }
        }
    }
}

/// Classic BPF (linux/filter.h), run before a message takes room in the socket. Drops messages of the author `own`,
/// those about routes whose destination is in none of the networks and whose table is none of these, and those about
/// other interfaces. Keeps all others.
fn changes_of(
    networks: &[IpNet],
    tables: &[u32],
    interface: Option<u32>,
    own: Option<u32>,
) -> Vec<SockFilter> {
    const LOAD_BYTE: u16 = 0x30;
    const LOAD_WORD: u16 = 0x20;
    const LOAD_WORD_BEHIND_X: u16 = 0x40;
    const SET_A: u16 = 0x00;
    const SET_X: u16 = 0x01;
    const A_TO_X: u16 = 0x07;
    const AND: u16 = 0x54;
    const IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    /// Offset in `struct nlmsghdr`, in host byte order: the byte of `nlmsg_type` that is not 0.
    const TYPE: u32 = if cfg!(target_endian = "little") { 4 } else { 5 };
    /// Offset of `nlmsg_pid`.
    const AUTHOR: u32 = 12;
    const NEW_LINK: u32 = 16;
    const DELETE_LINK: u32 = 17;
    /// Offset of `ifi_index` in `struct ifinfomsg`.
    const INTERFACE: u32 = 20;
    const NEW_ROUTE: u32 = 24;
    const DELETE_ROUTE: u32 = 25;
    /// Offset behind `nlmsghdr` and `rtmsg`.
    const ATTRIBUTES: u32 = 28;
    const RTA_DST: u32 = 1;
    const RTA_TABLE: u32 = 15;
    /// SKF_AD_OFF + SKF_AD_NLATTR: replaces A, an offset, by the offset of the first attribute behind it of type X, or
    /// by 0.
    const FIND_ATTRIBUTE: u32 = 0xffff_f000 + 12;
    const ATTRIBUTE_HEADER: u32 = 4;

    let step = |code, value| (code, value, To::Next, To::Next);
    let if_equal = |value, then, otherwise| (IF_EQUAL, value, then, otherwise);
    let find = |attribute| {
        [step(SET_X, attribute), step(SET_A, ATTRIBUTES), step(LOAD_WORD, FIND_ATTRIBUTE)].into_iter()
    };
    // A word is loaded as big-endian.
    let host_order = |value: u32| u32::from_be_bytes(value.to_ne_bytes());
    let mut steps = Vec::new();
    if let Some(own) = own {
        steps.extend([step(LOAD_WORD, AUTHOR), if_equal(host_order(own), To::Drop, To::Next)]);
    }
    steps.push(step(LOAD_BYTE, TYPE));
    if let Some(interface) = interface {
        steps.extend([
            if_equal(NEW_LINK, To::Skip(1), To::Next),
            if_equal(DELETE_LINK, To::Next, To::Skip(2)),
            step(LOAD_WORD, INTERFACE),
            if_equal(host_order(interface), To::Keep, To::Drop),
        ]);
    }
    steps.extend([if_equal(NEW_ROUTE, To::Skip(1), To::Next), if_equal(DELETE_ROUTE, To::Next, To::Keep)]);
    if let Ok(count @ 1..) = u8::try_from(tables.len()) {
        steps.extend(find(RTA_TABLE));
        steps.extend([
            if_equal(0, To::Skip(2 + count), To::Next),
            step(A_TO_X, 0),
            step(LOAD_WORD_BEHIND_X, ATTRIBUTE_HEADER),
        ]);
        steps.extend(tables.iter().map(|table| if_equal(host_order(*table), To::Keep, To::Next)));
    }
    steps.extend(find(RTA_DST));
    // A default route has no destination.
    steps.extend([if_equal(0, To::Drop, To::Next), step(A_TO_X, 0)]);
    for network in networks {
        let (base, mask) = first_word(network);
        steps.extend([
            step(LOAD_WORD_BEHIND_X, ATTRIBUTE_HEADER),
            step(AND, mask),
            if_equal(base, To::Keep, To::Next),
        ]);
    }
    let drop_at = steps.len();
    // Jumps count from the next step.
    let jump = |at: usize, to| match to {
        To::Next => 0,
        To::Skip(steps) => steps,
        To::Drop => u8::try_from(drop_at - at - 1).unwrap_or(u8::MAX),
        To::Keep => u8::try_from(drop_at - at).unwrap_or(u8::MAX),
    };
    let steps = steps.into_iter().enumerate();
    let mut program: Vec<SockFilter> = steps
        .map(|(at, (code, value, then, otherwise))| {
            SockFilter::new(code, jump(at, then), jump(at, otherwise), value)
        })
        .collect();
    program.push(SockFilter::new(RETURN, 0, 0, 0));
    program.push(SockFilter::new(RETURN, 0, 0, u32::MAX));
    program
}

/// Where a step of the filter leads.
#[derive(Clone, Copy)]
enum To {
    Next,
    Skip(u8),
    Drop,
    Keep,
}

/// Returns the first 32 bits of the network's addresses, and the mask of the bits that all have in common.
fn first_word(network: &IpNet) -> (u32, u32) {
    match network.trunc() {
        IpNet::V4(network) => (network.network().to_bits(), network.netmask().to_bits()),
        IpNet::V6(network) => {
            let word = |address: std::net::Ipv6Addr| (address.to_bits() >> 96) as u32;
            (word(network.network()), word(network.netmask()))
        }
    }
}

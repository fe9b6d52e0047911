//! Watches changes of this host's addresses or routes, by rtnetlink(7).

use std::fmt;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use ipnet::IpNet;
use rtnetlink::MulticastGroup;
use rtnetlink::sys::AsyncSocket as _;
use socket2::{SockFilter, SockRef};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// Quiet time after a change. Changes come in bursts: an interface goes down with all of its addresses.
const SETTLE: Duration = Duration::from_millis(20);

/// A subscription to changes in this network namespace. Needs no privilege.
pub struct NetChanges {
    messages: Pin<Box<dyn Stream<Item = ()> + Send>>,
    _connection: AbortOnDropHandle<()>,
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
        Self::subscribe(&[MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr], None)
    }

    /// Subscribes to changes of routes within these networks, and of rules. A router with a full Internet routing
    /// table costs nothing here: the kernel drops messages about other routes. (For IPv6 it compares the first 32
    /// bits.)
    ///
    /// # Errors
    /// Fails as [`Self::of_addresses`] does.
    pub fn of_routes(networks: &[IpNet]) -> io::Result<Self> {
        let groups = [
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Rule,
        ];
        Self::subscribe(&groups, Some(&routes_within(networks)))
    }

    fn subscribe(groups: &[MulticastGroup], filter: Option<&[SockFilter]>) -> io::Result<Self> {
        let (mut connection, _handle, messages) = rtnetlink::new_multicast_connection(groups)?;
        if let Some(filter) = filter {
            SockRef::from(&*connection.socket_mut().socket_mut()).attach_filter(filter)?;
        }
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        Ok(Self { messages: Box::pin(messages.map(drop)), _connection: connection })
    }

    /// Waits up to `at_most` for a change and returns true if there was one. An overflow of the socket counts as a
    /// change. After a change it waits for a quiet moment, for a limited time, so that a flapping interface does not
    /// block the caller.
    ///
    /// # Errors
    /// [`Ended`] if no more changes will be reported.
    pub async fn next(&mut self, at_most: Duration) -> Result<bool, Ended> {
        match timeout(at_most, self.messages.next()).await {
            Err(_) => Ok(false),
            Ok(None) => Err(Ended),
            Ok(Some(())) => {
                let burst = async { while let Ok(Some(())) = timeout(SETTLE, self.messages.next()).await {} };
                drop(timeout(SETTLE * 10, burst).await);
                Ok(true)
            }
        }
    }
}

impl fmt::Debug for NetChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NetChanges")
    }
}

/// Classic BPF (linux/filter.h), run before a message takes room in the socket. Drops messages about routes whose
/// destination is in none of the networks, and keeps all others.
fn routes_within(networks: &[IpNet]) -> Vec<SockFilter> {
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
    const NEW_ROUTE: u32 = 24;
    const DELETE_ROUTE: u32 = 25;
    /// Offset behind `nlmsghdr` and `rtmsg`.
    const ATTRIBUTES: u32 = 28;
    const RTA_DST: u32 = 1;
    /// SKF_AD_OFF + SKF_AD_NLATTR: replaces A, an offset, by the offset of the first attribute behind it of type X, or
    /// by 0.
    const FIND_ATTRIBUTE: u32 = 0xffff_f000 + 12;
    const ATTRIBUTE_HEADER: u32 = 4;

    let step = |code, if_true, if_false, value| SockFilter::new(code, if_true, if_false, value);
    // Jumps count from the next step. The last two steps are "drop" and "keep".
    let checks = 3 * u8::try_from(networks.len()).unwrap_or(u8::MAX / 3);
    let mut program = vec![
        step(LOAD_BYTE, 0, 0, TYPE),
        step(IF_EQUAL, 1, 0, NEW_ROUTE),
        step(IF_EQUAL, 0, 6 + checks, DELETE_ROUTE),
        step(SET_X, 0, 0, RTA_DST),
        step(SET_A, 0, 0, ATTRIBUTES),
        step(LOAD_WORD, 0, 0, FIND_ATTRIBUTE),
        // A default route has no destination.
        step(IF_EQUAL, 1 + checks, 0, 0),
        step(A_TO_X, 0, 0, 0),
    ];
    for (number, network) in (0_u8..).zip(networks) {
        let (base, mask) = first_word(network);
        program.push(step(LOAD_WORD_BEHIND_X, 0, 0, ATTRIBUTE_HEADER));
        program.push(step(AND, 0, 0, mask));
        program.push(step(IF_EQUAL, checks - 3 * (number + 1) + 1, 0, base));
    }
    program.push(step(RETURN, 0, 0, 0));
    program.push(step(RETURN, 0, 0, u32::MAX));
    program
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

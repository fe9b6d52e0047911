//! What happens to a `connect()`: a pure function over a few lookups.

use crate::{ANY_PORT, Address, DOWN, Mapping, V4, V6};

/// A `connect()` as the hook sees it.
#[derive(Clone, Copy, Debug)]
pub struct Connect<A> {
    /// Destination address.
    pub address: A,
    /// Destination port, host order.
    pub port: u16,
    /// The socket's protocol is TCP (an MPTCP subflow is a TCP socket).
    pub tcp: bool,
    /// The socket is bound to a device (`SO_BINDTODEVICE`): a redirect over loopback would black-hole.
    pub bound_device: bool,
}

/// Why a connect goes direct.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Not a TCP socket.
    NotTcp,
    /// Bound to a device.
    BoundDevice,
    /// The port is not tunnelled, or not at this address.
    Port,
    /// The address is a cloud node's, this host's, or excluded by the operator.
    Excluded,
    /// Not an edge address.
    NoRoute,
    /// The server has been gone for too long.
    Orphaned,
}

/// The decision about a connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict<A> {
    /// Do not touch it.
    Direct(Reason),
    /// Connect to this token instead.
    Redirect(A),
    /// The node has no tunnel: fail with EHOSTUNREACH, or, where the kernel cannot, connect to the
    /// token and let the server reset.
    Down(A),
}

/// Lookups shared by both address families.
pub trait GlobalState {
    /// Whether `port` is tunnelled.
    fn tunnelled(&self, port: u16) -> bool;
    /// Whether there are routes that take every port.
    fn any_port_routes(&self) -> bool;
    /// Whether the server serves; when it does not, every route counts as down.
    fn serving(&self) -> bool;
    /// Whether the server has been gone for so long that its routes do not count any more.
    fn orphaned(&self) -> bool;
}

/// Lookups of one address family.
pub trait Tables<A>: GlobalState {
    /// Whether `address` lies in an excluded network.
    fn excluded(&self, address: A) -> bool;
    /// The longest route that covers `address`.
    fn route(&self, address: A) -> Option<Mapping<A>>;
}

/// Decides about a connect. Exclusion wins over routes; among routes the longest prefix wins.
#[inline(always)]
pub fn verdict<A: Address, T: Tables<A>>(tables: &T, connect: &Connect<A>) -> Verdict<A> {
    if !connect.tcp {
        return Verdict::Direct(Reason::NotTcp);
    }
    if connect.bound_device {
        return Verdict::Direct(Reason::BoundDevice);
    }
    let tunnelled = tables.tunnelled(connect.port);
    if !tunnelled && !tables.any_port_routes() {
        return Verdict::Direct(Reason::Port);
    }
    // Only connects to tunnelled ports pay for reading the clock.
    if tables.orphaned() {
        return Verdict::Direct(Reason::Orphaned);
    }
    if tables.excluded(connect.address) {
        return Verdict::Direct(Reason::Excluded);
    }
    let Some(route) = tables.route(connect.address) else {
        return Verdict::Direct(Reason::NoRoute);
    };
    if !tunnelled && route.flags & ANY_PORT == 0 {
        return Verdict::Direct(Reason::Port);
    }
    let token = route.apply(connect.address);
    if route.flags & DOWN != 0 || !tables.serving() { Verdict::Down(token) } else { Verdict::Redirect(token) }
}

/// A verdict about an IPv6 socket's connect, which may be to an IPv4 peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerdictV6 {
    /// The address was IPv4-mapped: only its last word may be rewritten.
    Mapped(Verdict<V4>),
    /// The address was an IPv6 one.
    Native(Verdict<V6>),
}

/// Decides about an IPv6 socket's connect; an IPv4-mapped address is looked up in the IPv4 tables,
/// because that is the peer it reaches.
#[inline(always)]
pub fn verdict_v6<T: Tables<V4> + Tables<V6>>(tables: &T, connect: &Connect<V6>) -> VerdictV6 {
    let Connect { address, port, tcp, bound_device } = *connect;
    match address.mapped() {
        Some(address) => VerdictV6::Mapped(verdict(tables, &Connect { address, port, tcp, bound_device })),
        None => VerdictV6::Native(verdict(tables, connect)),
    }
}

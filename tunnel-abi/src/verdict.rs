//! Decides about a `connect()`, as a pure function over a few lookups.

use crate::{ANY_PORT, Address, DOWN, Mapping, V4, V6};

/// A `connect()`, as described by the hook.
#[derive(Clone, Copy, Debug)]
pub struct Connect<A> {
    /// Destination address.
    pub address: A,
    /// Destination port, host order.
    pub port: u16,
    /// True for a TCP socket (an MPTCP subflow is one).
    pub tcp: bool,
    /// True if the socket is bound to a device (`SO_BINDTODEVICE`). Redirected over loopback, its packets would be
    /// lost.
    pub bound_device: bool,
}

/// Reason for not redirecting a connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Not a TCP socket.
    NotTcp,
    /// Bound to a device.
    BoundDevice,
    /// The port is not tunnelled, or not at this address.
    Port,
    /// The address belongs to a cloud node or this host, or is excluded by the operator.
    Excluded,
    /// Not an edge address.
    NoRoute,
    /// The server has been gone too long.
    Orphaned,
    /// The socket is in another network namespace than the server, which lives: the route takes its packets, to the true
    /// address.
    ByRoute,
}

/// Decision about a connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict<A> {
    /// Leave it unchanged.
    Direct(Reason),
    /// Connect to this virtual address instead.
    Redirect(A),
    /// The node has no tunnel, or the server is gone: fail with EHOSTUNREACH or, on kernels that cannot, connect to the virtual address and
    /// let the server reset the connection.
    Down(A),
}

/// Lookups shared by both address families.
pub trait GlobalState {
    /// True if `port` is tunnelled.
    fn tunnelled(&self, port: u16) -> bool;
    /// True if there are routes for every port.
    fn any_port_routes(&self) -> bool;
    /// True if the server is serving; otherwise every route counts as down.
    fn serving(&self) -> bool;
    /// True if the server has been gone for so long that its routes no longer count.
    fn orphaned(&self) -> bool;
    /// True if an orphaned route still keeps connects from going direct: they fail.
    fn refuse_orphaned(&self) -> bool;
    /// True if a connect can be failed with EHOSTUNREACH.
    fn fails_at_connect(&self) -> bool;
    /// True if a route takes this socket's connections: it is in another network namespace, and the server lives, with
    /// which the routes end. Otherwise they are redirected, so that a dead server's programs refuse them. Asked only for
    /// those that would be redirected, or steered to a server that resets them.
    fn by_route(&self) -> bool;
}

/// Lookups of one address family.
pub trait Tables<A>: GlobalState {
    /// True if `address` is in an excluded network.
    fn excluded(&self, address: A) -> bool;
    /// Returns the longest route that covers `address`.
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
    // Read the clock only for connects to tunnelled ports.
    let orphaned = tables.orphaned();
    if orphaned && !tables.refuse_orphaned() {
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
    let down = route.flags & DOWN != 0 || orphaned || !tables.serving();
    // Failed here also where a route would take it, as the listener could only reset it.
    if !(down && tables.fails_at_connect()) && tables.by_route() {
        return Verdict::Direct(Reason::ByRoute);
    }
    let virtual_address = route.apply(connect.address);
    if down { Verdict::Down(virtual_address) } else { Verdict::Redirect(virtual_address) }
}

/// True if a connection that a route led to this host belongs to the server: its address is an edge node's, and its
/// port is tunnelled.
#[inline(always)]
pub fn takes<A: Address, T: Tables<A>>(tables: &T, address: A, port: u16) -> bool {
    let tunnelled = tables.tunnelled(port);
    (tunnelled || tables.any_port_routes())
        && !tables.excluded(address)
        && tables.route(address).is_some_and(|route| tunnelled || route.flags & ANY_PORT != 0)
}

/// Verdict about an IPv6 socket's connect, which may be to an IPv4 peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerdictV6 {
    /// The address was IPv4-mapped: only its last word may be rewritten.
    Mapped(Verdict<V4>),
    /// The address was a native IPv6 address.
    Native(Verdict<V6>),
}

/// Decides about an IPv6 socket's connect. An IPv4-mapped address is looked up in the IPv4 tables, because it reaches
/// an IPv4 peer.
#[inline(always)]
pub fn verdict_v6<T: Tables<V4> + Tables<V6>>(tables: &T, connect: &Connect<V6>) -> VerdictV6 {
    let Connect { address, port, tcp, bound_device } = *connect;
    match address.mapped() {
        Some(address) => VerdictV6::Mapped(verdict(tables, &Connect { address, port, tcp, bound_device })),
        None => VerdictV6::Native(verdict(tables, connect)),
    }
}

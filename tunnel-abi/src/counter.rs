//! Indices of the per-CPU counters: one per hook and outcome.

use crate::verdict::{Reason, Verdict};

/// Number of counters.
pub const COUNT: u32 = 34;

/// `<hook>/<outcome>` of each counter, in index order. "connect6" counts the connects of IPv6 sockets, those to
/// IPv4-mapped addresses included.
pub const NAMES: [&str; COUNT as usize] = [
    "connect4/not_tcp",
    "connect4/bound_device",
    "connect4/port",
    "connect4/excluded",
    "connect4/no_route",
    "connect4/redirected",
    "connect4/down",
    "connect4/orphaned",
    "connect6/not_tcp",
    "connect6/bound_device",
    "connect6/port",
    "connect6/excluded",
    "connect6/no_route",
    "connect6/redirected",
    "connect6/down",
    "connect6/orphaned",
    "getpeername4/restored",
    "getpeername6/restored",
    "lookup4/steered",
    "lookup4/no_listener",
    "lookup4/foreign_client",
    "lookup6/steered",
    "lookup6/no_listener",
    "lookup6/foreign_client",
    "lookup4/replaced",
    "lookup6/replaced",
    "connect4/by_route",
    "connect6/by_route",
    "route4/steered",
    "route4/no_listener",
    "route4/foreign_client",
    "route6/steered",
    "route6/no_listener",
    "route6/foreign_client",
];

/// A BPF program at `connect()`, by socket family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// `cgroup/connect4`
    Connect4,
    /// `cgroup/connect6`
    Connect6,
}

/// How a packet of a client reached the listener lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RedirectedBy {
    /// To a virtual address, by a connect hook.
    Hook,
    /// To an edge node's own address, by a route.
    Route,
}

/// Outcome of the listener lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup {
    /// Handed to our listener.
    Steered,
    /// No listener is in our slot: refused.
    NoListener,
    /// The source may not connect to virtual addresses: refused.
    ForeignClient,
    /// Handed to our listener instead of another program's socket.
    Replaced,
}

/// Counter of a verdict at `hook`.
#[inline(always)]
pub const fn of_verdict<A>(hook: Hook, verdict: &Verdict<A>) -> u32 {
    let outcome = match verdict {
        Verdict::Direct(Reason::ByRoute) => return if matches!(hook, Hook::Connect6) { 27 } else { 26 },
        Verdict::Direct(Reason::NotTcp) => 0,
        Verdict::Direct(Reason::BoundDevice) => 1,
        Verdict::Direct(Reason::Port) => 2,
        Verdict::Direct(Reason::Excluded) => 3,
        Verdict::Direct(Reason::NoRoute) => 4,
        Verdict::Redirect(_) => 5,
        Verdict::Down(_) => 6,
        Verdict::Direct(Reason::Orphaned) => 7,
    };
    match hook {
        Hook::Connect4 => outcome,
        Hook::Connect6 => 8 + outcome,
    }
}

/// Counter of peer names that `getpeername4` translated back.
pub const RESTORED_V4: u32 = 16;
/// Counter of peer names that `getpeername6` translated back.
pub const RESTORED_V6: u32 = 17;

/// Counter of a lookup for an IPv4 (`v6 == false`) or an IPv6 packet. By route, replaced counts as steered.
#[inline(always)]
pub const fn of_lookup(by: RedirectedBy, v6: bool, lookup: Lookup) -> u32 {
    let outcome = match (by, lookup) {
        (RedirectedBy::Hook, Lookup::Replaced) => return if v6 { 25 } else { 24 },
        (_, Lookup::Steered | Lookup::Replaced) => 0,
        (_, Lookup::NoListener) => 1,
        (_, Lookup::ForeignClient) => 2,
    };
    let first = match by {
        RedirectedBy::Hook => 18,
        RedirectedBy::Route => 28,
    };
    if v6 { first + 3 + outcome } else { first + outcome }
}

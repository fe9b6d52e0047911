//! Indices of the per-CPU counters: one per hook and outcome.

use crate::verdict::{Reason, Verdict};

/// Number of counters.
pub const COUNT: u32 = 26;

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
];

/// A BPF program at `connect()`, by socket family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// `cgroup/connect4`
    Connect4,
    /// `cgroup/connect6`
    Connect6,
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

/// Counter of a lookup for an IPv4 (`v6 == false`) or an IPv6 packet.
#[inline(always)]
pub const fn of_lookup(v6: bool, lookup: Lookup) -> u32 {
    let outcome = match lookup {
        Lookup::Steered => 0,
        Lookup::NoListener => 1,
        Lookup::ForeignClient => 2,
        Lookup::Replaced => return if v6 { 25 } else { 24 },
    };
    if v6 { 21 + outcome } else { 18 + outcome }
}

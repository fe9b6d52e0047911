//! Definitions shared by the BPF programs and the server: layout of map keys and values, names and sizes of maps,
//! counters, and the [verdict](verdict::verdict) itself.
//!
//! A connect to an edge address is redirected to its virtual address.
//!
//! Everything here is pure and `no_std`, so the property tests run on the host the same decision that runs in the
//! kernel.
#![no_std]
#![cfg_attr(not(feature = "user"), forbid(unsafe_code))]
#![cfg_attr(feature = "user", deny(unsafe_code))]
#![deny(missing_docs)]

pub mod counter;
#[cfg(feature = "user")]
mod pod;
pub mod verdict;

use core::net::{Ipv4Addr, Ipv6Addr};

/// `SO_PRIORITY` of the servers' listeners, by which the lookup recognizes them (`"POS"` in ASCII). Not `SO_MARK`:
/// other programs' firewall rules match on that. Queueing disciplines use at most the lowest four bits; 0 is their
/// default.
pub const LISTENER_PRIORITY: u32 = 0x504f_5300;

/// Maximum number of routes of one address family, the self-test's included. Each has an origin.
pub const ROUTE_CAPACITY: u32 = 131_072;
/// Maximum number of excluded networks of one address family, and of client networks.
pub const LIST_CAPACITY: u32 = 131_072;
/// Size of each route and origin trie. New entries are written before old ones are removed, and before Linux 6.13 a
/// full trie refuses even a replacement. Unused entries take no memory.
pub const ROUTE_ENTRIES: u32 = 2 * ROUTE_CAPACITY;
/// Size of each exclusion trie, for the same reason. Of clients, old entries are removed first.
pub const EXCLUDED_ENTRIES: u32 = 2 * LIST_CAPACITY;
/// 64-bit words of the port bitmap: one bit per TCP port.
pub const PORT_WORDS: u32 = 65_536 / 64;
/// Slot of the IPv4 listener in `LISTENER`.
pub const LISTENER_V4: u32 = 0;
/// Slot of the IPv6 listener in `LISTENER`.
pub const LISTENER_V6: u32 = 1;
/// Number of slots in `LISTENER`.
pub const LISTENER_SLOTS: u32 = 2;
/// Index of the loopback device in every network namespace (`LOOPBACK_IFINDEX` in the kernel).
pub const LOOPBACK_IFINDEX: u32 = 1;

/// Value of `HOST_NETNS` for the initial network namespace, as its cookie is unknown to user space before Linux 5.14.
pub const INITIAL_NETNS: u64 = u64::MAX;

/// Names of maps, read-only globals and programs, as they appear in the object.
pub mod names {
    /// IPv4 networks that are never redirected.
    pub const EXCLUDED_V4: &str = "EXCLUDED_V4";
    /// IPv6 networks that are never redirected.
    pub const EXCLUDED_V6: &str = "EXCLUDED_V6";
    /// Edge IPv4 networks and their blocks of virtual addresses.
    pub const ROUTES_V4: &str = "ROUTES_V4";
    /// Edge IPv6 networks and their blocks of virtual addresses.
    pub const ROUTES_V6: &str = "ROUTES_V6";
    /// Blocks of IPv4 virtual addresses and the networks they stand for.
    pub const ORIGINS_V4: &str = "ORIGINS_V4";
    /// Blocks of IPv6 virtual addresses and the networks they stand for.
    pub const ORIGINS_V6: &str = "ORIGINS_V6";
    /// IPv4 networks that may connect to a virtual address.
    pub const CLIENTS_V4: &str = "CLIENTS_V4";
    /// IPv6 networks that may connect to a virtual address.
    pub const CLIENTS_V6: &str = "CLIENTS_V6";
    /// Indices of the interfaces that lead to other hosts.
    pub const UPLINKS: &str = "UPLINKS";
    /// Bitmap of tunnelled TCP ports.
    pub const PORTS: &str = "PORTS";
    /// A word of bits, [`SERVING`](crate::SERVING) and [`ANY_PORT_ROUTES`](crate::ANY_PORT_ROUTES), and the index of the
    /// [device](crate::STATE_DEVICE).
    pub const STATE: &str = "STATE";
    /// Sockets of the listeners that accept redirected connections.
    pub const LISTENER: &str = "LISTENER";
    /// Per-CPU counters; see [`crate::counter`].
    pub const COUNTERS: &str = "COUNTERS";
    /// One word: time of the server's last sign of life, in nanoseconds of `CLOCK_MONOTONIC`.
    pub const ALIVE: &str = "ALIVE";

    /// Global `u8`: 1 if `bpf_set_retval` exists (Linux 6.1), so that connects on a downed route fail at once.
    pub const SET_RETVAL: &str = "SET_RETVAL";
    /// Global `u8`: 1 if `bpf_sk_lookup.ingress_ifindex` exists (Linux 5.17).
    pub const INGRESS_IFINDEX: &str = "INGRESS_IFINDEX";
    /// Global `u64`: cookie of the server's network namespace if connections from others are taken by route,
    /// [`INITIAL_NETNS`](crate::INITIAL_NETNS) for the initial one, or 0 if they are redirected at connect() too.
    pub const HOST_NETNS: &str = "HOST_NETNS";
    /// Global `u64`: nanoseconds without a sign of life after which the server counts as gone.
    pub const ORPHAN_AFTER: &str = "ORPHAN_AFTER";
    /// Global `u8`: 1 if connects to edge addresses then fail; with 0 they are not redirected.
    pub const REFUSE_ORPHANED: &str = "REFUSE_ORPHANED";
    /// Global [`Prefix`](crate::Prefix)`<V4>`: the range of IPv4 virtual addresses.
    pub const VIRTUAL_V4: &str = "VIRTUAL_V4";
    /// Global [`Prefix`](crate::Prefix)`<V6>`: the range of IPv6 virtual addresses.
    pub const VIRTUAL_V6: &str = "VIRTUAL_V6";
    /// Global `u8`: log level of aya-log. With 0 the verifier drops every log statement.
    pub const LOG_LEVEL: &str = "AYA_LOG_LEVEL";

    // The kernel keeps 15 characters of a program name.
    /// Program at `connect()` of IPv4 sockets.
    pub const CONNECT4: &str = "postern_conn4";
    /// Program at `connect()` of IPv6 sockets.
    pub const CONNECT6: &str = "postern_conn6";
    /// Program at `getpeername()` of IPv4 sockets.
    pub const GETPEERNAME4: &str = "postern_peer4";
    /// Program at `getpeername()` of IPv6 sockets.
    pub const GETPEERNAME6: &str = "postern_peer6";
    /// Program at the listener lookup.
    pub const SK_LOOKUP: &str = "postern_lookup";
}

/// An IPv4 address in the kernel's form: four bytes in network order, read as one native word.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct V4(pub u32);

/// An IPv6 address in the kernel's form: bytes in network order, read as four native words.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct V6(pub [u32; 4]);

impl From<Ipv4Addr> for V4 {
    fn from(address: Ipv4Addr) -> Self {
        Self(u32::from_ne_bytes(address.octets()))
    }
}

impl From<V4> for Ipv4Addr {
    fn from(address: V4) -> Self {
        Self::from(address.0.to_ne_bytes())
    }
}

impl From<Ipv6Addr> for V6 {
    fn from(address: Ipv6Addr) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address.octets();
        Self([
            u32::from_ne_bytes([a, b, c, d]),
            u32::from_ne_bytes([e, f, g, h]),
            u32::from_ne_bytes([i, j, k, l]),
            u32::from_ne_bytes([m, n, o, p]),
        ])
    }
}

impl From<V6> for Ipv6Addr {
    fn from(address: V6) -> Self {
        let [a, b, c, d] = address.0.map(u32::from_be);
        Self::from((u128::from(a) << 96) | (u128::from(b) << 64) | (u128::from(c) << 32) | u128::from(d))
    }
}

impl V6 {
    /// Returns the IPv4 address inside an IPv4-mapped one (`::ffff:a.b.c.d`), which an IPv6 socket uses to reach an
    /// IPv4 peer.
    #[inline(always)]
    pub fn mapped(self) -> Option<V4> {
        let [a, b, c, d] = self.0;
        if a == 0 && b == 0 && c == 0xffff_u32.to_be() { Some(V4(d)) } else { None }
    }
}

/// Bitwise operations on addresses of one family, enough to replace one block's prefix by another's.
pub trait Address: Copy + PartialEq {
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
}

impl Address for V4 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Address for V6 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        let (a, b) = (self.0, other.0);
        Self([a[0] & b[0], a[1] & b[1], a[2] & b[2], a[3] & b[3]])
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        let (a, b) = (self.0, other.0);
        Self([a[0] | b[0], a[1] | b[1], a[2] | b[2], a[3] | b[3]])
    }
}

/// A network as base and mask, for the read-only globals of the programs.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefix<A> {
    /// First address.
    pub base: A,
    /// Ones at the bits in which every address of the network equals `base`.
    pub mask: A,
}

impl<A: Address> Prefix<A> {
    /// True if the network contains `address`.
    #[inline(always)]
    pub fn contains(&self, address: A) -> bool {
        address.and(self.mask) == self.base
    }
}

/// [`Mapping::flags`]: no server has a tunnel to this node; connects to it fail.
pub const DOWN: u32 = 1;
/// [`Mapping::flags`]: every port is tunnelled, not only those of `PORTS`.
pub const ANY_PORT: u32 = 2;

/// Value of `CLIENTS_*`: a network whose packets may come in anywhere.
pub const FROM_ANYWHERE: u32 = 1;
/// Value of `CLIENTS_*`: this host's own addresses. By route, only packets of this host have them as their source.
pub const FROM_HERE: u32 = 2;
/// Value of `CLIENTS_*`: this host's pods. By route, their packets come in by no interface of `UPLINKS`.
pub const FROM_PODS: u32 = 3;
/// Maximum number of `UPLINKS`.
pub const UPLINK_CAPACITY: u32 = 1024;

/// Slot of `STATE` with the bits.
pub const STATE_BITS: u32 = 0;
/// Slot of `STATE` with the index of the device that routes to edge nodes' addresses name. By it the kernel says that
/// this host's own packets came in.
pub const STATE_DEVICE: u32 = 1;
/// Number of slots in `STATE`.
pub const STATE_SLOTS: u32 = 2;

/// Bit of `STATE`: the server is serving.
pub const SERVING: u32 = 1;
/// Bit of `STATE`: routes with [`ANY_PORT`] exist. Without it, a connect to a port that is not tunnelled needs no
/// lookup of its address.
pub const ANY_PORT_ROUTES: u32 = 2;

/// Value of `ROUTES_*` and `ORIGINS_*`: the block of addresses that a matching block is mapped to, one to one.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping<A> {
    /// First address of the target block.
    pub base: A,
    /// Ones at the bits kept from the address: the host bits of both blocks.
    pub host_mask: A,
    /// [`DOWN`], [`ANY_PORT`], both or 0. Always 0 in `ORIGINS_*`.
    pub flags: u32,
}

impl<A: Address> Mapping<A> {
    /// Returns the address that `address` is mapped to.
    #[inline(always)]
    pub fn apply(&self, address: A) -> A {
        self.base.or(address.and(self.host_mask))
    }
}

// The kernel compares these sizes with the map definitions; changing one changes the format.
const _: () = {
    assert!(size_of::<V4>() == 4 && align_of::<V4>() == 4);
    assert!(size_of::<V6>() == 16 && align_of::<V6>() == 4);
    assert!(size_of::<Prefix<V4>>() == 8);
    assert!(size_of::<Prefix<V6>>() == 32);
    assert!(size_of::<Mapping<V4>>() == 12);
    assert!(size_of::<Mapping<V6>>() == 36);
};

//! Listener lookup: a connection to any port of a virtual address belongs to the server, if its source may connect
//! there. So does one that a route led here, to a tunnelled port of an edge node's own address.

use core::ptr::null_mut;

use aya_ebpf::{
    bindings::{
        bpf_sk_lookup,
        sk_action::{SK_DROP, SK_PASS},
    },
    macros::sk_lookup,
    maps::lpm_trie::Key,
    programs::SkLookupContext,
};
use tunnel_abi::{
    Address, FROM_ANYWHERE, FROM_PODS, LISTENER_PRIORITY, LISTENER_V4, LISTENER_V6, LOOPBACK_IFINDEX,
    STATE_DEVICE, V4, V6,
    counter::{Lookup, RedirectedBy, of_lookup},
    verdict::{Tables, takes},
};

use crate::maps::{
    CLIENTS_V4, CLIENTS_V6, HOST_NETNS, INGRESS_IFINDEX, KernelTables, LISTENER, STATE, UPLINKS, VIRTUAL_V4,
    VIRTUAL_V6, count,
};

const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;
/// Error of `bpf_sk_assign`: another program of the chain has already selected a socket.
const EEXIST: i32 = 17;
/// BPF_SK_LOOKUP_F_REPLACE: replaces an already selected socket.
const F_REPLACE: u64 = 1;

#[sk_lookup]
pub(crate) fn postern_lookup(ctx: SkLookupContext) -> u32 {
    let raw = ctx.lookup;
    // SAFETY: the kernel's own context, valid for the whole program. Volatile, so that each load keeps its size.
    let (protocol, family) =
        unsafe { ((&raw const (*raw).protocol).read_volatile(), (&raw const (*raw).family).read_volatile()) };
    if protocol != IPPROTO_TCP {
        return SK_PASS;
    }
    if family == AF_INET {
        // SAFETY: as above.
        let local = V4(unsafe { (&raw const (*raw).local_ip4).read_volatile() });
        let virtual_addresses = VIRTUAL_V4.load();
        let by = if virtual_addresses.contains(local) { RedirectedBy::Hook } else { RedirectedBy::Route };
        // SAFETY: as above.
        if by == RedirectedBy::Route && !unsafe { taken_by_route(raw, local) } {
            return SK_PASS;
        }
        // SAFETY: as above.
        let remote = V4(unsafe { (&raw const (*raw).remote_ip4).read_volatile() });
        // The host's own connects have the virtual address itself as their source: a `local` route without a preferred
        // source uses the destination as the source.
        let allowed = if virtual_addresses.contains(remote) {
            // SAFETY: as above.
            unsafe { came_over_loopback(raw) }
        } else {
            let from = CLIENTS_V4.get(Key::new(32, remote));
            // SAFETY: as above.
            from.is_some_and(|from| unsafe { may_come_in(raw, by, *from) })
        };
        return finish(&ctx, by, allowed, false);
    }
    // SAFETY: as above.
    let (local, remote) = unsafe {
        (
            V6([
                (&raw const (*raw).local_ip6[0]).read_volatile(),
                (&raw const (*raw).local_ip6[1]).read_volatile(),
                (&raw const (*raw).local_ip6[2]).read_volatile(),
                (&raw const (*raw).local_ip6[3]).read_volatile(),
            ]),
            V6([
                (&raw const (*raw).remote_ip6[0]).read_volatile(),
                (&raw const (*raw).remote_ip6[1]).read_volatile(),
                (&raw const (*raw).remote_ip6[2]).read_volatile(),
                (&raw const (*raw).remote_ip6[3]).read_volatile(),
            ]),
        )
    };
    let virtual_addresses = VIRTUAL_V6.load();
    let by = if virtual_addresses.contains(local) { RedirectedBy::Hook } else { RedirectedBy::Route };
    // SAFETY: as above.
    if by == RedirectedBy::Route && !unsafe { taken_by_route(raw, local) } {
        return SK_PASS;
    }
    let allowed = if virtual_addresses.contains(remote) {
        // SAFETY: as above.
        unsafe { came_over_loopback(raw) }
    } else {
        let from = CLIENTS_V6.get(Key::new(128, remote));
        // SAFETY: as above.
        from.is_some_and(|from| unsafe { may_come_in(raw, by, *from) })
    };
    finish(&ctx, by, allowed, true)
}

/// True if the route to an edge node's own address led the packet here, and not an address of this host.
///
/// # Safety
/// `ctx` is the context that the kernel passed to the program.
#[inline(always)]
unsafe fn taken_by_route<A: Address>(ctx: *mut bpf_sk_lookup, local: A) -> bool
where
    KernelTables: Tables<A>,
{
    if HOST_NETNS.load() == 0 {
        return false;
    }
    // SAFETY: guaranteed by the caller. The port is in host order.
    let port = unsafe { (&raw const (*ctx).local_port).read_volatile() };
    takes(&KernelTables { connect: null_mut() }, local, port as u16)
}

/// Steers or drops. Never passes: with an empty slot the connection would go to a program that listens on `*:port` of
/// this host, such as the local kubelet.
#[inline(always)]
fn finish(ctx: &SkLookupContext, by: RedirectedBy, allowed: bool, v6: bool) -> u32 {
    if !allowed {
        count(of_lookup(by, v6, Lookup::ForeignClient));
        return SK_DROP;
    }
    // Keep the choice of an older server: while it runs, its programs also come first in the connect hook, so the
    // virtual addresses are its own and the connection belongs to it.
    // SAFETY: the kernel's own context.
    let taken = unsafe { is_taken(ctx.lookup) };
    let (slot, flags) = (if v6 { LISTENER_V6 } else { LISTENER_V4 }, if taken { F_REPLACE } else { 0 });
    match LISTENER.redirect_sk_lookup(ctx, slot, flags) {
        Ok(()) => {
            count(of_lookup(by, v6, if taken { Lookup::Replaced } else { Lookup::Steered }));
            SK_PASS
        }
        Err(error) if error == -EEXIST => {
            count(of_lookup(by, v6, Lookup::Steered));
            SK_PASS
        }
        Err(_) => {
            count(of_lookup(by, v6, Lookup::NoListener));
            SK_DROP
        }
    }
}

/// True if a client's packet may come in where it did.
///
/// # Safety
/// `ctx` is the context that the kernel passed to the program.
#[inline(always)]
unsafe fn may_come_in(ctx: *mut bpf_sk_lookup, by: RedirectedBy, from: u32) -> bool {
    if by == RedirectedBy::Hook || from == FROM_ANYWHERE {
        return true;
    }
    // SAFETY: guaranteed by the caller.
    if unsafe { came_over_loopback(ctx) } {
        return true;
    }
    // SAFETY: guaranteed by the caller. The field exists, or `came_over_loopback` would have been true.
    let ingress = unsafe { (&raw const (*ctx).ingress_ifindex).read_volatile() };
    if from == FROM_PODS {
        // SAFETY: the reference is not used.
        return unsafe { UPLINKS.get(ingress) }.is_none();
    }
    // A packet of this host was routed by the server's device, which the kernel then names instead of loopback. Nobody
    // sends packets by the device itself.
    STATE.get(STATE_DEVICE).is_some_and(|device| *device == ingress)
}

/// True if an earlier program of the chain has selected a socket that is not a server's listener, which would have the
/// known priority.
///
/// # Safety
/// `ctx` is the context that the kernel passed to the program.
#[inline(always)]
unsafe fn is_taken(ctx: *mut bpf_sk_lookup) -> bool {
    // SAFETY: guaranteed by the caller. Volatile, so that the load keeps its size.
    let sk = unsafe { (&raw const (*ctx).__bindgen_anon_1.__bindgen_anon_1.sk).read_volatile() };
    if sk.is_null() {
        return false;
    }
    // SAFETY: not null, so the verifier treats it as a socket that may be read field by field.
    unsafe { (&raw const (*sk).priority).read_volatile() != LISTENER_PRIORITY }
}

/// True if the packet came from this host itself. Before Linux 5.17 the program cannot tell and relies on the kernel:
/// a packet from outside with a source that is local here is a martian (IPv4), and the answer to it stays on this
/// host, so no such handshake completes (IPv4 and IPv6).
///
/// # Safety
/// `ctx` is the context that the kernel passed to the program.
#[inline(always)]
unsafe fn came_over_loopback(ctx: *mut bpf_sk_lookup) -> bool {
    if INGRESS_IFINDEX.load() == 0 {
        return true;
    }
    // SAFETY: guaranteed by the caller; the verifier drops this load where the field does not exist.
    unsafe { (&raw const (*ctx).ingress_ifindex).read_volatile() == LOOPBACK_IFINDEX }
}

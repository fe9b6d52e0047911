//! `getpeername()` of IPv4 sockets: shows a client the address that it connected to.

use aya_ebpf::{macros::cgroup_sock_addr, maps::lpm_trie::Key, programs::SockAddrContext};
use tunnel_abi::{V4, counter::RESTORED_V4};

use crate::{
    connect::ALLOW,
    maps::{ORIGINS_V4, VIRTUAL_V4, count},
};

#[cgroup_sock_addr(getpeername4)]
pub(crate) fn postern_peer4(ctx: SockAddrContext) -> i32 {
    let raw = ctx.sock_addr;
    // SAFETY: the kernel's own context, valid for the whole program.
    let peer = V4(unsafe { (&raw const (*raw).user_ip4).read_volatile() });
    if let Some(origin) = origin_of(peer) {
        // SAFETY: as above; `user_ip4` is writable in this hook.
        unsafe { (&raw mut (*raw).user_ip4).write_volatile(origin.0) };
        count(RESTORED_V4);
    }
    ALLOW
}

/// Returns the edge address of a virtual address. (A client on this host has the virtual address as its own source, so
/// the server gets the edge address for it too, and reverts that in `listener/redirect.rs`. No field of an accepted socket
/// tells this hook that it is the server's.)
#[inline(always)]
pub(crate) fn origin_of(peer: V4) -> Option<V4> {
    if !VIRTUAL_V4.load().contains(peer) {
        return None;
    }
    ORIGINS_V4.get(Key::new(32, peer)).map(|origin| origin.apply(peer))
}

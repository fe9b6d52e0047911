//! `getpeername()` of IPv4 sockets: a client sees the address that it asked for.

use aya_ebpf::{
    bindings::bpf_sock_addr, macros::cgroup_sock_addr, maps::lpm_trie::Key, programs::SockAddrContext,
};
use tunnel_abi::{V4, counter::RESTORED_V4};

use crate::{
    connect::ALLOW,
    maps::{MARK, ORIGINS_V4, TOKENS_V4, count},
};

#[cgroup_sock_addr(getpeername4)]
pub(crate) fn postern_peer4(ctx: SockAddrContext) -> i32 {
    let raw = ctx.sock_addr;
    // SAFETY: the kernel's own context, valid for the whole program.
    let peer = V4(unsafe { (&raw const (*raw).user_ip4).read_volatile() });
    // SAFETY: as above.
    if let Some(origin) = unsafe { origin_of(raw, peer) } {
        // SAFETY: as above; `user_ip4` is writable in this hook.
        unsafe { (&raw mut (*raw).user_ip4).write_volatile(origin.0) };
        count(RESTORED_V4);
    }
    ALLOW
}

/// The original of a token, unless the socket is one of the server's own.
///
/// # Safety
/// `ctx` is the context that the kernel passed to a `getpeername` hook.
#[inline(always)]
pub(crate) unsafe fn origin_of(ctx: *mut bpf_sock_addr, peer: V4) -> Option<V4> {
    // SAFETY: guaranteed by the caller.
    if !TOKENS_V4.load().contains(peer) || unsafe { is_ours(ctx) } {
        return None;
    }
    ORIGINS_V4.get(Key::new(32, peer)).map(|origin| origin.apply(peer))
}

/// Whether the socket carries the server's mark. Its accepted sockets do (inherited from the
/// listener): a local client's source is the token itself, and the server must not see the node's
/// address there.
///
/// # Safety
/// As for [`origin_of`].
#[inline(always)]
pub(crate) unsafe fn is_ours(ctx: *mut bpf_sock_addr) -> bool {
    // SAFETY: guaranteed by the caller.
    let sk = unsafe { (&raw const (*ctx).__bindgen_anon_1.sk).read_volatile() };
    // SAFETY: not null, so the verifier knows it as a socket that may be read field by field.
    !sk.is_null() && unsafe { (&raw const (*sk).mark).read_volatile() } == MARK.load()
}

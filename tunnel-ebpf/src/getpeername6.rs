//! `getpeername()` of IPv6 sockets, with IPv6 peers and with IPv4-mapped ones.

use aya_ebpf::{macros::cgroup_sock_addr, maps::lpm_trie::Key, programs::SockAddrContext};
use tunnel_abi::counter::RESTORED_V6;

use crate::{
    connect::ALLOW,
    connect6::{read_address, write_address},
    getpeername4::origin_of,
    maps::{ORIGINS_V6, VIRTUAL_V6, count},
};

#[cgroup_sock_addr(getpeername6)]
pub(crate) fn postern_peer6(ctx: SockAddrContext) -> i32 {
    let raw = ctx.sock_addr;
    // SAFETY: the kernel's own context, valid for the whole program.
    let peer = unsafe { read_address(raw) };
    if let Some(mapped) = peer.mapped() {
        if let Some(origin) = origin_of(mapped) {
            // SAFETY: as above. Writes only the last word: the prefix ::ffff:0:0 stays.
            unsafe { (&raw mut (*raw).user_ip6[3]).write_volatile(origin.0) };
            count(RESTORED_V6);
        }
        return ALLOW;
    }
    if !VIRTUAL_V6.load().contains(peer) {
        return ALLOW;
    }
    if let Some(origin) = ORIGINS_V6.get(Key::new(128, peer)) {
        // SAFETY: as above.
        unsafe { write_address(raw, origin.apply(peer)) };
        count(RESTORED_V6);
    }
    ALLOW
}

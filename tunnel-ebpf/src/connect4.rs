//! `connect()` of IPv4 sockets: replaces an edge address by its virtual address.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use aya_log_ebpf::debug;
use tunnel_abi::{
    V4,
    counter::{Hook, of_verdict},
    verdict::{Verdict, verdict},
};

use crate::{
    connect::{ALLOW, REFUSE, describe, fail_unreachable},
    maps::{KernelTables, count},
};

#[cgroup_sock_addr(connect4)]
pub(crate) fn postern_conn4(ctx: SockAddrContext) -> i32 {
    let raw = ctx.sock_addr;
    // SAFETY: the kernel's own context, valid for the whole program.
    let connect = unsafe { describe(raw, V4((&raw const (*raw).user_ip4).read_volatile())) };
    let verdict = verdict(&KernelTables { connect: raw }, &connect);
    count(of_verdict(Hook::Connect4, &verdict));
    let virtual_address = match verdict {
        Verdict::Direct(_) => return ALLOW,
        Verdict::Redirect(virtual_address) => virtual_address,
        Verdict::Down(virtual_address) => {
            debug!(&ctx, "connect to {:i}:{}: no tunnel", u32::from_be(connect.address.0), connect.port);
            if fail_unreachable() {
                return REFUSE;
            }
            virtual_address
        }
    };
    debug!(
        &ctx,
        "connect to {:i}:{} redirected to {:i}",
        u32::from_be(connect.address.0),
        connect.port,
        u32::from_be(virtual_address.0)
    );
    // SAFETY: as above; `user_ip4` is writable in this hook.
    unsafe { (&raw mut (*raw).user_ip4).write_volatile(virtual_address.0) };
    ALLOW
}

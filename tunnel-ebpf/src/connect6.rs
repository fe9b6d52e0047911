//! `connect()` of IPv6 sockets, to IPv6 peers and to IPv4-mapped ones.

use aya_ebpf::{bindings::bpf_sock_addr, macros::cgroup_sock_addr, programs::SockAddrContext};
use aya_log_ebpf::debug;
use tunnel_abi::{
    V6,
    counter::{Hook, of_verdict},
    verdict::{Verdict, VerdictV6, verdict_v6},
};

use crate::{
    connect::{ALLOW, REFUSE, describe, fail_unreachable},
    maps::{KernelTables, count},
};

#[cgroup_sock_addr(connect6)]
pub(crate) fn postern_conn6(ctx: SockAddrContext) -> i32 {
    let raw = ctx.sock_addr;
    // SAFETY: the kernel's own context, valid for the whole program.
    let connect = unsafe { describe(raw, read_address(raw)) };
    match verdict_v6(&KernelTables { connect: raw }, &connect) {
        VerdictV6::Mapped(verdict) => {
            count(of_verdict(Hook::Connect6, &verdict));
            let virtual_address = match verdict {
                Verdict::Direct(_) => return ALLOW,
                Verdict::Redirect(virtual_address) => virtual_address,
                Verdict::Down(virtual_address) => {
                    if fail_unreachable() {
                        return REFUSE;
                    }
                    virtual_address
                }
            };
            debug!(
                &ctx,
                "mapped connect to port {} redirected to {:i}",
                connect.port,
                u32::from_be(virtual_address.0)
            );
            // SAFETY: as above. Writes only the last word: the prefix ::ffff:0:0 stays, and with it the peer's family.
            unsafe { (&raw mut (*raw).user_ip6[3]).write_volatile(virtual_address.0) };
        }
        VerdictV6::Native(verdict) => {
            count(of_verdict(Hook::Connect6, &verdict));
            let virtual_address = match verdict {
                Verdict::Direct(_) => return ALLOW,
                Verdict::Redirect(virtual_address) => virtual_address,
                Verdict::Down(virtual_address) => {
                    if fail_unreachable() {
                        return REFUSE;
                    }
                    virtual_address
                }
            };
            debug!(&ctx, "IPv6 connect to port {} redirected", connect.port);
            // SAFETY: as above.
            unsafe { write_address(raw, virtual_address) };
        }
    }
    ALLOW
}

/// Reads `user_ip6` word by word.
///
/// # Safety
/// `ctx` is the context that the kernel passed to an IPv6 address hook.
#[inline(always)]
pub(crate) unsafe fn read_address(ctx: *mut bpf_sock_addr) -> V6 {
    // SAFETY: guaranteed by the caller; volatile so that each load keeps its size.
    unsafe {
        V6([
            (&raw const (*ctx).user_ip6[0]).read_volatile(),
            (&raw const (*ctx).user_ip6[1]).read_volatile(),
            (&raw const (*ctx).user_ip6[2]).read_volatile(),
            (&raw const (*ctx).user_ip6[3]).read_volatile(),
        ])
    }
}

/// Writes `user_ip6` word by word.
///
/// # Safety
/// Same as [`read_address`].
#[inline(always)]
pub(crate) unsafe fn write_address(ctx: *mut bpf_sock_addr, address: V6) {
    let [a, b, c, d] = address.0;
    // SAFETY: guaranteed by the caller; volatile so that each store keeps its size.
    unsafe {
        (&raw mut (*ctx).user_ip6[0]).write_volatile(a);
        (&raw mut (*ctx).user_ip6[1]).write_volatile(b);
        (&raw mut (*ctx).user_ip6[2]).write_volatile(c);
        (&raw mut (*ctx).user_ip6[3]).write_volatile(d);
    }
}

//! Code shared by the connect hooks: reading the socket, and failing a connect.

use aya_ebpf::{bindings::bpf_sock_addr, helpers::generated::bpf_set_retval};
use tunnel_abi::verdict::Connect;

use crate::maps::SET_RETVAL;

const IPPROTO_TCP: u32 = 6;
const EHOSTUNREACH: i32 = 113;

/// Program result: proceed with the (possibly rewritten) address.
pub(crate) const ALLOW: i32 = 1;
/// Program result: fail the system call.
pub(crate) const REFUSE: i32 = 0;

/// Describes the connect to `address` of the socket in `ctx`.
///
/// # Safety
/// `ctx` is the context that the kernel passed to a `cgroup/connect4|6` program.
#[inline(always)]
pub(crate) unsafe fn describe<A>(ctx: *mut bpf_sock_addr, address: A) -> Connect<A> {
    // SAFETY: the kernel's context is valid for the whole program. Volatile, because the verifier accepts context
    // loads only in the fields' own sizes, and LLVM would merge them.
    let (port, protocol, sk) = unsafe {
        (
            (&raw const (*ctx).user_port).read_volatile(),
            (&raw const (*ctx).protocol).read_volatile(),
            (&raw const (*ctx).__bindgen_anon_1.sk).read_volatile(),
        )
    };
    // SAFETY: not null, so the verifier treats it as a socket that may be read field by field.
    let bound_device = !sk.is_null() && unsafe { (&raw const (*sk).bound_dev_if).read_volatile() } != 0;
    // The port is a big-endian u16 in the low half of a u32.
    Connect { address, port: u16::from_be(port as u16), tcp: protocol == IPPROTO_TCP, bound_device }
}

/// Makes the connect fail with EHOSTUNREACH and returns true; returns false if the kernel cannot (before 6.1).
#[inline(always)]
pub(crate) fn fail_unreachable() -> bool {
    if SET_RETVAL.load() == 0 {
        // The verifier knows the global's value and drops the branch with the helper, which this kernel may not have.
        return false;
    }
    // SAFETY: the helper only sets the system call's result.
    unsafe { bpf_set_retval(-EHOSTUNREACH) };
    true
}

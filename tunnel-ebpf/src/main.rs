//! The kernel side of the redirect: one file per hook, the maps in one place, and the decision itself
//! in `tunnel-abi`, where it is tested on the host.
//!
//! The kernel holds no per-connection state: an edge address is mapped to a token address one to one,
//! and back again for `getpeername()`.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(clippy::needless_pass_by_value, reason = "the program macros fix the entry points' signature")]

mod connect;
mod connect4;
mod connect6;
mod getpeername4;
mod getpeername6;
mod maps;
mod sk_lookup;

/// Helpers that are for GPL-compatible programs only are open to these programs, because the crate is
/// dual-licensed and the object is distributed under its GPL-2.0 option.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

//! Kernel side of the redirect: one file per hook, the maps in one file, and the decision itself in `tunnel-abi`,
//! where it is tested on the host.
//!
//! The kernel holds no per-connection state: an edge address is mapped one to one to a virtual address (in the
//! code), and back again for `getpeername()`.
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

/// Gives these programs access to helpers reserved for GPL-compatible programs: the crate is dual-licensed, and the
/// object is distributed under its GPL-2.0 option.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

//! What the kernel knows about a link's TCP connection.

use std::os::fd::AsFd;

use nix::getsockopt_impl;
use nix::libc;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::GetStruct;

/// `struct tcp_info` up to `tcpi_delivery_rate` (Linux 4.9), in words of 32 bits.
#[derive(Clone, Copy, Debug)]
struct TcpInfo;
getsockopt_impl!(TcpInfo, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 42], GetStruct<[u32; 42]>);

/// The word whose last byte has the flag `tcpi_delivery_rate_app_limited`.
const FLAGS: usize = 1;
const APP_LIMITED: u8 = if cfg!(target_endian = "little") { 1 } else { 1 << 7 };
/// `tcpi_delivery_rate`, 64 bits.
const DELIVERY_RATE: usize = 40;

/// How fast the last bytes were delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    /// Bytes each second; 0 before the first acknowledgement.
    pub(super) rate: u64,
    /// The path could have taken more, but there was nothing to send.
    pub(super) app_limited: bool,
}

/// Asks the kernel; `None` if the socket is closed.
pub(super) fn delivery(socket: &impl AsFd) -> Option<Delivery> {
    let info = getsockopt(socket, TcpInfo).ok()?;
    let halves = [info[DELIVERY_RATE].to_ne_bytes(), info[DELIVERY_RATE + 1].to_ne_bytes()];
    let mut rate = [0; 8];
    rate.copy_from_slice(halves.as_flattened());
    let [.., flags] = info[FLAGS].to_ne_bytes();
    Some(Delivery { rate: u64::from_ne_bytes(rate), app_limited: flags & APP_LIMITED != 0 })
}

//! System calls without a safe wrapper.
#![expect(unsafe_code, reason = "TUNSETIFF and SO_NETNS_COOKIE have no safe wrapper")]

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;

use nix::libc;

const TUN: &str = "/dev/net/tun";
/// Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Makes a TUN device in the network namespace of this thread and returns it with its name. It vanishes with the file.
pub(super) fn tun(pattern: &CStr) -> io::Result<(File, String)> {
    let file = OpenOptions::new().read(true).write(true).open(TUN)?;
    // SAFETY: ifreq is plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(pattern.to_bytes_with_nul()) {
        *to = *from as libc::c_char;
    }
    // Both flags fit.
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes one live ifreq.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    #[allow(clippy::unnecessary_cast, reason = "c_char is signed on some architectures")]
    let name = request.ifr_name.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0);
    Ok((file, name.map(char::from).collect()))
}

/// The cookie of this thread's network namespace. Kernels before 5.14 do not tell it.
pub(crate) fn host_netns(socket: &TcpListener) -> Option<u64> {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to the live u64.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0 && cookie != 0).then_some(cookie)
}

//! Limits the time until a link recovers after an outage of its line.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SetStruct;
use nix::{libc, setsockopt_impl};

/// Socket option: maximum pause between two retransmissions, in milliseconds (Linux 6.15).
#[derive(Clone, Copy, Debug)]
struct RtoMax;
const TCP_RTO_MAX_MS: libc::c_int = 44;
setsockopt_impl!(RtoMax, libc::IPPROTO_TCP, TCP_RTO_MAX_MS, u32, SetStruct<'_, u32>);

/// Minimum that the kernel accepts.
const SHORTEST_RTO_MAX: Duration = Duration::from_secs(1);

/// Returns the maximum pause between two retransmissions on a path with this round-trip time. By default the pauses
/// grow up to two minutes, so that after an outage of seconds a link takes seconds more to recover. The pause is at
/// least a few round trips; a shorter one would retransmit segments that are only slow.
pub(super) fn rto_max(rtt: Duration) -> Duration {
    SHORTEST_RTO_MAX.max(rtt * 4).min(Duration::from_secs(120))
}

/// Sets the maximum pause. Older kernels ignore it.
///
/// # Errors
/// Fails if the socket is closed.
pub(super) fn set_rto_max(socket: &impl AsFd, pause: Duration) -> io::Result<()> {
    let milliseconds = u32::try_from(pause.as_millis()).unwrap_or(u32::MAX);
    match setsockopt(socket, RtoMax, &milliseconds) {
        Ok(()) | Err(Errno::ENOPROTOOPT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_follow_the_path_within_the_kernels_bounds() {
        let ms = Duration::from_millis;
        assert_eq!(rto_max(Duration::ZERO), ms(1000));
        assert_eq!(rto_max(ms(250)), ms(1000));
        assert_eq!(rto_max(ms(3000)), ms(12_000));
        assert_eq!(rto_max(Duration::from_secs(3600)), Duration::from_secs(120));
    }

    #[test]
    fn the_kernel_takes_a_pause_within_its_bounds() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set_rto_max(&socket, rto_max(Duration::from_millis(50))).unwrap();
        if tunnel_runtime::kernel::version().is_none_or(|version| version < (6, 15)) {
            return eprintln!("not tested: TCP_RTO_MAX_MS came with Linux 6.15");
        }
        assert!(
            set_rto_max(&socket, Duration::from_secs(3600)).is_err(),
            "this kernel does not know the option"
        );
    }
}

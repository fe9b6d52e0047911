//! What the kernel knows about a link's TCP connection, and is told.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::sockopt::{GetStruct, SetStruct};
use nix::sys::socket::{getsockopt, setsockopt};
use nix::{getsockopt_impl, libc, setsockopt_impl};

/// `struct tcp_info` up to `tcpi_delivery_rate` (Linux 4.9), in words of 32 bits.
#[derive(Clone, Copy, Debug)]
struct TcpInfo;
getsockopt_impl!(TcpInfo, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 42], GetStruct<[u32; 42]>);

/// The word whose last byte is `tcpi_probes`: questions whether the peer is there that it has not answered.
const PROBES: usize = 0;
/// The word whose last byte has the flag `tcpi_delivery_rate_app_limited`.
const FLAGS: usize = 1;
const APP_LIMITED: u8 = if cfg!(target_endian = "little") { 1 } else { 1 << 7 };
/// `tcpi_unacked`, segments.
const UNACKNOWLEDGED: usize = 6;
/// `tcpi_last_data_recv` and `tcpi_last_ack_recv`, milliseconds ago.
const LAST_RECEIVED: [usize; 2] = [13, 14];
/// `tcpi_rtt`, microseconds.
const RTT: usize = 17;
/// `tcpi_total_retrans`, segments.
const RETRANSMITS: usize = 25;
/// `tcpi_delivery_rate`, 64 bits.
const DELIVERY_RATE: usize = 40;

/// The longest pause between two retransmissions, in milliseconds (Linux 6.15).
#[derive(Clone, Copy, Debug)]
struct RtoMax;
const TCP_RTO_MAX_MS: libc::c_int = 44;
setsockopt_impl!(RtoMax, libc::IPPROTO_TCP, TCP_RTO_MAX_MS, u32, SetStruct<'_, u32>);

/// The kernel takes no less.
const SHORTEST_RTO_MAX: Duration = Duration::from_secs(1);

/// What the kernel has seen of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delivery {
    /// How fast the last bytes were delivered, in bytes each second; 0 before the first acknowledgement.
    pub(super) rate: u64,
    /// The path could have taken more, but there was nothing to send.
    pub(super) app_limited: bool,
    /// With what waits in the path's buffers.
    pub(super) rtt: Duration,
    /// Segments that were sent again.
    pub(super) retransmits: u32,
    /// How long nothing has arrived, if the peer has something to answer.
    pub(super) silence: Option<Duration>,
}

/// Asks the kernel; `None` if the socket is closed.
pub(super) fn delivery(socket: &impl AsFd) -> Option<Delivery> {
    let info = getsockopt(socket, TcpInfo).ok()?;
    let halves = [info[DELIVERY_RATE].to_ne_bytes(), info[DELIVERY_RATE + 1].to_ne_bytes()];
    let mut rate = [0; 8];
    rate.copy_from_slice(halves.as_flattened());
    let [.., flags] = info[FLAGS].to_ne_bytes();
    let [.., probes] = info[PROBES].to_ne_bytes();
    let silence = info[LAST_RECEIVED[0]].min(info[LAST_RECEIVED[1]]);
    let asked = info[UNACKNOWLEDGED] > 0 || probes > 0;
    Some(Delivery {
        rate: u64::from_ne_bytes(rate),
        app_limited: flags & APP_LIMITED != 0,
        rtt: Duration::from_micros(info[RTT].into()),
        retransmits: info[RETRANSMITS],
        silence: asked.then(|| Duration::from_millis(silence.into())),
    })
}

/// The longest pause between two retransmissions on a path with this round-trip time. By default they become longer up to
/// two minutes, so that a link is used again only seconds after an outage of seconds. Not shorter than a few round trips,
/// which would send again what is only slow.
pub(super) fn rto_max(rtt: Duration) -> Duration {
    SHORTEST_RTO_MAX.max(rtt * 4).min(Duration::from_secs(120))
}

/// Sets it. Older kernels go on as they do.
///
/// # Errors
/// The socket is closed.
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
    fn the_kernel_tells_and_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let delivery = delivery(&socket).unwrap();
        assert!(delivery.rtt > Duration::ZERO && delivery.rtt < Duration::from_secs(1), "{delivery:?}");
        assert_eq!((delivery.retransmits, delivery.silence), (0, None));
        set_rto_max(&socket, rto_max(delivery.rtt)).unwrap();
        assert!(
            set_rto_max(&socket, Duration::from_secs(3600)).is_err(),
            "this kernel does not know the option"
        );
    }
}

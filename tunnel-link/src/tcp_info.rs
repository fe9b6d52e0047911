//! Kernel data about a TCP connection: `struct tcp_info` of tcp(7), read as 32-bit words.

use std::os::fd::AsFd;
use std::sync::LazyLock;
use std::time::Duration;

use nix::getsockopt_impl;
use nix::libc;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::GetStruct;
use tokio::net::TcpStream;

use tunnel_runtime::kernel;

/// `struct tcp_info` up to the fields that every kernel has.
#[derive(Clone, Copy, Debug)]
struct OldTcpInfo;
getsockopt_impl!(OldTcpInfo, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 26], GetStruct<[u32; 26]>);

/// `struct tcp_info` up to `tcpi_notsent_bytes` (Linux 4.6).
#[derive(Clone, Copy, Debug)]
struct QueueInfo;
getsockopt_impl!(QueueInfo, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 37], GetStruct<[u32; 37]>);

/// `struct tcp_info` up to `tcpi_sndbuf_limited` (Linux 4.10).
#[derive(Clone, Copy, Debug)]
struct TcpInfo;
getsockopt_impl!(TcpInfo, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; 48], GetStruct<[u32; 48]>);

/// The part of `struct tcp_info` that a kernel fills in. `GetStruct` panics if fewer bytes come back than requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Known {
    /// qemu-user returns four bytes.
    Nothing,
    /// [`OldTcpInfo`].
    Old,
    /// [`QueueInfo`].
    Queue,
    /// [`TcpInfo`].
    All,
}

static KNOWN: LazyLock<Known> = LazyLock::new(|| Known::to(kernel::emulated(), kernel::version()));

impl Known {
    fn to(emulated: bool, version: Option<(u32, u32)>) -> Self {
        match version {
            _ if emulated => Self::Nothing,
            Some(version) if version >= (4, 10) => Self::All,
            Some(version) if version >= (4, 6) => Self::Queue,
            _ => Self::Old,
        }
    }
}

/// Word whose last bytes are `tcpi_retransmits`, the number of retransmissions of unacknowledged data, and
/// `tcpi_probes`, the number of unanswered probes.
const UNANSWERED: usize = 0;
/// Word whose last byte contains the flag `tcpi_delivery_rate_app_limited`.
const FLAGS: usize = 1;
const APP_LIMITED: u8 = if cfg!(target_endian = "little") { 1 } else { 1 << 7 };
/// `tcpi_rto`, in microseconds: grows with each unacknowledged retransmission.
const RTO: usize = 2;
/// `tcpi_unacked`: segments sent and not acknowledged.
const UNACKED: usize = 6;
/// `tcpi_last_data_sent`, in milliseconds.
const LAST_DATA_SENT: usize = 11;
/// `tcpi_last_data_recv` and `tcpi_last_ack_recv`, milliseconds ago.
const LAST_RECEIVED: [usize; 2] = [13, 14];
/// `tcpi_rtt` and `tcpi_rttvar`, in microseconds.
const RTT: usize = 17;
const RTT_VARIATION: usize = 18;
/// `tcpi_total_retrans`, in segments.
const RETRANSMITS: usize = 25;
/// `tcpi_notsent_bytes`.
const NOTSENT_BYTES: usize = 36;
/// `tcpi_min_rtt`, in microseconds; all ones before the first measurement.
const MIN_RTT: usize = 37;
/// `tcpi_delivery_rate`, 64 bits.
const DELIVERY_RATE: usize = 40;
/// `tcpi_busy_time`, `tcpi_rwnd_limited` and `tcpi_sndbuf_limited`, in microseconds, 64 bits.
const BUSY: usize = 42;
const RECEIVE_WINDOW_LIMITED: usize = 44;
const SEND_BUFFER_LIMITED: usize = 46;

/// Kernel data about the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Rate at which the last bytes were delivered, in bytes per second; 0 before the first acknowledgement.
    pub rate: u64,
    /// True if the path could have taken more, but there was nothing to send.
    pub app_limited: bool,
    /// Round-trip time including queueing in the path's buffers, as far as the last samples agree.
    pub rtt: Duration,
    /// Round-trip time without queueing: the shortest of the last minutes. The kernels answer each other, however busy
    /// the programs are.
    pub shortest_rtt: Option<Duration>,
    /// Number of retransmitted segments.
    pub retransmits: u32,
    /// Time since something last arrived, at TCP level too.
    pub heard: Duration,
    /// Set if the peer has something to answer.
    pub silence: Option<Silence>,
    pub sending: SendTimes,
}

/// Time in which the connection had unsent or unacknowledged bytes, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendTimes {
    pub busy: Duration,
    /// The part of `busy` in which the peer's receive window was full.
    pub receive_window: Duration,
    /// The part of `busy` in which this end's send buffer held too little.
    pub send_buffer: Duration,
}

/// State of a peer that owes an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Time since something last arrived.
    pub lasts: Duration,
    /// Set if bytes are in flight. Otherwise the kernel has only probed whether the peer is there.
    pub unacknowledged: Option<Unacknowledged>,
}

/// The kernel's handling of unacknowledged bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unacknowledged {
    /// True if the kernel has retransmitted them, without an answer so far.
    pub resent: bool,
    /// Maximum time until the next retransmission.
    pub pause: Duration,
}

/// Queries the kernel; `None` if the socket is closed, or before Linux 4.10.
pub(crate) fn delivery(socket: &impl AsFd) -> Option<Delivery> {
    if *KNOWN < Known::All {
        return None;
    }
    let info = getsockopt(socket, TcpInfo).ok()?;
    let long = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice([info[at].to_ne_bytes(), info[at + 1].to_ne_bytes()].as_flattened());
        u64::from_ne_bytes(bytes)
    };
    let [.., flags] = info[FLAGS].to_ne_bytes();
    let [.., retransmits, probes] = info[UNANSWERED].to_ne_bytes();
    let silence = info[LAST_RECEIVED[0]].min(info[LAST_RECEIVED[1]]);
    let unacknowledged = (info[UNACKED] > 0)
        .then(|| Unacknowledged { resent: retransmits > 0, pause: Duration::from_micros(info[RTO].into()) });
    let lasts = Duration::from_millis(silence.into());
    let shortest_rtt = (info[MIN_RTT] != u32::MAX).then(|| Duration::from_micros(info[MIN_RTT].into()));
    Some(Delivery {
        rate: long(DELIVERY_RATE),
        app_limited: flags & APP_LIMITED != 0,
        rtt: agreed(info[RTT], info[RTT_VARIATION]).max(shortest_rtt.unwrap_or_default()),
        shortest_rtt,
        retransmits: info[RETRANSMITS],
        heard: lasts,
        silence: (unacknowledged.is_some() || probes > 0).then_some(Silence { lasts, unacknowledged }),
        sending: SendTimes {
            busy: Duration::from_micros(long(BUSY)),
            receive_window: Duration::from_micros(long(RECEIVE_WINDOW_LIMITED)),
            send_buffer: Duration::from_micros(long(SEND_BUFFER_LIMITED)),
        },
    })
}

/// Returns the round-trip time on which the samples behind the smoothed value agree; arguments in microseconds. After
/// an outage the kernel may take one sample as long as the outage. That makes the mean ten times as long for the next
/// dozen samples, and its variation even longer.
fn agreed(smoothed: u32, variation: u32) -> Duration {
    Duration::from_micros(smoothed.saturating_sub(variation).into())
}

/// Returns the number of segments that the peer has not acknowledged, and of bytes not sent yet. Both are 0 once the
/// peer's kernel has everything, and each is 0 if the kernel does not report it.
///
/// # Errors
/// Fails if the socket is closed.
pub(crate) fn unacknowledged(socket: &impl AsFd) -> nix::Result<(u32, u32)> {
    unacknowledged_by(socket, *KNOWN)
}

fn unacknowledged_by(socket: &impl AsFd, known: Known) -> nix::Result<(u32, u32)> {
    match known {
        Known::Nothing => Ok((0, 0)),
        Known::Old => Ok((getsockopt(socket, OldTcpInfo)?[UNACKED], 0)),
        Known::Queue | Known::All => {
            let info = getsockopt(socket, QueueInfo)?;
            Ok((info[UNACKED], info[NOTSENT_BYTES]))
        }
    }
}

/// Returns for how long the kernel has sent no byte to the peer; `None` if the socket is closed. While bytes wait to
/// be sent, this is how long the peer has not read.
pub(crate) fn sent_nothing_for(socket: &TcpStream) -> Option<Duration> {
    if *KNOWN < Known::Old {
        return None;
    }
    let info = getsockopt(socket, OldTcpInfo).ok()?;
    Some(Duration::from_millis(info[LAST_DATA_SENT].into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::time::Instant;

    #[test]
    fn a_fresh_connection_has_a_round_trip_time_and_nothing_to_answer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let delivery = delivery(&socket).unwrap();
        assert!(delivery.rtt > Duration::ZERO && delivery.rtt < Duration::from_secs(1), "{delivery:?}");
        assert!(delivery.shortest_rtt.is_some_and(|rtt| rtt <= delivery.rtt), "{delivery:?}");
        assert_eq!((delivery.retransmits, delivery.silence), (0, None));
        assert_eq!(delivery.sending.receive_window, Duration::ZERO);
    }

    #[test]
    fn no_more_is_requested_than_the_kernel_returns() {
        for (version, known) in [
            (Some((3, 10)), Known::Old),
            (Some((4, 5)), Known::Old),
            (Some((4, 6)), Known::Queue),
            (Some((4, 9)), Known::Queue),
            (Some((4, 10)), Known::All),
            (None, Known::Old),
        ] {
            assert_eq!(Known::to(false, version), known, "{version:?}");
            assert_eq!(Known::to(true, version), Known::Nothing);
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 64 << 10]).is_ok() {}
        let bytes = |known| unacknowledged_by(&socket, known).unwrap().1;
        assert_eq!((bytes(Known::Nothing), bytes(Known::Old)), (0, 0));
        assert!(bytes(Known::Queue) > 0);
    }

    #[test]
    fn one_sample_that_lasted_as_long_as_an_outage_is_not_the_round_trip_time() {
        let ms = Duration::from_millis;
        assert_eq!(agreed(612_319, 1_128_120), ms(0), "measured after 5 s on a path of 50 ms");
        assert_eq!(agreed(480_623, 862_811), ms(0), "the same two samples later");
        assert_eq!(agreed(620_000, 20_000), ms(600), "a satellite");
        assert_eq!(agreed(3_200_000, 200_000), ms(3000), "a line whose buffer is full");
    }

    #[test]
    fn a_peer_that_does_not_read_limits_the_sender_by_its_window() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 64 << 10]).is_ok() {}
        let start = Instant::now();
        let sending = loop {
            let sending = delivery(&socket).unwrap().sending;
            if sending.receive_window >= Duration::from_millis(20) {
                break sending;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "{sending:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(sending.busy >= sending.receive_window + sending.send_buffer, "{sending:?}");
    }
}

//! The link between an agent and a server: TCP and HTTP/2 settings, liveness and round-trip time.
//!
//! The values were measured (`docs/benchmarks.md`); the agent dials, the server is the HTTP/2 client.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use h2::{Ping, PingPong};
use rustls::ConnectionCommon;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// HTTP/2 stream window, in bytes: what one carried connection may have under way, or held for a receiver that does
/// not read.
pub const STREAM_WINDOW: u32 = 1 << 20;
/// HTTP/2 connection window, in bytes. A full one would stop every stream of the link, so it is far above what the
/// bounds on stalled receivers allow to be held.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes that a server holds for receivers of one node that do not read.
pub const SERVER_STALL_BYTES: usize = 256 << 20;
/// Bytes that an agent holds for targets that do not read.
pub const AGENT_STALL_BYTES: usize = 64 << 20;
/// Connections carried on one link at once.
pub const MAX_STREAMS: u32 = 1 << 17;

/// Largest HTTP/2 frame taken.
pub const MAX_FRAME: u32 = 256 << 10;
/// Bytes that TLS takes before the socket is written to. A whole frame in one system call is what makes a single stream
/// fast: with rustls' 64 KiB it moves two thirds of what it does so.
const TLS_BUFFER: usize = 256 << 10;
/// Bytes queued per stream in front of the socket: one frame. Twice as much makes small messages wait half as long again
/// behind four bulk transfers, which are no faster for it.
const SEND_BUFFER: usize = 256 << 10;
/// Unsent bytes in the kernel above which the link is not written to: keeps small messages from queueing behind bulk.
const LINK_NOTSENT_LOWAT: u32 = 128 << 10;
/// The same on sockets of carried connections: bounds kernel memory held for a receiver that does not read.
const CARRIED_NOTSENT_LOWAT: u32 = 256 << 10;
/// Headers and trailers of one message: a few short fields.
pub const MAX_HEADERS: u32 = 16 << 10;
/// Resets of streams that may be remembered or pending before the peer counts as hostile. Both ends are
/// authenticated, and thousands of callers may give up at once.
pub const MAX_RESETS: usize = 1 << 17;
/// How long a stream that this end reset is remembered, so that late frames for it are ignored.
pub const RESET_MEMORY: Duration = Duration::from_secs(5);

/// Time between two PINGs.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// How long a PING may go unanswered: a dead link is noticed within `PING_INTERVAL + PING_TIMEOUT`.
pub const PING_TIMEOUT: Duration = Duration::from_secs(12);
/// How long the handshakes of TLS and HTTP/2 and the session's first message may take.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// HTTP/2 settings of the server's end.
pub fn client_builder() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .initial_max_send_streams(MAX_STREAMS as usize)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(None)
        .reset_stream_duration(RESET_MEMORY)
        .enable_push(false);
    builder
}

/// HTTP/2 settings of the agent's end.
pub fn server_builder() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(MAX_STREAMS)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(None)
        .reset_stream_duration(RESET_MEMORY);
    builder
}

/// Options of the link's socket.
///
/// # Errors
/// The socket is closed, or the kernel does not know an option.
pub fn tune_link(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = SockRef::from(socket);
    socket.set_tcp_keepalive(&keepalive())?;
    socket.set_tcp_user_timeout(Some(PING_INTERVAL + PING_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(LINK_NOTSENT_LOWAT)
}

/// Bounds what the link's TLS holds of one write.
pub fn tune_tls<Data>(connection: &mut ConnectionCommon<Data>) {
    connection.set_buffer_limit(Some(TLS_BUFFER));
}

/// Options of a carried connection's socket, on either end; those of a listener pass to what it accepts.
///
/// # Errors
/// The socket is closed, or the kernel does not know an option.
pub fn tune_carried(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive().with_time(Duration::from_secs(60)))?;
    socket.set_tcp_notsent_lowat(CARRIED_NOTSENT_LOWAT)
}

const fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(PING_INTERVAL).with_interval(Duration::from_secs(5)).with_retries(3)
}

/// The round-trip time of the link, in microseconds; 0 until the first PING came back.
#[derive(Debug, Default)]
pub struct Rtt(AtomicU32);

impl Rtt {
    /// The last measurement.
    pub fn last(&self) -> Option<Duration> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(u64::from(micros))),
        }
    }
}

/// Why a connection failed, in words for an operator: `error` or one of its sources is the HTTP/2 layer's.
pub fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let mut source = Some(error);
    while let Some(inner) = source {
        if let Some(h2) = inner.downcast_ref::<h2::Error>() {
            return match h2.get_io() {
                Some(io) if io.kind() == io::ErrorKind::UnexpectedEof => {
                    "the peer closed the connection".to_owned()
                }
                Some(io) => io.to_string(),
                None => h2.to_string(),
            };
        }
        source = inner.source();
    }
    error.to_string()
}

/// Why the link is given up.
#[derive(Debug, thiserror::Error)]
pub enum LinkDead {
    /// Nothing came back in time.
    #[error("no answer to an HTTP/2 PING for {} s", PING_TIMEOUT.as_secs())]
    Timeout,
    /// The connection failed meanwhile.
    #[error("{}", reason(.0))]
    Failed(#[source] h2::Error),
}

/// Pings until the link is dead; measures the round-trip time and calls `tick` before each PING.
pub async fn keep_alive(mut pings: PingPong, rtt: &Rtt, mut tick: impl FnMut()) -> LinkDead {
    loop {
        tick();
        let sent = Instant::now();
        match tokio::time::timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await {
            Err(_) => return LinkDead::Timeout,
            Ok(Err(error)) => return LinkDead::Failed(error),
            Ok(Ok(_)) => {
                let micros = u32::try_from(sent.elapsed().as_micros()).unwrap_or(u32::MAX).max(1);
                rtt.0.store(micros, Ordering::Relaxed);
            }
        }
        // Jitter, so that thousands of links do not ping in step.
        let jitter = rand::random_range(0..PING_INTERVAL.as_millis() as u64 / 10);
        tokio::time::sleep(PING_INTERVAL - Duration::from_millis(jitter)).await;
    }
}

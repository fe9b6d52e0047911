//! Settings of a link: HTTP/2, TLS, TCP and timeouts. `docs/benchmarks/changes.csv` has the measurements behind the values.

use std::time::Duration;

use rustls::ConnectionCommon;
use socket2::{SockRef, TcpKeepalive};

use tunnel_runtime::memory::stall_budget;
use tunnel_runtime::net::refine;

use super::wire::Wire;

/// Initial HTTP/2 stream window, in bytes: what one tunnelled connection may have in flight, or held for a receiver
/// that does not read.
pub const STREAM_WINDOW: u32 = 1 << 20;
/// Maximum stream window, on long paths: 512 Mbit/s at 250 ms.
pub const LARGEST_WINDOW: u32 = 16 << 20;
/// HTTP/2 connection window, in bytes. A full one would stop every stream of the link, so it is far above the limits
/// for stalled receivers.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Limit for stalled receivers, in bytes, below which windows start smaller.
const SMALL_BUDGET: usize = 32 << 20;
/// Maximum bytes that a server holds for receivers of one node that do not read.
pub const SERVER_STALL_BYTES: usize = 256 << 20;
/// Maximum bytes that an agent holds for targets that do not read.
pub const AGENT_STALL_BYTES: usize = 64 << 20;
/// Maximum links of one session.
pub const MAX_LINKS: u32 = 8;
/// Maximum links of one session if both ends send with BBR. A loss then does not slow a connection down, so more links
/// are no faster. Instead they compete: each keeps its own part of the path's buffer full, and some get a
/// multiple of others.
pub const BBR_LINKS: u32 = 2;
/// Feature of an agent that sends with BBR and was not told how many links to open.
pub const BBR_FEATURE: &str = "bbr";
/// Maximum connections of one link at a time.
pub const MAX_STREAMS: u32 = 1 << 17;

/// Maximum size of an accepted HTTP/2 frame, in bytes.
pub const MAX_FRAME: u32 = 256 << 10;
/// Maximum size of a piece, in bytes: data handed to a link at a time, and buffered by TLS before the socket is
/// written to. Writing a whole frame in one system call makes a single stream fast: with rustls' 64 KiB it moves two
/// thirds as much.
pub const LARGEST_PIECE: usize = 256 << 10;
/// Minimum size of a piece, in bytes: on a slow link pieces delay each other.
pub const SMALLEST_PIECE: usize = 4 << 10;
/// Bytes queued per stream in front of the socket: one frame. With twice as much, small messages wait half as long
/// again behind four bulk transfers, which do not get faster.
pub(crate) const SEND_BUFFER: usize = 256 << 10;
/// Maximum size of the headers or trailers of one message, in bytes: a few short fields.
pub const MAX_HEADERS: u32 = 16 << 10;
/// Stream resets that may be remembered or pending before the peer counts as hostile. Both ends are authenticated, and
/// thousands of clients may give up at the same time.
pub const MAX_RESETS: usize = 1 << 17;
/// Streams of a link beyond the admitted ones: each takes one until it is refused, which is better than letting it wait.
const REFUSALS: u32 = 128;
/// Frames for streams that are forgotten, or in error, that a link may receive in its life. Each is answered with a reset,
/// and these wait if the peer does not read: about 4 MB. Late data comes for a few streams a day on a bad path.
const MAX_WRONG_FRAMES: usize = 1 << 13;
/// The same for a link on which this end opens the streams, of a whole node or server: about 16 MB. If 10,000 clients give up
/// during a stall of more than [`RESET_MEMORY`], late data comes for each of their streams.
const MAX_LATE_FRAMES: usize = 1 << 15;
/// Maximum number of streams that the other end has opened and reset before they were accepted, each of some hundred bytes.
const MAX_WAITING_RESETS: usize = 1 << 13;
/// Time for which a stream reset by this end is remembered, so that late frames for it are ignored.
pub const RESET_MEMORY: Duration = Duration::from_secs(5);

/// Time between two PINGs.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Silence of a link between servers before the kernel asks whether the other one is there.
const SERVER_KEEPALIVE: Duration = Duration::from_secs(1);
/// Time between two unanswered keepalive probes of [`tune_probing_link`].
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time for an answer to a PING: a dead link is noticed within `PING_INTERVAL + PING_TIMEOUT`.
pub const PING_TIMEOUT: Duration = Duration::from_secs(12);
/// Maximum time for the handshakes of TLS and HTTP/2 and the session's first message.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Initial limit on the bytes in flight of one tunnelled connection. It is halved if little memory may be used, so
/// that floods take half as much; if it were lower still, half a window's credit would be less than a whole frame.
pub(crate) fn first_window() -> u32 {
    if stall_budget() < SMALL_BUDGET { STREAM_WINDOW / 2 } else { STREAM_WINDOW }
}

/// Maximum stream window: at most half of what may be held for receivers that do not read. A receiver that only reads
/// slowly holds nearly all of its window, and must not be cut for that while it is alone.
pub(crate) fn largest_window() -> u32 {
    largest_window_within(stall_budget())
}

fn largest_window_within(budget: usize) -> u32 {
    let half = u32::try_from(budget / 2).unwrap_or(u32::MAX);
    // Windows grow by powers of two.
    LARGEST_WINDOW.min(1 << half.max(STREAM_WINDOW).ilog2())
}

/// HTTP/2 settings of the server's end.
pub fn client_builder() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(first_window())
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .initial_max_send_streams(MAX_STREAMS as usize)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(Some(MAX_LATE_FRAMES))
        .reset_stream_duration(RESET_MEMORY)
        .enable_push(false);
    builder
}

/// HTTP/2 settings of the agent's end.
pub fn server_builder() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(first_window())
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

/// HTTP/2 settings of a server's end of a link on which the other end opens streams, of which at most `admitted` are
/// admitted at a time.
///
/// After a stall the resets of all that gave up meanwhile arrive at once, of many more streams than are open at a time.
/// h2's default of 20 would end the link, and with it everybody else's connections.
pub fn admitting_builder(admitted: u32) -> h2::server::Builder {
    let streams = admitted.saturating_add(REFUSALS).min(MAX_STREAMS);
    let mut builder = server_builder();
    builder
        .max_concurrent_streams(streams)
        .max_concurrent_reset_streams(streams as usize)
        .max_pending_accept_reset_streams(MAX_WAITING_RESETS.max(streams as usize))
        .max_local_error_reset_streams(Some(MAX_WRONG_FRAMES));
    builder
}

/// Sets the options of the link's socket.
pub fn tune_link(wire: &Wire) {
    tune(wire, &keepalive());
}

/// Like [`tune_link`], and has the kernel send keepalive probes once the link has been silent for this long. Of an agent's link
/// only the agent's end does this: its probes keep a NAT's mapping alive, and if the mapping was forgotten, the server's kernel
/// answers with a reset.
pub fn tune_probing_link(wire: &Wire, silence: Duration) {
    tune(wire, &keepalive().with_time(silence).with_interval(PROBE_INTERVAL));
}

/// [`tune_probing_link`] for either end of a link between two servers.
pub fn tune_server_link(wire: &Wire) {
    tune_probing_link(wire, SERVER_KEEPALIVE);
}

/// Sets the options. None is essential: PINGs find a dead link if the kernel does not.
fn tune(wire: &Wire, keepalive: &TcpKeepalive) {
    let Some(socket) = wire.socket().map(SockRef::from) else { return };
    refine("TCP_NODELAY", socket.set_tcp_nodelay(true));
    refine("SO_KEEPALIVE", socket.set_tcp_keepalive(keepalive));
    if !wire.is_multipath() {
        refine("TCP_USER_TIMEOUT", socket.set_tcp_user_timeout(Some(PING_INTERVAL + PING_TIMEOUT)));
    }
}

/// Limits the bytes that the link's TLS buffers.
pub fn tune_tls<Data>(connection: &mut ConnectionCommon<Data>, piece: usize) {
    connection.set_buffer_limit(Some(piece));
}

/// Returns the unsent bytes in the kernel above which the link is not written to, so that small messages do not queue
/// behind bulk data. The link's task may wake late. If the kernel runs out of data meanwhile, it sends a short last
/// segment, and BBR, which counts segments, overestimates the path and fills its buffer.
pub(super) fn not_sent_limit(piece: usize) -> u32 {
    u32::try_from(piece.min(LARGEST_PIECE / 2)).unwrap_or(u32::MAX)
}

pub(crate) const fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(PING_INTERVAL).with_interval(Duration::from_secs(5)).with_retries(3)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// A client that opens streams and resets each at once, and the end to which it has done so.
    async fn opened_and_reset(streams: u32, builder: &h2::server::Builder) -> Result<usize, h2::Error> {
        let mut bytes = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
        for stream in (1..).step_by(2).take(streams as usize) {
            // END_HEADERS; POST, https, /.
            bytes.extend(frame(1, 4, stream, &[0x83, 0x87, 0x84]));
            bytes.extend(frame(3, 0, stream, &8u32.to_be_bytes()));
        }
        let (mut near, far) = tokio::io::duplex(bytes.len());
        near.write_all(&bytes).await.unwrap();
        near.shutdown().await.unwrap();
        let mut link = builder.handshake::<_, Bytes>(far).await?;
        let mut accepted = 0;
        while let Some(stream) = link.accept().await {
            stream?;
            accepted += 1;
        }
        Ok(accepted)
    }

    #[tokio::test]
    async fn resets_are_bounded_and_those_of_a_stall_end_no_link() {
        let builder = admitting_builder(10);
        assert!(opened_and_reset(1000, &builder).await.is_ok(), "many have given up during a stall");
        let flood = opened_and_reset(10_000, &builder).await.unwrap_err();
        assert_eq!(flood.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM), "{flood}");
    }

    /// A server's end that has reset streams and forgotten them, and an agent whose data for each comes then.
    async fn reset_and_forgotten(streams: u32) -> Result<(), h2::Error> {
        // There is room for all resets, which the agent does not read.
        let (mut near, far) = tokio::io::duplex(8 << 20);
        let mut builder = client_builder();
        builder.reset_stream_duration(Duration::ZERO);
        let (mut send, link) = builder.handshake::<_, Bytes>(far).await?;
        let link = tokio::spawn(link);
        let mut bytes = frame(4, 0, 0, &[]);
        for stream in (1..).step_by(2).take(streams as usize) {
            drop(send.send_request(http::Request::new(()), true)?);
            tokio::task::yield_now().await;
            bytes.extend(frame(0, 0, stream, b"late"));
        }
        near.write_all(&bytes).await.unwrap();
        near.shutdown().await.unwrap();
        link.await.unwrap()
    }

    #[tokio::test]
    async fn late_data_is_bounded_and_that_of_a_stall_ends_no_link() {
        assert!(reset_and_forgotten(10_000).await.is_ok(), "many have given up during a stall");
        let flood = reset_and_forgotten(40_000).await.unwrap_err();
        assert_eq!(flood.reason(), Some(h2::Reason::ENHANCE_YOUR_CALM), "{flood}");
    }

    #[tokio::test]
    async fn the_other_end_is_told_how_many_streams_it_may_open() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let builder = admitting_builder(10);
        let link =
            tokio::spawn(async move { builder.handshake::<_, Bytes>(far).await?.accept().await.transpose() });
        let (send, connection) = client_builder().handshake::<_, Bytes>(near).await.unwrap();
        let driver = tokio::spawn(connection);
        let mut send = send.ready().await.unwrap();
        let (answer, _) = send.send_request(http::Request::new(()), true).unwrap();
        // The settings come before the request is accepted.
        drop((link.await.unwrap().unwrap(), answer.await));
        assert_eq!(send.current_max_send_streams(), (10 + REFUSALS) as usize);
        driver.abort();
    }

    #[test]
    fn a_window_leaves_room_for_another_where_little_may_be_held() {
        const MIB: usize = 1 << 20;
        for (budget, largest) in
            [(8 * MIB, 4), (64 * MIB / 6, 4), (128 * MIB / 6, 8), (32 * MIB, 16), (usize::MAX, 16)]
        {
            assert_eq!(largest_window_within(budget), largest << 20, "of {budget}");
        }
        assert!(largest_window() >= first_window());
    }
}

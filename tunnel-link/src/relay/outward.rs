//! Direction from the socket to the stream.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt as _;
use h2::{Reason, SendStream};
use http::{HeaderMap, HeaderValue};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;
use tokio::sync::SetOnce;
use tokio_util::io::poll_read_buf;

use super::error::{RelayError, Sent, Side};
use super::frame::{FrameError, HEADER_LEN, header};
use super::socket::lost;
use super::traffic::Traffic;
use super::{GRPC_STATUS, TARGET_RESET};
use crate::link::{Bulk, Flow, SEND_BUFFER};

/// Bytes read at a time while a connection is idle or exchanges small messages.
pub const SMALL_READ: usize = 4 << 10;
/// Length of a small read with its header, in bytes.
pub(super) const SMALL_SEGMENT: usize = HEADER_LEN + SMALL_READ;
/// Length of an HTTP/2 frame header (RFC 9113 section 4.1).
const FRAME_HEADER_LEN: usize = 9;
/// Limit on the bytes sent before the agent has connected. The agent holds them for each pending dial.
const EARLY_BYTES: usize = 64 << 10;
/// Minimum that a segment counts towards that limit: the bookkeeping of the agent's h2 for a frame.
const EARLY_SEGMENT: usize = 256;

/// Relays from the socket to the stream.
pub(super) struct Outward<'a> {
    pub(super) side: Side,
    pub(super) flow: &'a Flow,
    pub(super) traffic: &'a Traffic,
    pub(super) answer: &'a InwardProgress,
}

impl Outward<'_> {
    /// Runs until the socket's end of file has been relayed and the answer is complete, or until the peer, which has
    /// answered in full, resets the rest of the request with NO_ERROR (RFC 9113 section 8.1).
    pub(super) fn run(
        &self,
        socket: &mut ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        prefix: &mut Bytes,
    ) -> impl Future<Output = Result<Sent, RelayError>> {
        self.relay(socket, send, prefix).map(|ended| match ended {
            Ok(()) => Ok(Sent::All),
            Err(error) => error.unless_unwanted(),
        })
    }

    async fn relay(
        &self,
        socket: &mut ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        prefix: &mut Bytes,
    ) -> Result<(), RelayError> {
        let mut early = prefix.len();
        if !prefix.is_empty() {
            let mut segment = BytesMut::with_capacity(HEADER_LEN + prefix.len());
            segment.put_bytes(0, HEADER_LEN);
            // Freed here: the connection may last for days.
            segment.extend_from_slice(&std::mem::take(prefix));
            self.send_segment(socket, send, segment).await?;
        }
        let mut size = SMALL_READ;
        let mut bulk = Bulk::new(self.flow);
        loop {
            if early >= EARLY_BYTES {
                self.answer.begun.wait().await;
            }
            poll_fn(|cx| {
                if let Poll::Ready(reset) = send.poll_reset(cx) {
                    return Poll::Ready(Err(reset.map_or_else(RelayError::from, RelayError::Reset)));
                }
                socket.as_ref().poll_read_ready(cx).map_err(RelayError::Socket)
            })
            .await?;
            let room = self.room(socket, send, size).await?;
            let mut segment = BytesMut::with_capacity(HEADER_LEN + room);
            segment.put_bytes(0, HEADER_LEN);
            let read = match read_now(socket, &mut segment).await {
                Ok(Some(read)) => read,
                Ok(None) => {
                    send.reserve_capacity(0);
                    continue;
                }
                Err(error) => return Err(self.broken(send, error)),
            };
            if read == 0 {
                // A failed write has consumed the error; the read then looks like an end of file.
                if let Some(error) = self.answer.broken.get() {
                    return Err(self.broken(send, (*error).into()));
                }
                // Boxed: an open connection has not reached this point, but would reserve its memory.
                return Box::pin(self.end(socket, send)).await;
            }
            if room == size {
                size = paced(&mut bulk, self.flow, size, read);
            }
            early = early.saturating_add(read.max(EARLY_SEGMENT));
            self.send_segment(socket, send, segment).await?;
        }
    }

    /// Relays the end of file, then watches for a reset of either side until the answer is complete as well.
    async fn end(&self, socket: &ReadHalf<'_>, send: &mut SendStream<Bytes>) -> Result<(), RelayError> {
        let ended = match self.side {
            Side::Server => send.send_data(Bytes::new(), true),
            Side::Agent => send.send_trailers(status("0")),
        };
        if let Err(error) = ended {
            return Err(send_error(send, error).await);
        }
        self.answer.last.store(true, Ordering::Relaxed);
        tokio::select! {
            biased;
            _ = self.answer.ended.wait() => Ok(()),
            error = self.answer.broken.wait() => Err(RelayError::Socket((*error).into())),
            reset = poll_fn(|cx| send.poll_reset(cx)) => {
                // Everything was sent.
                reset.map_or_else(RelayError::from, RelayError::Reset).unless_unwanted().map(drop)
            }
            error = self.client_lost(socket.as_ref()) => Err(error),
        }
    }

    /// On the agent: data read before the target's reset must still arrive. The status follows it; dropping the stream
    /// sends both and then resets the rest of the request.
    fn broken(&self, send: &mut SendStream<Bytes>, error: io::Error) -> RelayError {
        if self.side == Side::Agent {
            // Fails only if the stream has been reset, which tells more.
            let _ = send.send_trailers(status(TARGET_RESET));
        }
        RelayError::Socket(error)
    }

    /// Waits until at least a small read can be sent whole, and returns how much of a read of `size` can. More than
    /// that would be held here, outside of any limit, while the other end's receiver does not read.
    async fn room(
        &self,
        socket: &ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        size: usize,
    ) -> Result<usize, RelayError> {
        let room = Room::new(self.flow);
        send.reserve_capacity(room.wanted(HEADER_LEN + size));
        while send.capacity() < room.wanted(SMALL_SEGMENT) {
            Box::pin(self.more_capacity(socket, send, 0)).await?;
        }
        Ok(room.of(send.capacity(), HEADER_LEN + size) - HEADER_LEN)
    }

    /// Waits for more capacity. `poll_capacity` reports only changes, so callers check the present capacity first.
    /// `held`: bytes read that wait for capacity. Box the future: otherwise open connections that nothing blocks
    /// reserve its memory.
    async fn more_capacity(
        &self,
        socket: &ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        held: usize,
    ) -> Result<(), RelayError> {
        let _wait = self.traffic.for_tunnel.begin(held);
        let changed = tokio::select! {
            biased;
            changed = poll_fn(|cx| send.poll_capacity(cx)) => changed,
            error = self.client_lost(socket.as_ref()) => return Err(error),
        };
        match changed {
            Some(capacity) => capacity.map(drop).map_err(RelayError::from),
            None => Err(stream_reset(send).await),
        }
    }

    async fn send_segment(
        &self,
        socket: &ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        mut segment: BytesMut,
    ) -> Result<(), RelayError> {
        let data = segment.len() - HEADER_LEN;
        let head = header(data).ok_or(RelayError::Frame(FrameError::Length))?;
        segment[..HEADER_LEN].copy_from_slice(&head);
        let mut rest = segment.freeze();
        send.reserve_capacity(rest.len());
        while !rest.is_empty() {
            let capacity = send.capacity();
            if capacity == 0 {
                Box::pin(self.more_capacity(socket, send, rest.len())).await?;
                continue;
            }
            if let Err(error) = send.send_data(rest.split_to(capacity.min(rest.len())), false) {
                return Err(send_error(send, error).await);
            }
        }
        self.traffic.count_from_socket(data);
        Ok(())
    }

    /// On the server: waits until the client's socket has failed (a reset, or keepalive), which nothing else notices
    /// while the socket is not read. Data that a departed client had sent is dropped. A target may close with a reset
    /// after its whole answer, so the agent keeps reading until the error arrives in order.
    async fn client_lost(&self, socket: &TcpStream) -> RelayError {
        match self.side {
            Side::Server => RelayError::Socket(lost(socket).await),
            Side::Agent => std::future::pending().await,
        }
    }
}

/// Limit on the bytes that h2 may queue for a stream: its share of the link's buffer.
#[derive(Clone, Copy)]
pub(super) struct Room {
    share: usize,
    /// Rest of h2's buffer. The bytes that h2 queues for a stream are its buffer minus the capacity that it grants. A
    /// receiver that has taken everything has announced at least half of its window, which is more than the buffer.
    others: usize,
}

impl Room {
    pub(super) fn new(flow: &Flow) -> Self {
        let share = flow.share();
        Self { share, others: SEND_BUFFER - share }
    }

    /// Returns the capacity at which this many bytes can be sent whole, or the stream's share of them.
    pub(super) fn wanted(self, bytes: usize) -> usize {
        self.others + bytes.min(self.share)
    }

    /// Returns how many of these bytes can be sent with `capacity`, which is at least [`Self::wanted`] for some of them.
    pub(super) fn of(self, capacity: usize, bytes: usize) -> usize {
        bytes.min(capacity - self.others)
    }
}

/// Progress of the inward direction: the answer.
#[derive(Debug, Default)]
pub(super) struct InwardProgress {
    pub(super) begun: SetOnce<()>,
    pub(super) ended: SetOnce<()>,
    /// On the agent: set when writing to the target has failed.
    pub(super) broken: SetOnce<io::ErrorKind>,
    /// Set by the outward direction once it is complete: the socket is closed when the answer is complete too.
    pub(super) last: AtomicBool,
}

/// The trailers of a stream.
pub fn status(status: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static(status))])
}

/// Reads the available bytes without waiting; `None` if the readiness was stale.
async fn read_now(socket: &mut ReadHalf<'_>, into: &mut BytesMut) -> io::Result<Option<usize>> {
    poll_fn(|cx| match poll_read_buf(Pin::new(&mut *socket), cx, into) {
        Poll::Ready(read) => Poll::Ready(read.map(Some)),
        Poll::Pending => Poll::Ready(Ok(None)),
    })
    .await
}

/// Returns the length of the largest segment in one `piece` of the link, with its header.
pub(super) fn largest_segment(piece: usize) -> usize {
    (piece - FRAME_HEADER_LEN).max(SMALL_SEGMENT)
}

/// Returns the size of the next read, in bytes: it grows fast while reads fill the buffer, up to one `piece` of the
/// link, and shrinks while they use little of it.
pub fn next_size(size: usize, read: usize, piece: usize) -> usize {
    let largest = largest_segment(piece) - HEADER_LEN;
    if read >= size || size > largest {
        largest.min(size * 4)
    } else if read < size / 8 && size / 2 >= SMALL_READ {
        size / 2
    } else {
        size
    }
}

/// Returns the size of the read after one of `size` that got `read` bytes, and counts the stream while it sends much: also
/// one that fills its reads, since a turn may be as short as a small read.
pub(super) fn paced(bulk: &mut Bulk<'_>, flow: &Flow, size: usize, read: usize) -> usize {
    let next = next_size(size, read, flow.turn());
    bulk.set(read >= size || next > SMALL_READ);
    next
}

/// Returns the cause of a failed send. h2 reports a stream that the peer has reset as misuse.
pub(super) async fn send_error(send: &mut SendStream<Bytes>, error: h2::Error) -> RelayError {
    if error.is_io() || error.is_go_away() || error.is_reset() {
        return RelayError::from(error);
    }
    stream_reset(send).await
}

/// Returns the cause of what `poll_capacity` reported as "no longer streaming": a reset, or the loss of the link.
pub(super) async fn stream_reset(send: &mut SendStream<Bytes>) -> RelayError {
    poll_fn(|cx| match send.poll_reset(cx) {
        Poll::Ready(reset) => Poll::Ready(reset.map_or_else(RelayError::from, RelayError::Reset)),
        Poll::Pending => Poll::Ready(RelayError::Reset(Reason::CANCEL)),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use h2::client::ResponseFuture;
    use http::Request;
    use tokio::net::TcpListener;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::link::{client_builder, server_builder};
    use crate::outcome::Outcome;
    use crate::relay::inward::discard;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Opens a stream to a peer that takes everything. The task owns the connection.
    async fn opened() -> (SendStream<Bytes>, ResponseFuture, JoinHandle<()>) {
        let (near, far) = tokio::io::duplex(1 << 20);
        tokio::spawn(async move {
            let mut connection = server_builder().handshake::<_, Bytes>(far).await.unwrap();
            let mut open = Vec::new();
            while let Some(Ok((request, respond))) = connection.accept().await {
                open.push(respond);
                tokio::spawn(async move { discard(&mut request.into_body()).await });
            }
        });
        let (send, connection) = client_builder().handshake::<_, Bytes>(near).await.unwrap();
        let owner = tokio::spawn(async move { drop(connection.await) });
        let mut send = send.ready().await.unwrap();
        let (response, stream) = send.send_request(Request::new(()), false).unwrap();
        (stream, response, owner)
    }

    /// Sends the prefix of a client that writes nothing more, until this is true.
    async fn send_until(mut prefix: Bytes, is_done: impl Fn(&Traffic) -> bool) {
        let (mut stream, _response, _owner) = opened().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut socket, _) = listener.accept().await.unwrap();
        let (mut read, _write) = socket.split();
        let (flow, traffic, answer) = (Flow::default(), Traffic::default(), InwardProgress::default());
        answer.begun.set(()).unwrap();
        let outward = Outward { side: Side::Server, flow: &flow, traffic: &traffic, answer: &answer };
        let done = async {
            while !is_done(&traffic) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            ended = outward.run(&mut read, &mut stream, &mut prefix) => panic!("{ended:?}"),
            done = tokio::time::timeout(PATIENCE, done) => done.expect("in time"),
        }
    }

    #[tokio::test]
    async fn what_was_read_before_is_freed_once_it_is_sent() {
        let held: Arc<[u8]> = Arc::from(vec![7u8; 4 << 10]);
        let prefix = Bytes::from_owner(held.clone());
        let freed = || Arc::strong_count(&held) == 1;
        send_until(prefix, |traffic| traffic.from_socket() == 4 << 10 && freed()).await;
    }

    #[tokio::test]
    async fn a_lost_link_is_no_reset_by_the_peer() {
        let (mut stream, _response, owner) = opened().await;
        owner.abort();
        assert!(owner.await.unwrap_err().is_cancelled());
        let error = stream_reset(&mut stream).await;
        assert_eq!(error.outcome(Side::Agent), Outcome::TunnelLost, "{error}");
    }

    #[test]
    fn every_stream_that_sends_much_counts_however_short_its_turn_is() {
        let flow = Flow::default();
        let mut streams: Vec<_> = (0..500).map(|_| (Bulk::new(&flow), SMALL_READ)).collect();
        for _ in 0..10 {
            for (bulk, size) in &mut streams {
                // It fills what it reads.
                *size = paced(bulk, &flow, *size, *size);
            }
        }
        assert_eq!(flow.bulk(), 500, "what may be queued is shared among these");
        let (bulk, size) = &mut streams[0];
        for _ in 0..3 {
            *size = paced(bulk, &flow, *size, 1);
        }
        assert_eq!(flow.bulk(), 499, "a keystroke is not much");
    }
}

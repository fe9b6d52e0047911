//! Carries a byte stream of this process on one HTTP/2 stream, for doors that speak the target's protocol themselves: HTTP,
//! or TLS. Whoever has the [`TunnelStream`] reads and writes it like a socket; [`PipeEnd::run`] does the carrying, on the
//! thread that owns the link.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use h2::{RecvStream, SendStream};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, ReadHalf, WriteHalf,
};
use tokio_util::sync::CancellationToken;

use super::error::{RelayError, Side};
use super::forward::Held;
use super::frame::{Deframer, FrameError, HEADER_LEN, header};
use super::inward::ended_well;
use super::outward::{send_error, stream_reset};
use super::stall::{Abort, StallBound};
use super::traffic::Traffic;
use crate::link::{Flow, SEND_BUFFER, Taken};
use crate::outcome::Outcome;

/// Bytes that wait in each direction between the two ends of a pipe.
const BUFFER: usize = 64 << 10;
/// Bytes that are sent at a time at least, once there is room for them.
const SMALL: usize = 4 << 10;
/// How long a target may take to close after its stream was ended and dropped here.
const LINGER: Duration = Duration::from_secs(5);

/// A stream to a target behind a tunnel. Dropping it before it was shut down resets the target's connection.
#[derive(Debug)]
pub struct TunnelStream {
    io: DuplexStream,
    shared: Arc<Shared>,
}

/// The end of the pipe that is carried.
#[derive(Debug)]
pub struct PipeEnd {
    io: DuplexStream,
    shared: Arc<Shared>,
}

/// Tells why a [`TunnelStream`] failed, wherever that is by then.
#[derive(Clone, Debug)]
pub struct PipeStatus(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    abort: Arc<Abort>,
    /// The other end was dropped after it had been shut down.
    left: CancellationToken,
    shut: std::sync::atomic::AtomicBool,
    failed: OnceLock<(Outcome, String)>,
}

/// What carrying needs besides the streams.
#[derive(Debug)]
pub struct Pipe<'a> {
    /// What is known about the link's path.
    pub flow: &'a Flow,
    /// The link's bound on receivers that do not read.
    pub stalls: &'a StallBound,
    /// Counts the bytes.
    pub traffic: &'a Traffic,
}

/// A stream, and the end that carries it.
pub fn pipe() -> (TunnelStream, PipeEnd) {
    let (near, far) = tokio::io::duplex(BUFFER);
    let shared = Arc::<Shared>::default();
    (TunnelStream { io: near, shared: shared.clone() }, PipeEnd { io: far, shared })
}

impl TunnelStream {
    pub fn status(&self) -> PipeStatus {
        PipeStatus(self.shared.clone())
    }
}

impl PipeStatus {
    /// How carrying failed, and why; `None` as long as it has not.
    pub fn failure(&self) -> Option<(Outcome, String)> {
        self.0.failed.get().cloned()
    }

    /// Ends the stream from outside.
    pub fn abort(&self, outcome: Outcome) {
        self.0.abort.trigger(outcome);
    }
}

impl Shared {
    fn error(&self) -> Option<io::Error> {
        let (_, reason) = self.failed.get()?;
        Some(io::Error::new(io::ErrorKind::ConnectionReset, reason.clone()))
    }
}

impl AsyncRead for TunnelStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        // A failure must not look like an end: an answer without a length would seem complete.
        if buf.filled().len() == before
            && buf.remaining() > 0
            && let Some(error) = self.shared.error()
        {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TunnelStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let written = std::task::ready!(Pin::new(&mut self.io).poll_write(cx, data));
        Poll::Ready(written.map_err(|error| self.shared.error().unwrap_or(error)))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.shut.store(true, std::sync::atomic::Ordering::Release);
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Drop for TunnelStream {
    fn drop(&mut self) {
        if self.shared.shut.load(std::sync::atomic::Ordering::Acquire) {
            self.shared.left.cancel();
        } else {
            self.shared.abort.trigger(Outcome::ClientReset);
        }
    }
}

impl PipeEnd {
    /// Carries both directions until they have ended. `over` ends it before, with its reason.
    pub async fn run(
        self,
        pipe: Pipe<'_>,
        send: &mut SendStream<Bytes>,
        mut stream: RecvStream,
        over: impl Future<Output = Outcome>,
    ) {
        let Self { io, shared } = self;
        let (mut read, mut write) = tokio::io::split(io);
        let both = async {
            tokio::try_join!(
                pipe.outward(&mut read, send),
                pipe.inward(&mut write, &mut stream, &shared.abort)
            )
        };
        let lingered = async {
            shared.left.cancelled().await;
            tokio::time::sleep(LINGER).await;
        };
        let ended = tokio::select! {
            biased;
            (outcome, reason) = shared.abort.triggered() => Err(RelayError::Aborted(outcome, reason)),
            ended = both => ended.map(|_| ()),
            // Who asked for an answer is told no more than this.
            outcome = over => Err(RelayError::Aborted(outcome, outcome.as_str())),
            () = lingered => Err(RelayError::Aborted(Outcome::Ok, "")),
        };
        if let Err(error) = ended {
            let outcome = error.outcome(Side::Server);
            // Set before the pipe ends, which shows it.
            let _ = shared.failed.set((outcome, error.to_string()));
            send.send_reset(outcome.reset_reason());
        }
    }
}

impl Pipe<'_> {
    async fn outward(
        &self,
        from: &mut ReadHalf<DuplexStream>,
        send: &mut SendStream<Bytes>,
    ) -> Result<(), RelayError> {
        loop {
            let room = self.room(send).await?;
            // One that is idle would keep it from all other streams: it is a part of the link's window, which has room for 8,191.
            send.reserve_capacity(0);
            let mut segment = BytesMut::with_capacity(HEADER_LEN + room);
            segment.put_bytes(0, HEADER_LEN);
            let mut limited = (&mut segment).limit(room);
            let read = tokio::select! {
                biased;
                reset = poll_fn(|cx| send.poll_reset(cx)) => {
                    return reset.map_or_else(RelayError::from, RelayError::Reset).unless_unwanted();
                }
                read = from.read_buf(&mut limited) => read.map_err(RelayError::Socket)?,
            };
            if read == 0 {
                return match send.send_data(Bytes::new(), true) {
                    Ok(()) => Ok(()),
                    Err(error) => send_error(send, error).await.unless_unwanted(),
                };
            }
            let head = header(read).ok_or(RelayError::Frame(FrameError::Length))?;
            segment[..HEADER_LEN].copy_from_slice(&head);
            if let Err(error) = send.send_data(segment.freeze(), false) {
                return send_error(send, error).await.unless_unwanted();
            }
            self.traffic.count_from_socket(read);
        }
    }

    /// Waits until a small segment, at least, can be sent whole, and returns how much data can.
    async fn room(&self, send: &mut SendStream<Bytes>) -> Result<usize, RelayError> {
        // What h2 queues for a stream is its buffer less the capacity that it gives.
        let share = self.flow.share();
        let queued = SEND_BUFFER - share;
        let least = HEADER_LEN + SMALL.min(share - HEADER_LEN);
        send.reserve_capacity(queued + share);
        while send.capacity() < queued + least {
            let _wait = self.traffic.for_tunnel.begin(0);
            match poll_fn(|cx| send.poll_capacity(cx)).await {
                Some(capacity) => capacity.map(drop)?,
                None => return Err(RelayError::Reset(stream_reset(send).await)),
            }
        }
        Ok((send.capacity() - queued).min(share) - HEADER_LEN)
    }

    async fn inward(
        &self,
        to: &mut WriteHalf<DuplexStream>,
        stream: &mut RecvStream,
        abort: &Arc<Abort>,
    ) -> Result<(), RelayError> {
        let (mut held, mut deframer, mut taken) = (Held::default(), Deframer::default(), Taken::default());
        while let Some(mut chunk) = held.receive(stream).await? {
            let length = chunk.len();
            while let Some(data) = deframer.next(&mut chunk)? {
                self.write(to, &data, &mut held, stream, abort).await?;
                self.traffic.count_to_socket(data.len());
            }
            taken.add(length, self.flow);
            stream.flow_control().release_capacity(length)?;
        }
        deframer.finish()?;
        ended_well(stream).await?;
        to.shutdown().await.map_err(RelayError::Socket)
    }

    /// Hands `data` on. While the reader takes nothing, what has come is held here, and counted.
    async fn write(
        &self,
        to: &mut WriteHalf<DuplexStream>,
        mut data: &[u8],
        held: &mut Held,
        stream: &mut RecvStream,
        abort: &Arc<Abort>,
    ) -> Result<(), RelayError> {
        let since = Instant::now();
        let mut ticket = None;
        while !data.is_empty() {
            let written = poll_fn(|cx| match Pin::new(&mut *to).poll_write(cx, data) {
                Poll::Ready(written) => Poll::Ready(written.map_err(RelayError::Socket)),
                Poll::Pending => {
                    if let Err(error) = held.gather(stream, cx) {
                        return Poll::Ready(Err(error.into()));
                    }
                    let bytes = stream.flow_control().used_capacity();
                    match &mut ticket {
                        None => {
                            let waiting = &self.traffic.for_socket;
                            ticket = Some(self.stalls.enter(abort, waiting, cx.waker(), bytes));
                        }
                        Some(ticket) => ticket.update(cx.waker(), bytes, || Some(since.elapsed())),
                    }
                    Poll::Pending
                }
            })
            .await?;
            if written == 0 {
                return Err(RelayError::Socket(io::ErrorKind::WriteZero.into()));
            }
            ticket = None;
            data = &data[written..];
        }
        Ok(())
    }
}

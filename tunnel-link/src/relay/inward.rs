//! Direction from the stream to the socket.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderValue;
use socket2::SockRef;
use tokio::io::AsyncWrite;
use tokio::net::tcp::WriteHalf;
use tunnel_runtime::text::printable;

use super::error::{RelayError, Side};
use super::frame::{Deframer, FrameError};
use super::outward::InwardProgress;
use super::parameters::Relay;
use super::{GRPC_STATUS, TARGET_RESET};
use crate::link::{Flow, Taken};
use crate::tcp_info::sent_nothing_for;

/// Pieces shorter than this (bytes) are copied together while the receiver is blocked: in h2 each takes about 250 bytes
/// of bookkeeping, and keeps alive the whole buffer that it was read into.
const SMALL_PIECE: usize = 16 << 10;
/// Bytes up to which small pieces are copied together. Flow control is returned for them as a whole.
const RUN: usize = 64 << 10;

/// Bytes received from the stream and not yet written, in order.
#[derive(Default)]
struct Inbox {
    deframer: Deframer,
    held: VecDeque<PendingWrite>,
    /// Flow control not yet returned, in bytes: for held data, and for data being written, which is freed as a whole.
    bytes: usize,
    /// Flow control to return to the sender for data already written, in bytes.
    owed: usize,
    taken: Taken,
    ended: bool,
}

/// Data that waits to be written.
pub(super) struct PendingWrite {
    pub(super) data: Data,
    /// Flow control to return after it is written, in bytes.
    owed: usize,
}

pub(super) enum Data {
    /// As read by h2.
    Piece(Bytes),
    /// Small pieces, copied together.
    Run(BytesMut),
}

impl std::ops::Deref for Data {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Piece(piece) => piece,
            Self::Run(run) => run,
        }
    }
}

impl From<Data> for Bytes {
    fn from(data: Data) -> Self {
        match data {
            Data::Piece(piece) => piece,
            Data::Run(run) => run.freeze(),
        }
    }
}

/// Adds data to that which is held. Data that will be written at once is not copied.
pub(super) fn hold(held: &mut VecDeque<PendingWrite>, data: Bytes, blocked: bool) {
    let small = data.len() < SMALL_PIECE;
    if small
        && let Some(PendingWrite { data: Data::Run(run), .. }) = held.back_mut()
        && run.len() + data.len() <= RUN
    {
        run.extend_from_slice(&data);
        return;
    }
    let copied = small && (blocked || !held.is_empty());
    let data = if copied { Data::Run(BytesMut::from(&data[..])) } else { Data::Piece(data) };
    held.push_back(PendingWrite { data, owed: 0 });
}

impl Inbox {
    /// Takes everything out of h2 while the socket is blocked, and notices a reset. Flow control is not returned, so
    /// that a window of one-byte writes takes one window of memory instead of twenty.
    fn gather(&mut self, stream: &mut RecvStream, cx: &mut Context<'_>) -> Result<(), RelayError> {
        while !self.ended {
            match stream.poll_data(cx) {
                Poll::Ready(Some(chunk)) => self.take(chunk?, true)?,
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    /// Returns flow control for `written` bytes.
    fn release(&mut self, written: usize, stream: &mut RecvStream, flow: &Flow) -> Result<(), RelayError> {
        let bytes = written + std::mem::take(&mut self.owed);
        self.bytes -= bytes;
        if bytes > 0 {
            self.taken.add(bytes, flow);
            stream.flow_control().release_capacity(bytes)?;
        }
        Ok(())
    }

    /// Takes one chunk.
    fn take(&mut self, mut chunk: Bytes, blocked: bool) -> Result<(), FrameError> {
        let owed = chunk.len();
        while let Some(data) = self.deframer.next(&mut chunk)? {
            hold(&mut self.held, data, blocked);
        }
        // A chunk may hold nothing but part of a header.
        let account = self.held.back_mut().map_or(&mut self.owed, |last| &mut last.owed);
        *account += owed;
        self.bytes += owed;
        Ok(())
    }
}

/// Relays from the stream to the socket.
pub(super) struct Inward<'a> {
    pub(super) relay: &'a Relay<'a>,
    pub(super) answer: &'a InwardProgress,
}

impl Inward<'_> {
    /// Runs until the stream's end has been relayed as a half-close, or the close of the socket is to relay it.
    pub(super) async fn run(
        &self,
        socket: &mut WriteHalf<'_>,
        stream: &mut RecvStream,
    ) -> Result<(), RelayError> {
        match self.relay(socket, stream).await {
            // The data that the target sent before its socket failed must still be read, and the other direction
            // reports the end. The rest of the request is discarded.
            Err(RelayError::Socket(error)) if self.relay.side == Side::Agent => {
                let _ = self.answer.broken.set(error.kind());
                discard(stream).await;
                std::future::pending().await
            }
            ended => ended,
        }
    }

    #[expect(clippy::manual_async_fn, reason = "an async fn's future has room for each argument twice")]
    fn relay(
        &self,
        socket: &mut WriteHalf<'_>,
        stream: &mut RecvStream,
    ) -> impl Future<Output = Result<(), RelayError>> {
        async move {
            self.relay.deliver(socket, stream, |socket| sent_nothing_for(socket.as_ref())).await?;
            if self.relay.side == Side::Server {
                ended_well(stream).await?;
            }
            if self.answer.last.load(Ordering::Relaxed) {
                return Ok(());
            }
            match SockRef::from(socket.as_ref()).shutdown(Shutdown::Write) {
                // The other direction reports the socket's error.
                Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(RelayError::Socket(error)),
                _ => Ok(()),
            }
        }
    }
}

impl Relay<'_> {
    /// Writes a stream's data, up to its end, to a socket or another kind of client. `idle` returns for how long `to`
    /// has sent nothing of the written data, if known.
    #[expect(clippy::manual_async_fn, reason = "as above")]
    pub(super) fn deliver<W: AsyncWrite + Unpin>(
        &self,
        to: &mut W,
        stream: &mut RecvStream,
        idle: impl Fn(&W) -> Option<Duration> + Copy,
    ) -> impl Future<Output = Result<(), RelayError>> {
        async move {
            let mut inbox = Inbox::default();
            loop {
                while let Some(next) = inbox.held.pop_front() {
                    let written = self.write_all(to, &next.data, &mut inbox, stream, idle).await;
                    if written.is_err() {
                        // The caller may discard the rest, for which the sender needs credit.
                        let _ = stream.flow_control().release_capacity(inbox.bytes);
                        return written;
                    }
                    inbox.release(next.owed, stream, self.flow)?;
                }
                inbox.release(0, stream, self.flow)?;
                if inbox.ended {
                    break;
                }
                let Some(chunk) = stream.data().await.transpose()? else { break };
                inbox.take(chunk, false)?;
            }
            Ok(inbox.deframer.finish()?)
        }
    }

    /// Writes all of `data`. While `to` is blocked, data from the stream is gathered and counts as held for it.
    #[expect(clippy::manual_async_fn, reason = "as above")]
    fn write_all<W: AsyncWrite + Unpin>(
        &self,
        to: &mut W,
        mut data: &[u8],
        inbox: &mut Inbox,
        stream: &mut RecvStream,
        idle: impl Fn(&W) -> Option<Duration> + Copy,
    ) -> impl Future<Output = Result<(), RelayError>> {
        async move {
            let mut ticket = None;
            loop {
                let written = poll_fn(|cx| {
                    // Flush after everything is written: TLS may hold some of it.
                    let step = if data.is_empty() {
                        Pin::new(&mut *to).poll_flush(cx).map_ok(|()| 0)
                    } else {
                        Pin::new(&mut *to).poll_write(cx, data)
                    };
                    if let Poll::Ready(written) = step {
                        ticket = None;
                        return Poll::Ready(written.map_err(RelayError::Socket));
                    }
                    if let Err(error) = inbox.gather(stream, cx) {
                        return Poll::Ready(Err(error));
                    }
                    match &mut ticket {
                        None => {
                            let waiting = &self.traffic.for_socket;
                            ticket = Some(self.stalls.enter(self.abort, waiting, cx.waker(), inbox.bytes));
                        }
                        Some(ticket) => ticket.update(cx.waker(), inbox.bytes, || idle(to)),
                    }
                    Poll::Pending
                })
                .await?;
                if data.is_empty() {
                    return Ok(());
                }
                if written == 0 {
                    return Err(RelayError::Socket(io::ErrorKind::WriteZero.into()));
                }
                data = &data[written..];
                self.traffic.count_to_socket(written);
            }
        }
    }
}

/// Takes the rest of a stream that nobody wants.
pub(super) async fn discard(stream: &mut RecvStream) {
    while let Some(Ok(chunk)) = stream.data().await {
        if stream.flow_control().release_capacity(chunk.len()).is_err() {
            break;
        }
    }
}

/// Checks the trailers of a stream whose data has ended: the target may have reset the connection after the data.
pub(super) async fn ended_well(stream: &mut RecvStream) -> Result<(), RelayError> {
    let trailers = stream.trailers().await?.unwrap_or_default();
    well(trailers.get(GRPC_STATUS))
}

/// Checks the status in the trailers of a stream.
pub(super) fn well(status: Option<&HeaderValue>) -> Result<(), RelayError> {
    match status {
        Some(status) if status == "0" => Ok(()),
        Some(status) if status == TARGET_RESET => Err(RelayError::TargetReset),
        Some(status) => Err(RelayError::Status(printable(&format!("grpc-status {status:?}"), 32))),
        None => Err(RelayError::Status("no grpc-status".to_owned())),
    }
}

//! The byte pump between one TCP socket and one HTTP/2 stream.
//!
//! One task pumps both directions. An idle connection holds no buffer: one is taken only when the socket has bytes,
//! and its size follows what the last reads brought. Flow control is returned to the sender only for bytes that the
//! socket has taken, so a receiver that does not read stops its own stream and nothing else.

use std::future::{Future, poll_fn};
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use prometheus_client::metrics::counter::Counter;
use socket2::SockRef;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio_util::io::poll_read_buf;

use super::frame::{Deframer, FrameError, HEADER_LEN, header};
use super::stall::{Abort, StallBound};
use crate::outcome::Outcome;

/// A connection that is idle, or exchanges small messages, reads this much at once.
const SMALL_READ: usize = 4 << 10;
/// A busy one reads up to this much.
const LARGE_READ: usize = 256 << 10;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Which end of the tunnel pumps: it decides what a broken socket is called, and who sends gRPC trailers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The tunnel-server: the socket belongs to the caller, and the gRPC call is ours.
    Server,
    /// The tunnel-agent: the socket belongs to the target, and the gRPC call is answered by us.
    Agent,
}

/// Bytes of one connection so far, and of whatever it is a part of. Readers may look while it runs.
#[derive(Debug, Default)]
pub struct Traffic {
    from_socket: AtomicU64,
    to_socket: AtomicU64,
    parts_of: Vec<Totals>,
}

/// Bytes of many connections, counted as they pass.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Read from the sockets and handed to the tunnel.
    pub from_socket: Counter,
    /// Taken from the tunnel and written to the sockets.
    pub to_socket: Counter,
}

impl Traffic {
    /// Counts into `parts_of` as well.
    pub fn part_of(parts_of: Vec<Totals>) -> Self {
        Self { parts_of, ..Self::default() }
    }

    /// Bytes read from the socket and handed to the tunnel.
    pub fn from_socket(&self) -> u64 {
        self.from_socket.load(Ordering::Relaxed)
    }

    /// Bytes taken from the tunnel and written to the socket.
    pub fn to_socket(&self) -> u64 {
        self.to_socket.load(Ordering::Relaxed)
    }

    fn count_from_socket(&self, bytes: usize) {
        self.from_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for totals in &self.parts_of {
            totals.from_socket.inc_by(bytes as u64);
        }
    }

    fn count_to_socket(&self, bytes: usize) {
        self.to_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for totals in &self.parts_of {
            totals.to_socket.inc_by(bytes as u64);
        }
    }
}

/// Why a carried connection did not end well.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The socket on this end failed.
    #[error("{0}")]
    Socket(#[source] io::Error),
    /// The other end reset the stream.
    #[error("the other end of the tunnel reset the stream ({0})")]
    Reset(Reason),
    /// The whole link failed.
    #[error("tunnel lost: {}", crate::link::reason(.0))]
    Link(#[source] h2::Error),
    /// What came through the stream are not segments.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The stream ended without `grpc-status: 0`, so what came may not be all.
    #[error("the agent ended the stream with {0}")]
    Status(String),
    /// The agent could not connect to the target, or was not asked.
    #[error("{1}")]
    Dial(Outcome, String),
    /// Ended on purpose from this end.
    #[error("ended by this end: {0}")]
    Aborted(Outcome),
}

impl Broken {
    /// The outcome, as seen from `side`.
    pub const fn outcome(&self, side: Side) -> Outcome {
        let (own, other) = match side {
            Side::Server => (Outcome::ClientReset, Outcome::TargetReset),
            Side::Agent => (Outcome::TargetReset, Outcome::ClientReset),
        };
        match self {
            Self::Socket(_) => own,
            Self::Reset(Reason::ENHANCE_YOUR_CALM) => Outcome::Stalled,
            Self::Reset(Reason::CONNECT_ERROR) => other,
            Self::Reset(Reason::PROTOCOL_ERROR) | Self::Frame(_) | Self::Status(_) => Outcome::Protocol,
            // An agent that stops, or a server that does, cancels what it carries.
            Self::Reset(_) => match side {
                Side::Server => Outcome::TunnelLost,
                Side::Agent => Outcome::ClientReset,
            },
            Self::Link(_) => Outcome::TunnelLost,
            Self::Dial(outcome, _) | Self::Aborted(outcome) => *outcome,
        }
    }
}

impl From<h2::Error> for Broken {
    fn from(error: h2::Error) -> Self {
        match error.reason() {
            Some(reason) if error.is_reset() => Self::Reset(reason),
            _ => Self::Link(error),
        }
    }
}

/// What a carried connection needs beside its socket and its stream.
#[derive(Debug)]
pub struct Carriage<'a> {
    /// Which end this is.
    pub side: Side,
    /// The link's bound on receivers that do not read.
    pub stalls: &'a StallBound,
    /// Ends this connection from outside.
    pub abort: &'a Arc<Abort>,
    /// Counts the bytes.
    pub traffic: &'a Traffic,
}

impl Carriage<'_> {
    /// Pumps both ways until both directions ended. `inbound` gives the receiving half: at once on the agent, and once
    /// the agent has connected on the server; the caller's first bytes travel meanwhile. `prefix` is what was already
    /// read from the socket.
    ///
    /// # Errors
    /// Whatever ended the connection early. The stream is then reset, and the socket will send a TCP RST when it is
    /// dropped: a failure never looks like an end of stream, on neither side.
    pub async fn run(
        self,
        socket: &mut TcpStream,
        prefix: Bytes,
        send: &mut SendStream<Bytes>,
        inbound: impl Future<Output = Result<RecvStream, Broken>>,
    ) -> Result<(), Broken> {
        // Armed first: a task that is cancelled, or a process that is killed, must not look like an end of file either.
        reset_on_drop(socket);
        let ended = {
            let (read, write) = socket.split();
            let out = self.pump_out(read, send, prefix);
            let back = async { self.pump_in(write, inbound.await?).await };
            tokio::select! {
                biased;
                outcome = self.abort.triggered() => Err(Broken::Aborted(outcome)),
                ended = async { tokio::try_join!(out, back) } => match ended {
                    Ok((Sent::All, ())) => Ok(()),
                    Ok((Sent::Unwanted, ())) => Err(Broken::Reset(Reason::NO_ERROR)),
                    Err(broken) => Err(broken),
                },
            }
        };
        match &ended {
            Ok(()) => end_on_drop(socket),
            Err(broken) => send.send_reset(broken.outcome(self.side).reset_reason()),
        }
        ended
    }

    /// Socket to stream, until the socket's end of file has been passed on, or the answer is whole without it.
    async fn pump_out(
        &self,
        mut socket: ReadHalf<'_>,
        send: &mut SendStream<Bytes>,
        prefix: Bytes,
    ) -> Result<Sent, Broken> {
        if !prefix.is_empty() {
            let mut segment = BytesMut::with_capacity(HEADER_LEN + prefix.len());
            segment.put_bytes(0, HEADER_LEN);
            segment.extend_from_slice(&prefix);
            if let Some(sent) = unwanted(self.send_segment(send, segment).await)? {
                return Ok(sent);
            }
        }
        let mut size = SMALL_READ;
        loop {
            let readable = poll_fn(|cx| {
                if let Poll::Ready(reset) = send.poll_reset(cx) {
                    return Poll::Ready(Err(reset.map_or_else(Broken::from, Broken::Reset)));
                }
                socket.as_ref().poll_read_ready(cx).map_err(Broken::Socket)
            });
            if let Some(sent) = unwanted(readable.await)? {
                return Ok(sent);
            }
            let mut segment = BytesMut::with_capacity(HEADER_LEN + size);
            segment.put_bytes(0, HEADER_LEN);
            let Some(read) = read_now(&mut socket, &mut segment).await.map_err(Broken::Socket)? else {
                continue;
            };
            if read == 0 {
                let status = (GRPC_STATUS, HeaderValue::from_static("0"));
                let ended = match self.side {
                    Side::Server => send.send_data(Bytes::new(), true),
                    Side::Agent => send.send_trailers(HeaderMap::from_iter([status])),
                };
                return match ended {
                    Ok(()) => Ok(Sent::All),
                    Err(error) => match send_error(send, error).await {
                        Broken::Reset(Reason::NO_ERROR) => Ok(Sent::Unwanted),
                        broken => Err(broken),
                    },
                };
            }
            size = next_size(size, read);
            if let Some(sent) = unwanted(self.send_segment(send, segment).await)? {
                return Ok(sent);
            }
        }
    }

    async fn send_segment(&self, send: &mut SendStream<Bytes>, mut segment: BytesMut) -> Result<(), Broken> {
        let data = segment.len() - HEADER_LEN;
        let head = header(data).ok_or(Broken::Frame(FrameError::Length))?;
        segment[..HEADER_LEN].copy_from_slice(&head);
        let mut rest = segment.freeze();
        send.reserve_capacity(rest.len());
        while !rest.is_empty() {
            // `poll_capacity` tells changes only: what is there already must be asked for first.
            let capacity = send.capacity();
            if capacity == 0 {
                match poll_fn(|cx| send.poll_capacity(cx)).await {
                    Some(capacity) => capacity?,
                    None => return Err(Broken::Reset(stream_reset(send).await)),
                };
                continue;
            }
            if let Err(error) = send.send_data(rest.split_to(capacity.min(rest.len())), false) {
                return Err(send_error(send, error).await);
            }
        }
        self.traffic.count_from_socket(data);
        Ok(())
    }

    /// Stream to socket, until the stream's end has been passed on as a half-close.
    async fn pump_in(&self, mut socket: WriteHalf<'_>, mut stream: RecvStream) -> Result<(), Broken> {
        let mut deframer = Deframer::default();
        while let Some(chunk) = stream.data().await {
            let mut chunk = chunk?;
            let held = chunk.len();
            while let Some(data) = deframer.next(&mut chunk)? {
                self.write_all(&mut socket, &data).await.map_err(Broken::Socket)?;
            }
            stream.flow_control().release_capacity(held)?;
        }
        deframer.finish()?;
        if self.side == Side::Server {
            let trailers = stream.trailers().await?.unwrap_or_default();
            match trailers.get(GRPC_STATUS) {
                Some(status) if status == "0" => {}
                Some(status) => return Err(Broken::Status(format!("grpc-status {status:?}"))),
                None => return Err(Broken::Status("no grpc-status".to_owned())),
            }
        }
        match SockRef::from(socket.as_ref()).shutdown(Shutdown::Write) {
            // The other direction finds out what happened to the socket.
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(Broken::Socket(error)),
            _ => Ok(()),
        }
    }

    async fn write_all(&self, socket: &mut WriteHalf<'_>, mut data: &[u8]) -> io::Result<()> {
        let mut ticket = None;
        while !data.is_empty() {
            let written = poll_fn(|cx| {
                let written = Pin::new(&mut *socket).poll_write(cx, data);
                match written {
                    Poll::Ready(_) => ticket = None,
                    Poll::Pending if ticket.is_none() => ticket = Some(self.stalls.enter(self.abort)),
                    Poll::Pending => {}
                }
                written
            })
            .await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            data = &data[written..];
            self.traffic.count_to_socket(written);
        }
        Ok(())
    }
}

/// What became of the outward direction.
enum Sent {
    /// Everything up to the socket's end of file.
    All,
    /// The answer was whole without it: only the answer says what that means, for example that the dial failed.
    Unwanted,
}

/// A peer that has answered in full may reset the rest of the request with NO_ERROR (RFC 9113 §8.1).
fn unwanted(step: Result<(), Broken>) -> Result<Option<Sent>, Broken> {
    match step {
        Ok(()) => Ok(None),
        Err(Broken::Reset(Reason::NO_ERROR)) => Ok(Some(Sent::Unwanted)),
        Err(broken) => Err(broken),
    }
}

/// Reads what is there without waiting; `None` when the readiness was stale.
async fn read_now(socket: &mut ReadHalf<'_>, into: &mut BytesMut) -> io::Result<Option<usize>> {
    poll_fn(|cx| match poll_read_buf(Pin::new(&mut *socket), cx, into) {
        Poll::Ready(read) => Poll::Ready(read.map(Some)),
        Poll::Pending => Poll::Ready(Ok(None)),
    })
    .await
}

/// Grows fast while reads fill the buffer, shrinks when they use little of it.
const fn next_size(size: usize, read: usize) -> usize {
    if read >= size {
        if size * 4 < LARGE_READ { size * 4 } else { LARGE_READ }
    } else if read < size / 8 && size / 2 >= SMALL_READ {
        size / 2
    } else {
        size
    }
}

/// What stopped a send: h2 reports a stream that the peer has reset as misuse.
async fn send_error(send: &mut SendStream<Bytes>, error: h2::Error) -> Broken {
    if error.is_io() || error.is_go_away() || error.is_reset() {
        return Broken::from(error);
    }
    Broken::Reset(stream_reset(send).await)
}

/// The reason of a reset that `poll_capacity` reported as "no longer streaming".
async fn stream_reset(send: &mut SendStream<Bytes>) -> Reason {
    poll_fn(|cx| match send.poll_reset(cx) {
        Poll::Ready(reason) => Poll::Ready(reason.unwrap_or(Reason::CANCEL)),
        Poll::Pending => Poll::Ready(Reason::CANCEL),
    })
    .await
}

/// Makes the socket's close a TCP RST, so that its peer cannot mistake a failure for an end of file.
pub fn reset_on_drop(socket: &TcpStream) {
    linger(socket, Some(Duration::ZERO));
}

/// Takes [`reset_on_drop`] back: the socket's close is an end of file.
pub fn end_on_drop(socket: &TcpStream) {
    linger(socket, None);
}

fn linger(socket: &TcpStream, time: Option<Duration>) {
    if let Err(error) = SockRef::from(socket).set_linger(time) {
        tracing::debug!(%error, "cannot say how the socket shall close");
    }
}

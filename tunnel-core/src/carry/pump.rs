//! The byte pump between one TCP socket and one HTTP/2 stream.
//!
//! One task pumps both directions. An idle connection holds no buffer: one is taken only when the socket has bytes,
//! and its size follows what the last reads brought. Flow control is returned to the sender only for bytes that the
//! socket has taken, so a receiver that does not read stops its own stream and nothing else.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use prometheus_client::metrics::counter::Counter;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::frame::FrameError;
use super::outward::Sent;
use super::stall::{Abort, StallBound};
use crate::outcome::Outcome;

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

    pub(super) fn count_from_socket(&self, bytes: usize) {
        self.from_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for totals in &self.parts_of {
            totals.from_socket.inc_by(bytes as u64);
        }
    }

    pub(super) fn count_to_socket(&self, bytes: usize) {
        self.to_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for totals in &self.parts_of {
            totals.to_socket.inc_by(bytes as u64);
        }
    }
}

/// Why a carried connection did not end well.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
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

impl RelayError {
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

impl From<h2::Error> for RelayError {
    fn from(error: h2::Error) -> Self {
        match error.reason() {
            Some(reason) if error.is_reset() => Self::Reset(reason),
            _ => Self::Link(error),
        }
    }
}

/// What a carried connection needs beside its socket and its stream.
#[derive(Debug)]
pub struct Relay<'a> {
    /// Which end this is.
    pub side: Side,
    /// The link's bound on receivers that do not read.
    pub stalls: &'a StallBound,
    /// Ends this connection from outside.
    pub abort: &'a Arc<Abort>,
    /// Counts the bytes.
    pub traffic: &'a Traffic,
}

impl Relay<'_> {
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
        inbound: impl Future<Output = Result<RecvStream, RelayError>>,
    ) -> Result<(), RelayError> {
        // Armed first: a task that is cancelled, or a process that is killed, must not look like an end of file either.
        reset_on_drop(socket);
        let ended = {
            let (read, write) = socket.split();
            let answer = Answer::default();
            tokio::select! {
                biased;
                outcome = self.abort.triggered() => Err(RelayError::Aborted(outcome)),
                // Built where they are polled: a future that is moved has its room twice, for as long as all lasts.
                ended = async {
                    tokio::try_join!(self.outward(read, send, prefix, &answer), async {
                        let stream = inbound.await?;
                        answer.began();
                        self.inward(write, stream).await?;
                        answer.ended();
                        Ok(())
                    })
                } => match ended {
                    Ok((Sent::All, ())) => Ok(()),
                    Ok((Sent::Unwanted, ())) => Err(RelayError::Reset(Reason::NO_ERROR)),
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
}

/// What the outward direction has to know of the other one.
#[derive(Debug, Default)]
pub(super) struct Answer {
    begun: AtomicBool,
    begins: Notify,
    ends: Notify,
}

impl Answer {
    fn began(&self) {
        self.begun.store(true, Ordering::Relaxed);
        self.begins.notify_one();
    }

    fn ended(&self) {
        self.ends.notify_one();
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    pub(super) async fn begins(&self) {
        self.begins.notified().await;
    }

    pub(super) async fn ends(&self) {
        self.ends.notified().await;
    }
}

/// Makes the socket's close a TCP RST, so that its peer cannot mistake a failure for an end of file.
pub fn reset_on_drop(socket: &impl AsFd) {
    linger(socket, Some(Duration::ZERO));
}

/// Takes [`reset_on_drop`] back: the socket's close is an end of file.
pub fn end_on_drop(socket: &TcpStream) {
    linger(socket, None);
}

fn linger(socket: &impl AsFd, time: Option<Duration>) {
    if let Err(error) = SockRef::from(socket).set_linger(time) {
        tracing::debug!(%error, "cannot say how the socket shall close");
    }
}

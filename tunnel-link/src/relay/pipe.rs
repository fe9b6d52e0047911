//! Relays a byte stream of this process on one HTTP/2 stream: to a target, for listeners that speak its protocol
//! themselves, HTTP or TLS; and from a client whose bytes come on such a stream. The owner of the [`TunnelStream`] reads
//! and writes it like a socket; [`PipeEnd::run`] relays, on the thread that owns the link.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, ReadHalf};
use tokio::net::TcpStream;
use tokio::sync::SetOnce;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::copy::copy;
use super::error::{RelayError, Side};
use super::parameters::Relay;
use super::stall::{Abort, StallBound};
use super::traffic::Traffic;
use crate::link::Flow;
use crate::outcome::Outcome;

/// Bytes buffered in each direction between the two ends of a pipe.
const BUFFER: usize = 64 << 10;
/// Maximum time for the other end to close after its stream was shut down and dropped here, and for a client to read what
/// was written before a reset.
const LINGER: Duration = Duration::from_secs(5);
/// Maximum time for a client to read what was written before the stream was shut down and dropped: 64 KiB.
const LAST_BYTES: Duration = Duration::from_secs(60);

/// A stream to a target or to a client behind a tunnel. Dropping it before shutdown resets its connection; a client first
/// gets what was written.
#[derive(Debug)]
pub struct TunnelStream {
    io: DuplexStream,
    shared: Arc<Shared>,
}

/// The end of the pipe that is relayed.
#[derive(Debug)]
pub struct PipeEnd {
    io: DuplexStream,
    shared: Arc<Shared>,
}

/// Reports why a [`TunnelStream`] failed, independent of the stream's owner.
#[derive(Clone, Debug)]
pub struct PipeStatus(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// As [`Side`] says it of sockets: the agent's end has a target, and here that is this process.
    side: Side,
    abort: Arc<Abort>,
    /// Cancelled when the other end was dropped, which resets a target at once unless it was shut down.
    left: CancellationToken,
    /// Cancelled when everything was read that the other end had written before its shutdown.
    drained: CancellationToken,
    /// True if a drop is an end of file: after a shutdown.
    ends_well: AtomicBool,
    failed: SetOnce<(Outcome, String)>,
}

/// Parameters for relaying a pipe, besides the streams.
#[derive(Debug)]
pub struct Pipe<'a> {
    /// Path estimates of the link.
    pub flow: &'a Flow,
    /// The link's limit on receivers that do not read.
    pub stalls: &'a StallBound,
    /// Counts the bytes.
    pub traffic: &'a Traffic,
}

/// Creates a stream to a target, and the end that is relayed.
pub fn pipe() -> (TunnelStream, PipeEnd) {
    pipe_on(Side::Server)
}

/// The same for a client: this process is its target.
pub fn pipe_of_client() -> (TunnelStream, PipeEnd) {
    pipe_on(Side::Agent)
}

fn pipe_on(side: Side) -> (TunnelStream, PipeEnd) {
    let (near, far) = tokio::io::duplex(BUFFER);
    let shared = Arc::new(Shared {
        side,
        abort: Arc::default(),
        left: CancellationToken::new(),
        drained: CancellationToken::new(),
        ends_well: AtomicBool::new(false),
        failed: SetOnce::new(),
    });
    (TunnelStream { io: near, shared: shared.clone() }, PipeEnd { io: far, shared })
}

impl TunnelStream {
    pub fn status(&self) -> PipeStatus {
        PipeStatus(self.shared.clone())
    }
}

impl PipeStatus {
    /// Returns the outcome and the reason of a failure; `None` while there is none.
    pub fn failure(&self) -> Option<(Outcome, String)> {
        self.0.failed.get().cloned()
    }

    /// Waits for a failure.
    pub async fn failed(&self) -> &(Outcome, String) {
        self.0.failed.wait().await
    }

    /// Ends the stream from outside.
    pub fn abort(&self, outcome: Outcome) {
        self.0.abort.trigger(outcome);
    }

    /// Makes dropping the stream an end of file.
    pub fn end_on_drop(&self) {
        self.0.ends_well.store(true, Ordering::Release);
    }

    /// Makes dropping the stream a reset, as it is at first.
    pub fn reset_on_drop(&self) {
        self.0.ends_well.store(false, Ordering::Release);
    }
}

impl Shared {
    /// Relays to the end, which `over` or the owner of the [`TunnelStream`] may bring about, and notes a failure.
    async fn relay(
        &self,
        relaying: impl Future<Output = Result<(), (Outcome, String)>>,
        over: impl Future<Output = Outcome>,
    ) {
        let mut relaying = std::pin::pin!(relaying);
        let lingered = async {
            self.left.cancelled().await;
            if self.side == Side::Agent && self.ends_well() {
                // Slowly or not at all: nothing counts what it holds by now.
                let _ = timeout(LAST_BYTES, self.drained.cancelled()).await;
            }
            tokio::time::sleep(LINGER).await;
        };
        let ended = tokio::select! {
            biased;
            ended = &mut relaying => ended,
            outcome = over => {
                // The requester is told nothing more than this.
                self.abort.trigger_for(outcome, outcome.as_str());
                relaying.await
            }
            () = lingered => {
                self.abort.trigger(if self.ends_well() { Outcome::Ok } else { Outcome::TargetReset });
                relaying.await
            }
        };
        if let Err(failed) = ended {
            // Set it before the pipe ends, because the reader then looks for it.
            let _ = self.failed.set(failed);
        }
    }

    fn ends_well(&self) -> bool {
        self.ends_well.load(Ordering::Acquire)
    }

    fn error(&self) -> Option<io::Error> {
        let (_, reason) = self.failed.get()?;
        Some(io::Error::new(io::ErrorKind::ConnectionReset, reason.clone()))
    }
}

/// Reads, and returns true at the end of file.
fn poll_end(
    io: &mut (impl AsyncRead + Unpin),
    cx: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
) -> Poll<io::Result<bool>> {
    let before = buf.filled().len();
    std::task::ready!(Pin::new(io).poll_read(cx, buf))?;
    Poll::Ready(Ok(buf.filled().len() == before && buf.remaining() > 0))
}

impl AsyncRead for TunnelStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let ended = std::task::ready!(poll_end(&mut self.io, cx, buf))?;
        // A failure must not look like an end of file: an answer without a length would seem complete.
        if ended && let Some(error) = self.shared.error() {
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
        self.status().end_on_drop();
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Drop for TunnelStream {
    fn drop(&mut self) {
        if self.shared.ends_well() || self.shared.side == Side::Agent {
            self.shared.left.cancel();
        } else {
            self.shared.abort.trigger(Outcome::ClientReset);
        }
    }
}

/// Data for a [`TunnelStream`].
struct Written<'a> {
    io: ReadHalf<DuplexStream>,
    shared: &'a Shared,
}

impl AsyncRead for Written<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if std::task::ready!(poll_end(&mut self.io, cx, buf))? {
            // The other end was dropped. Its abort may be seen only later.
            if !self.shared.ends_well() {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            self.shared.drained.cancel();
        }
        Poll::Ready(Ok(()))
    }
}

impl PipeEnd {
    /// Relays both directions until they have ended. `over` ends it early, with its outcome.
    pub async fn run(
        self,
        Pipe { flow, stalls, traffic }: Pipe<'_>,
        send: &mut SendStream<Bytes>,
        stream: RecvStream,
        over: impl Future<Output = Outcome>,
    ) {
        let Self { io, shared } = self;
        let (io, mut write) = tokio::io::split(io);
        let (mut read, side) = (Written { io, shared: &shared }, shared.side);
        let relay = Relay { side, flow, stalls, abort: &shared.abort, traffic };
        let pumping = async {
            let ended = relay.pump(&mut read, &mut write, send, stream).await;
            if let (Side::Agent, Err(RelayError::Socket(_))) = (side, &ended) {
                // The status follows everything else, and a client that does not read does not get that far.
                let told = timeout(LINGER, poll_fn(|cx| send.poll_reset(cx))).await;
                if told.is_err() {
                    send.send_reset(Outcome::TargetReset.reset_reason());
                }
            }
            ended.map_err(|error| (error.outcome(side), error.to_string()))
        };
        shared.relay(pumping, over).await;
    }

    /// Does the same for a target that this process has dialled.
    pub async fn run_to_socket(
        self,
        target: &mut TcpStream,
        traffic: &Traffic,
        over: impl Future<Output = Outcome>,
    ) {
        let Self { io, shared } = self;
        let (io, mut write) = tokio::io::split(io);
        let mut read = Written { io, shared: &shared };
        let copying = async {
            tokio::select! {
                biased;
                (outcome, reason) = shared.abort.triggered() => Err((outcome, reason.to_owned())),
                ended = copy(target, &mut read, &mut write, traffic, Side::Server) => ended,
            }
        };
        shared.relay(copying, over).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, split};

    use super::*;

    #[tokio::test]
    async fn only_a_shutdown_is_read_as_an_end_of_file() {
        for made in [pipe, pipe_of_client] {
            for shut_down in [false, true] {
                let (mut near, PipeEnd { io, shared }) = made();
                near.write_all(b"x").await.unwrap();
                if shut_down {
                    near.shutdown().await.unwrap();
                }
                drop(near);
                let (io, _write) = split(io);
                let mut read = Written { io, shared: &shared };
                let ended = read.read_to_end(&mut Vec::new()).await;
                assert_eq!(ended.is_ok(), shut_down, "{:?}: {ended:?}", shared.side);
            }
        }
    }
}

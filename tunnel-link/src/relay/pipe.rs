//! Relays a byte stream of this process on one HTTP/2 stream, for listeners that speak the target's protocol
//! themselves: HTTP or TLS. The owner of the [`TunnelStream`] reads and writes it like a socket; [`PipeEnd::run`]
//! relays, on the thread that owns the link.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::copy::{CopyError, copy};
use super::error::Side;
use super::pump::Pump;
use super::socket::end_on_drop;
use super::stall::{Abort, StallBound};
use super::traffic::Traffic;
use crate::link::Flow;
use crate::outcome::Outcome;

/// Bytes buffered in each direction between the two ends of a pipe.
const BUFFER: usize = 64 << 10;
/// Maximum time for a target to close after its stream was shut down and dropped here.
const LINGER: Duration = Duration::from_secs(5);

/// A stream to a target behind a tunnel. Dropping it before shutdown resets the target's connection.
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

#[derive(Debug, Default)]
struct Shared {
    abort: Arc<Abort>,
    /// Cancelled when the other end was dropped after its shutdown.
    left: CancellationToken,
    shut: std::sync::atomic::AtomicBool,
    failed: OnceLock<(Outcome, String)>,
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

/// Creates a stream and the end that is relayed.
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
    /// Returns the outcome and the reason of a failure; `None` while there is none.
    pub fn failure(&self) -> Option<(Outcome, String)> {
        self.0.failed.get().cloned()
    }

    /// Ends the stream from outside.
    pub fn abort(&self, outcome: Outcome) {
        self.0.abort.trigger(outcome);
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
                self.abort.trigger(Outcome::Ok);
                relaying.await
            }
        };
        if let Err(failed) = ended {
            // Set it before the pipe ends, because the reader then looks for it.
            let _ = self.failed.set(failed);
        }
    }

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
        // A failure must not look like an end of file: an answer without a length would seem complete.
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
    /// Relays both directions until they have ended. `over` ends it early, with its outcome.
    pub async fn run(
        self,
        Pipe { flow, stalls, traffic }: Pipe<'_>,
        send: &mut SendStream<Bytes>,
        stream: RecvStream,
        over: impl Future<Output = Outcome>,
    ) {
        let Self { io, shared } = self;
        let (mut read, mut write) = tokio::io::split(io);
        let pump = Pump { flow, stalls, abort: &shared.abort, traffic };
        let pumping = async {
            let ended = pump.run(&mut read, &mut write, send, stream).await;
            ended.map_err(|error| (error.outcome(Side::Server), error.to_string()))
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
        let (mut read, mut write) = tokio::io::split(io);
        let copying = async {
            let ended = tokio::select! {
                biased;
                (outcome, reason) = shared.abort.triggered() => Err((outcome, reason.to_owned())),
                ended = copy(target, &mut read, &mut write, traffic, Side::Server) => {
                    ended.map_err(|error| match &error {
                        CopyError::Client(_) => (Outcome::ClientReset, error.to_string()),
                        CopyError::Target(_) => (Outcome::TargetReset, error.to_string()),
                    })
                }
            };
            if ended.is_ok() {
                end_on_drop(target);
            }
            ended
        };
        shared.relay(copying, over).await;
    }
}

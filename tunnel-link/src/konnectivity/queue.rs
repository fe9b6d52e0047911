//! The two ends of a connection relayed in packets: data from the caller that its target has not taken yet, and data
//! for the caller.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::{CancellationToken, PollSender, WaitForCancellationFutureOwned};
use tonic::Status;

use super::Packet;
use super::room::Total;

/// Maximum data of one packet, in bytes: the buffer size with which programs written in Go copy.
const PACKET: usize = 32 << 10;
/// Minimum memory that a piece takes, in bytes.
const SHORTEST: usize = 64;

/// Packets to the stream's other end; an error ends the stream.
pub type Packets = mpsc::Sender<Result<Packet, Status>>;

/// Data of a connection that waits for its target.
#[derive(Debug)]
pub(super) struct Waiting {
    bytes: AtomicUsize,
    taken: Notify,
    /// Sum over all connections.
    all: Arc<Total>,
}

impl Waiting {
    fn new(all: Arc<Total>) -> Self {
        Self { bytes: AtomicUsize::new(0), taken: Notify::new(), all }
    }

    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        self.all.add(bytes);
    }

    fn take(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        self.all.take(bytes);
        self.taken.notify_waiters();
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// Waits until at most `bound` bytes are waiting.
    pub(super) async fn at_most(&self, bound: usize) {
        loop {
            let taken = self.taken.notified();
            if self.bytes() <= bound {
                return;
            }
            taken.await;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.all.take(*self.bytes.get_mut());
    }
}

/// Sending end for the caller's data, used by the task that takes packets apart.
#[derive(Debug)]
pub(super) struct Inlet {
    sender: mpsc::UnboundedSender<Bytes>,
    pub(super) waiting: Arc<Waiting>,
}

impl Inlet {
    pub(super) fn push(&self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        self.waiting.add(cost(&data));
        // A connection that has just ended takes no more data.
        let _ = self.sender.send(data);
    }
}

/// Returns the bytes for which a waiting piece counts.
pub fn cost(piece: &Bytes) -> usize {
    piece.len().max(SHORTEST)
}

/// Receiving end for the caller's data, read by the connection. Its end of file is that of the inlet, or of the
/// target.
#[derive(Debug)]
pub struct Inbox {
    receiver: mpsc::UnboundedReceiver<Bytes>,
    piece: Bytes,
    waiting: Arc<Waiting>,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// Data for the caller.
#[derive(Debug)]
pub struct Outbox {
    packets: PollSender<Result<Packet, Status>>,
    connect_id: i64,
    /// Cancelled when the caller has closed the connection.
    closed: CancellationToken,
    /// Cancelled when the target has closed the connection.
    ended: CancellationToken,
}

/// Creates the ends of one connection. `closed` is cancelled when the caller closes it; `all` counts the data waiting
/// for all targets.
pub(super) fn ends(
    connect_id: i64,
    packets: Packets,
    closed: CancellationToken,
    all: Arc<Total>,
) -> (Inlet, Inbox, Outbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let (waiting, ended) = (Arc::new(Waiting::new(all)), CancellationToken::new());
    let inbox = Inbox {
        receiver,
        piece: Bytes::new(),
        waiting: waiting.clone(),
        ended: Box::pin(ended.clone().cancelled_owned()),
    };
    let outbox = Outbox { packets: PollSender::new(packets), connect_id, closed, ended };
    (Inlet { sender, waiting }, inbox, outbox)
}

impl AsyncRead for Inbox {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.piece.is_empty() {
            // This protocol has no half-close: a connection is over after its target's end.
            if this.ended.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            match ready!(this.receiver.poll_recv(cx)) {
                Some(piece) => {
                    this.waiting.take(cost(&piece) - piece.len());
                    this.piece = piece;
                }
                None => return Poll::Ready(Ok(())),
            }
        }
        let taken = this.piece.split_to(this.piece.len().min(into.remaining()));
        into.put_slice(&taken);
        this.waiting.take(taken.len());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Outbox {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the caller has closed the connection");
        if this.closed.is_cancelled() {
            return Poll::Ready(Err(gone()));
        }
        if ready!(this.packets.poll_reserve(cx)).is_err() {
            return Poll::Ready(Err(gone()));
        }
        let length = data.len().min(PACKET);
        let packet = Packet::data(this.connect_id, Bytes::copy_from_slice(&data[..length]));
        match this.packets.send_item(Ok(packet)) {
            Ok(()) => Poll::Ready(Ok(length)),
            Err(_) => Poll::Ready(Err(gone())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.ended.cancel();
        Poll::Ready(Ok(()))
    }
}

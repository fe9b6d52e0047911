//! The two ends of a connection that is carried in packets: what came from the caller and is not sent on yet, and what goes
//! to the caller.

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
use tunnel_core::konnectivity::Packet;

/// What one packet carries at most: the buffer with which programs written in Go copy.
const PACKET: usize = 32 << 10;

/// Packets to the caller; a failed one ends the stream.
pub(super) type Packets = mpsc::Sender<Result<Packet, Status>>;

/// How much of a connection waits for its target.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    bytes: AtomicUsize,
    taken: Notify,
}

impl Waiting {
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// Waits until it is no more than `bound`.
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

/// What a caller has sent, for whoever takes the packets apart.
#[derive(Debug)]
pub(super) struct Inlet {
    sender: mpsc::UnboundedSender<Bytes>,
    pub(super) waiting: Arc<Waiting>,
}

impl Inlet {
    pub(super) fn push(&self, data: Bytes) {
        self.waiting.bytes.fetch_add(data.len(), Ordering::AcqRel);
        // A connection that has just ended takes no more.
        let _ = self.sender.send(data);
    }
}

/// The same, to be read by the connection. Its end of file is that of the inlet, or of the target.
pub(super) struct Inbox {
    receiver: mpsc::UnboundedReceiver<Bytes>,
    piece: Bytes,
    waiting: Arc<Waiting>,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// What goes to the caller.
pub(super) struct Outbox {
    packets: PollSender<Result<Packet, Status>>,
    connect_id: i64,
    /// The caller has closed the connection.
    closed: CancellationToken,
    /// The target has.
    ended: CancellationToken,
}

/// The ends of one connection. `closed` says that the caller has closed it.
pub(super) fn ends(connect_id: i64, packets: Packets, closed: CancellationToken) -> (Inlet, Inbox, Outbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let (waiting, ended) = (Arc::new(Waiting::default()), CancellationToken::new());
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
            // There is no half-close in this protocol: after its target's end a connection is over.
            if this.ended.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            match ready!(this.receiver.poll_recv(cx)) {
                Some(piece) => this.piece = piece,
                None => return Poll::Ready(Ok(())),
            }
        }
        let taken = this.piece.split_to(this.piece.len().min(into.remaining()));
        into.put_slice(&taken);
        this.waiting.bytes.fetch_sub(taken.len(), Ordering::AcqRel);
        this.waiting.taken.notify_waiters();
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

//! A caller's connection in two halves, for each kind of socket.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, Interest, ReadHalf, WriteHalf};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf, pipe};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

/// Interval at which to ask the kernel whether a caller has closed its socket. Its only event for that would get in the
/// way of writing.
const CHECK: Duration = Duration::from_secs(5);
/// Time for which a target may go on after its caller has closed, as the kernel allows for sockets (`tcp_fin_timeout`).
pub(super) const LINGER: Duration = Duration::from_secs(60);
/// Maximum time to hold back data behind a piece that was sent alone: a caller that takes the descriptor out of the
/// message, which no HTTP client does, may keep it open.
const HOLD_BACK: Duration = Duration::from_secs(5);

/// End of a caller's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Its end was sent after everything else.
    Ended,
    /// The target broke it off; the caller still gets what the target had sent.
    BrokenOff,
    /// The caller does not wait for the rest, or some of it is missing.
    Lost,
}

/// The half that is written to.
pub(super) trait Writer: AsyncWrite + Unpin + Send + 'static {
    /// Sends bytes that the caller reads by themselves: no read returns them together with later bytes.
    fn send_alone(&mut self, head: &[u8]) -> impl Future<Output = io::Result<()>> + Send;
}

/// The half of a Unix socket.
pub(super) struct UnixWriter {
    half: OwnedWriteHalf,
    /// Completes once the caller has read what was sent alone.
    unread: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl UnixWriter {
    fn poll_read_alone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(unread) = &mut self.unread {
            ready!(unread.as_mut().poll(cx));
            self.unread = None;
        }
        Poll::Ready(())
    }
}

impl Writer for UnixWriter {
    /// Sends the bytes with a descriptor. A stream's read ends after a message that has one
    /// (`unix_stream_read_generic`), however late the reader is, and the kernel closes a descriptor for which the
    /// reader has no room. No event and no count of unread bytes (SIOCOUTQ) would do: both change while a read that may
    /// still take more is in progress.
    ///
    /// Programs that wait for edge-triggered readiness take a short read for the end of the data. They need another
    /// edge, so later data is held back until the read is over: the descriptor is that of a pipe, which then ends.
    async fn send_alone(&mut self, head: &[u8]) -> io::Result<()> {
        let (read, write) = io::pipe()?;
        let read = pipe::Receiver::from_owned_fd(read.into())?;
        let socket: &UnixStream = self.half.as_ref();
        let sent = socket.async_io(Interest::WRITABLE, || send_with(socket, head, write.as_fd())).await?;
        self.half.write_all(&head[sent..]).await?;
        self.unread = Some(Box::pin(async move {
            // After an error of the pipe nothing is held back.
            let _ = timeout(HOLD_BACK, read.readable()).await;
        }));
        Ok(())
    }
}

/// Sends bytes together with a descriptor.
fn send_with(socket: impl AsFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

impl AsyncWrite for UnixWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_read_alone(cx));
        Pin::new(&mut self.half).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_read_alone(cx));
        Pin::new(&mut self.half).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.half.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.half).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.half).poll_shutdown(cx)
    }
}

impl Writer for WriteHalf<TlsStream<TcpStream>> {
    /// Flushes, so that the bytes are a record of their own: readers return the content of one record.
    async fn send_alone(&mut self, head: &[u8]) -> io::Result<()> {
        self.write_all(head).await?;
        self.flush().await
    }
}

fn is_closed(socket: &OwnedFd) -> bool {
    let mut sockets = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut sockets, Some(&now)) {
        Ok(_) => sockets[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
        Err(_) => false,
    }
}

/// Completes when a caller has closed or lost its socket, after a time in which its target can end too.
pub(super) async fn closed(socket: &OwnedFd) {
    hung_up(socket, CHECK).await;
    tokio::time::sleep(LINGER).await;
}

/// Completes soon after a caller has closed or lost its socket.
pub(super) async fn hung_up(socket: &OwnedFd, check: Duration) {
    while !is_closed(socket) {
        tokio::time::sleep(check).await;
    }
}

/// Returns the halves, and a descriptor for watching the socket.
pub(super) fn of_unix(socket: UnixStream) -> io::Result<(OwnedReadHalf, UnixWriter, Arc<OwnedFd>)> {
    let watched = Arc::new(socket.as_fd().try_clone_to_owned()?);
    let (read, half) = socket.into_split();
    Ok((read, UnixWriter { half, unread: None }, watched))
}

/// Does the same for TLS.
pub(super) fn of_tls(
    stream: TlsStream<TcpStream>,
) -> io::Result<(impl AsyncRead + Unpin + Send + 'static, WriteHalf<TlsStream<TcpStream>>, Arc<OwnedFd>)> {
    let watched = Arc::new(stream.get_ref().0.as_fd().try_clone_to_owned()?);
    let (read, write): (ReadHalf<_>, _) = tokio::io::split(stream);
    Ok((read, write, watched))
}

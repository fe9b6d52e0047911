//! A caller's connection in two halves, whatever it is made of.

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

/// How often to ask the kernel whether a caller has closed its socket, for which it has no event that would not get in the
/// way of writing.
const CHECK: Duration = Duration::from_secs(5);
/// How long a target may go on after its caller has closed, as the kernel gives it for sockets (`tcp_fin_timeout`).
pub(super) const LINGER: Duration = Duration::from_secs(60);
/// How long to hold back what comes behind a piece that was sent alone, at most: a caller that takes the descriptor out of the
/// message, which no HTTP client does, may keep it.
const HOLD_BACK: Duration = Duration::from_secs(5);

/// How a caller's connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Its end was said, behind everything else.
    Ended,
    /// The target broke it off: what it had sent is still the caller's.
    BrokenOff,
    /// Nobody waits for the rest of it, or there is a gap in it.
    Lost,
}

/// The half that is written to.
pub(super) trait Writer: AsyncWrite + Unpin + Send + 'static {
    /// Sends what the caller is to read by itself: what is written later never comes out of the same read.
    fn send_alone(&mut self, head: &[u8]) -> impl Future<Output = io::Result<()>> + Send;
}

/// That of a Unix socket.
pub(super) struct UnixWriter {
    half: OwnedWriteHalf,
    /// Ends once the caller has read what was sent alone.
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
    /// Sends it with a descriptor: a stream's read ends behind a message that carries one (`unix_stream_read_generic`), however
    /// late the reader comes to it, and closes a descriptor that it has no room for. No event and no count of unread bytes
    /// (SIOCOUTQ) would do: both change while a read that may still take more is under way.
    ///
    /// Programs that wait for edges of readiness take a short read for the end of what is there. They need another edge, so what
    /// comes later is held back until the read is over: the descriptor is a pipe's, which then ends.
    async fn send_alone(&mut self, head: &[u8]) -> io::Result<()> {
        let (read, write) = io::pipe()?;
        let read = pipe::Receiver::from_owned_fd(read.into())?;
        let socket: &UnixStream = self.half.as_ref();
        let sent = socket.async_io(Interest::WRITABLE, || send_with(socket, head, write.as_fd())).await?;
        self.half.write_all(&head[sent..]).await?;
        self.unread = Some(Box::pin(async move {
            // An error of the pipe holds nothing back.
            let _ = timeout(HOLD_BACK, read.readable()).await;
        }));
        Ok(())
    }
}

/// Sends bytes, and a descriptor with them.
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
    /// A record of its own: readers return what one record holds.
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

/// Ends once a caller has closed its socket, or lost it, for so long that its target has had time to end too.
pub(super) async fn closed(socket: &OwnedFd) {
    hung_up(socket, CHECK).await;
    tokio::time::sleep(LINGER).await;
}

/// Ends soon after a caller has closed its socket, or lost it.
pub(super) async fn hung_up(socket: &OwnedFd, check: Duration) {
    while !is_closed(socket) {
        tokio::time::sleep(check).await;
    }
}

/// The halves, and a descriptor to watch the socket by.
pub(super) fn of_unix(socket: UnixStream) -> io::Result<(OwnedReadHalf, UnixWriter, Arc<OwnedFd>)> {
    let watched = Arc::new(socket.as_fd().try_clone_to_owned()?);
    let (read, half) = socket.into_split();
    Ok((read, UnixWriter { half, unread: None }, watched))
}

/// The same of TLS.
pub(super) fn of_tls(
    stream: TlsStream<TcpStream>,
) -> io::Result<(impl AsyncRead + Unpin + Send + 'static, WriteHalf<TlsStream<TcpStream>>, Arc<OwnedFd>)> {
    let watched = Arc::new(stream.get_ref().0.as_fd().try_clone_to_owned()?);
    let (read, write): (ReadHalf<_>, _) = tokio::io::split(stream);
    Ok((read, write, watched))
}

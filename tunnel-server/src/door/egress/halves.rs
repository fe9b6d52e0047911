//! A caller's connection in two halves, whatever it is made of.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, Interest, ReadHalf, WriteHalf};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// How often to ask the kernel whether a caller has closed its socket, for which it has no event that would not get in the
/// way of writing.
const CHECK: Duration = Duration::from_secs(5);
/// How long a target may go on after its caller has closed, as the kernel gives it for sockets (`tcp_fin_timeout`).
pub(super) const LINGER: Duration = Duration::from_secs(60);

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
    socket: Arc<OwnedFd>,
    /// Ready once the caller has read what was sent alone.
    unread: Option<AsyncFd<Arc<OwnedFd>>>,
}

impl UnixWriter {
    fn poll_read_alone(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(unread) = &self.unread {
            ready!(unread.poll_write_ready(cx))?.retain_ready();
            self.unread = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl Writer for UnixWriter {
    /// A Unix socket has room again each time that a piece was read, and not before: that is an event even if it had room
    /// all the time. What comes later is held back until then. (Ancillary data would keep the pieces apart as well, but
    /// programs that wait for events take a short read for the end of what is there, and would not read on.)
    async fn send_alone(&mut self, head: &[u8]) -> io::Result<()> {
        // A registration of its own, since what arrives from the caller is an event of the other one.
        #[expect(
            deprecated,
            reason = "unsound with a descriptor that may be closed meanwhile, as an OwnedFd may not"
        )]
        let unread = AsyncFd::with_interest(self.socket.clone(), Interest::WRITABLE)?;
        unread.writable().await?.clear_ready();
        self.half.write_all(head).await?;
        self.unread = Some(unread);
        Ok(())
    }
}

impl AsyncWrite for UnixWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_read_alone(cx))?;
        Pin::new(&mut self.half).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_read_alone(cx))?;
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
    loop {
        tokio::time::sleep(CHECK).await;
        if is_closed(socket) {
            return tokio::time::sleep(LINGER).await;
        }
    }
}

/// The halves, and a descriptor to watch the socket by.
pub(super) fn of_unix(socket: UnixStream) -> io::Result<(OwnedReadHalf, UnixWriter, Arc<OwnedFd>)> {
    let watched = Arc::new(socket.as_fd().try_clone_to_owned()?);
    let (read, half) = socket.into_split();
    Ok((read, UnixWriter { half, socket: watched.clone(), unread: None }, watched))
}

/// The same of TLS.
pub(super) fn of_tls(
    stream: TlsStream<TcpStream>,
) -> io::Result<(impl AsyncRead + Unpin + Send + 'static, WriteHalf<TlsStream<TcpStream>>, Arc<OwnedFd>)> {
    let watched = Arc::new(stream.get_ref().0.as_fd().try_clone_to_owned()?);
    let (read, write): (ReadHalf<_>, _) = tokio::io::split(stream);
    Ok((read, write, watched))
}

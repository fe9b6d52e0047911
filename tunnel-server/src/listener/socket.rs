//! A client's socket, with bytes that were already read from it, and what watches that or another kind of connection.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tunnel_link::relay::{PipeStatus, end_on_drop, flushed, lost, reset_on_drop};

/// Tells a client's HTTP/1 connection that an answer was cut off. It then closes with a reset, because the client could take
/// an end of file for the end of the answer.
#[derive(Clone, Debug)]
pub(super) enum Faults {
    /// Weak, for [`Watched::into_socket`].
    Socket(Weak<TcpStream>),
    Pipe(PipeStatus),
}

impl Faults {
    pub(super) fn report(&self) {
        match self {
            Self::Socket(socket) => {
                if let Some(socket) = socket.upgrade() {
                    reset_on_drop(&*socket);
                }
            }
            Self::Pipe(pipe) => pipe.reset_on_drop(),
        }
    }

    /// Waits until the client has what it was sent, also by a hyper that writes it while its body waits for this: a reset
    /// discards the rest.
    pub(super) async fn flushed(self) {
        // A pipe's reset comes behind everything else.
        let Self::Socket(socket) = self else { return };
        let Some(socket) = socket.upgrade() else { return };
        // The second time for what did not fit into the socket the first time.
        for _ in 0..2 {
            tokio::task::yield_now().await;
            flushed(&*socket).await;
        }
    }
}

/// A client's connection as seen by those who do not read or write it.
#[derive(Debug)]
pub(super) enum Watched {
    Socket(Arc<TcpStream>),
    Pipe(PipeStatus),
}

impl Watched {
    /// Waits until it has failed. An end of file is no failure.
    pub(super) async fn lost(&self) -> String {
        match self {
            Self::Socket(socket) => lost(socket).await.to_string(),
            Self::Pipe(pipe) => pipe.failed().await.1.clone(),
        }
    }

    /// Makes its close a reset.
    pub(super) fn reset_on_drop(&self) {
        match self {
            Self::Socket(socket) => reset_on_drop(&**socket),
            Self::Pipe(pipe) => pipe.reset_on_drop(),
        }
    }

    /// Makes its close an end of file.
    pub(super) fn end_on_drop(&self) {
        match self {
            Self::Socket(socket) => end_on_drop(&**socket),
            Self::Pipe(pipe) => pipe.end_on_drop(),
        }
    }

    /// Waits until the client has got what was written, which a reset would discard.
    pub(super) async fn flushed(&self) {
        match self {
            Self::Socket(socket) => flushed(&**socket).await,
            // There a reset comes behind everything else.
            Self::Pipe(_) => {}
        }
    }

    /// The socket, if it is one and nobody else has it.
    pub(super) fn into_socket(self) -> Option<TcpStream> {
        match self {
            Self::Socket(socket) => Arc::into_inner(socket),
            Self::Pipe(_) => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct PrefixedSocket {
    /// Shared with the task that waits for the socket to fail.
    socket: Arc<TcpStream>,
    prefix: Bytes,
}

impl PrefixedSocket {
    /// `socket` has been prepared by its listener.
    pub(super) fn new(socket: Arc<TcpStream>, prefix: Bytes) -> Self {
        // A connection between two requests ends with an end of file.
        end_on_drop(&*socket);
        Self { socket, prefix }
    }
}

impl AsyncRead for PrefixedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            loop {
                ready!(self.socket.poll_read_ready(cx))?;
                match self.socket.try_read_buf(buf) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return Poll::Ready(read.map(drop)),
                }
            }
        }
        let taken = self.prefix.len().min(buf.remaining());
        buf.put_slice(&self.prefix[..taken]);
        self.prefix.advance(taken);
        if self.prefix.is_empty() {
            // Else its memory is kept as long as the connection.
            self.prefix = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PrefixedSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.socket.poll_write_ready(cx))?;
            match self.socket.try_write_vectored(parts) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.socket).shutdown(Shutdown::Write))
    }
}

//! The transport of a link: a TCP connection, or a simulated one.

use std::fmt::Debug;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::tcp_info::{Delivery, SendTimes, Silence, delivery};

/// A connection that is not the kernel's, with what a kernel would know of its path.
pub trait Line: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin {
    fn local_addr(&self) -> SocketAddr;
    fn peer_addr(&self) -> SocketAddr;
    /// Ready once a read would not wait.
    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()>;
    /// Round-trip time of the path.
    fn rtt(&self) -> Duration;
    /// Set if the peer has something to answer.
    fn silence(&self) -> Option<Silence>;
}

/// A connection that is not encrypted yet.
#[derive(Debug)]
pub enum Wire {
    Tcp(TcpStream),
    Line(Box<dyn Line>),
}

impl From<TcpStream> for Wire {
    fn from(socket: TcpStream) -> Self {
        Self::Tcp(socket)
    }
}

impl Wire {
    /// Returns the socket, if there is one.
    pub fn socket(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(socket) => Some(socket),
            Self::Line(_) => None,
        }
    }

    /// # Errors
    /// If the connection is lost.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(socket) => socket.local_addr(),
            Self::Line(line) => Ok(line.local_addr()),
        }
    }

    /// # Errors
    /// If the connection is lost.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(socket) => socket.peer_addr(),
            Self::Line(line) => Ok(line.peer_addr()),
        }
    }

    /// Waits for the first bytes, or the end.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn readable(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.readable().await,
            Self::Line(line) => {
                poll_fn(|cx| line.poll_readable(cx)).await;
                Ok(())
            }
        }
    }

    /// Moves the socket to the runtime of this thread.
    ///
    /// # Errors
    /// If the runtime cannot take it. It is closed then.
    pub fn move_here(self) -> io::Result<Self> {
        match self {
            Self::Tcp(socket) => Ok(Self::Tcp(TcpStream::from_std(socket.into_std()?)?)),
            line @ Self::Line(_) => Ok(line),
        }
    }

    /// What is known of the path.
    pub(super) fn delivery(&self) -> Option<Delivery> {
        match self {
            Self::Tcp(socket) => delivery(socket),
            Self::Line(line) => Some(Delivery {
                rate: 0,
                app_limited: true,
                rtt: line.rtt(),
                shortest_rtt: Some(line.rtt()),
                retransmits: 0,
                silence: line.silence(),
                sending: SendTimes::default(),
            }),
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).poll_read(cx, buffer),
            Self::Line(line) => Pin::new(line).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Line(line) => Pin::new(line).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
            Self::Line(line) => Pin::new(line).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket.is_write_vectored(),
            Self::Line(line) => line.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).poll_flush(cx),
            Self::Line(line) => Pin::new(line).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Line(line) => Pin::new(line).poll_shutdown(cx),
        }
    }
}

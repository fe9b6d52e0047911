//! The transport of a link: a TCP connection, or a simulated one.

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::multipath::is_multipath;
use crate::tcp_info::{Delivery, delivery};

/// A connection that is not encrypted yet.
pub type Wire = Box<dyn Line>;

/// A connection of any network, with what is known of its path.
pub trait Line: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin {
    /// # Errors
    /// If the connection is lost.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// # Errors
    /// If the connection is lost.
    fn peer_addr(&self) -> io::Result<SocketAddr>;

    /// Ready once a read would not wait: at the first bytes, or at the end.
    ///
    /// # Errors
    /// If the connection is lost.
    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// State of the path; None if it is not known.
    fn delivery(&self) -> Option<Delivery>;

    /// Returns the socket, if there is one.
    fn socket(&self) -> Option<&TcpStream> {
        None
    }

    /// True if it uses MPTCP, or offered it.
    fn is_multipath(&self) -> bool {
        self.socket().is_some_and(is_multipath)
    }

    /// Moves the socket to the runtime of this thread.
    ///
    /// # Errors
    /// If the runtime cannot take it.
    fn move_here(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<TcpStream> for Wire {
    fn from(socket: TcpStream) -> Self {
        Box::new(socket)
    }
}

impl Line for TcpStream {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }

    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Self::peer_addr(self)
    }

    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_read_ready(cx)
    }

    fn delivery(&self) -> Option<Delivery> {
        delivery(self)
    }

    fn socket(&self) -> Option<&TcpStream> {
        Some(self)
    }

    fn move_here(&mut self) -> io::Result<()> {
        // tokio cannot be asked for the socket itself without taking it out of its stream.
        let copy = std::net::TcpStream::from(self.as_fd().try_clone_to_owned()?);
        *self = Self::from_std(copy)?;
        Ok(())
    }
}

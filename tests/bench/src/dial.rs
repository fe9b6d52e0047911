//! The load generator's connections to a port of the edge, through a peer.
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use crate::grpc::{STREAM_WINDOW, Tunnelled};

/// Maximum time of one step; after that it counts as unanswered.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// The way to a peer's far end.
#[derive(Clone, Debug)]
pub(crate) enum Dialer {
    /// A TCP connection to the same port of this address.
    Tcp(IpAddr),
    /// HTTP CONNECT on a Unix socket, then the target's bytes.
    HttpConnect {
        /// The proxy's socket.
        socket: PathBuf,
        /// The target's address, as the far end dials it.
        target: IpAddr,
    },
    /// konnectivity's ProxyService on a Unix socket, one gRPC connection per relayed one as kube-apiserver does it.
    Grpc {
        /// The proxy's socket.
        socket: PathBuf,
        /// The target's address, as the far end dials it.
        target: IpAddr,
    },
}

impl Dialer {
    /// Connects, without a deadline.
    pub(crate) async fn dial_patiently(&self, port: u16) -> Result<Stream> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect((*address, port)).await.context("connect()")?;
                stream.set_nodelay(true).context("TCP_NODELAY")?;
                Ok(Stream::Tcp(stream))
            }
            Self::HttpConnect { socket, target } => {
                let mut stream = UnixStream::connect(socket).await.context("connect() to the Unix socket")?;
                http_connect(&mut stream, SocketAddr::new(*target, port)).await?;
                Ok(Stream::Unix(stream))
            }
            Self::Grpc { socket, target } => {
                let stream = UnixStream::connect(socket).await.context("connect() to the Unix socket")?;
                let tunnelled = Tunnelled::dial(stream, SocketAddr::new(*target, port)).await?;
                Ok(Stream::Grpc(Box::new(tunnelled)))
            }
        }
    }

    /// Bytes that this end of a connection buffers while they are not read.
    pub(crate) fn taken_unread(&self) -> u64 {
        match self {
            // Socket buffers are small compared to a window.
            Self::Tcp(_) | Self::HttpConnect { .. } => 0,
            Self::Grpc { .. } => STREAM_WINDOW.into(),
        }
    }

    /// Connects within [`PATIENCE`].
    pub(crate) async fn dial(&self, port: u16) -> Result<Stream> {
        timeout(PATIENCE, self.dial_patiently(port)).await.context("the dial was not answered")?
    }
}

/// Sends the request of kube-apiserver. Nothing may follow the answer before the client has sent.
async fn http_connect(stream: &mut UnixStream, target: SocketAddr) -> Result<()> {
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    stream.write_all(request.as_bytes()).await.context("sending CONNECT")?;
    let mut answer = Vec::with_capacity(128);
    while !answer.ends_with(b"\r\n\r\n") {
        ensure!(answer.len() < 4096, "the answer to CONNECT has no end");
        let n = stream.read_buf(&mut answer).await.context("reading the answer to CONNECT")?;
        if n == 0 {
            bail!("the answer to CONNECT ended early: {:?}", String::from_utf8_lossy(&answer));
        }
    }
    ensure!(
        answer.starts_with(b"HTTP/1.1 200"),
        "CONNECT was answered {:?}",
        String::from_utf8_lossy(&answer).trim_end()
    );
    Ok(())
}

/// A connection to the edge.
#[derive(Debug)]
pub(crate) enum Stream {
    /// Plain, or redirected.
    Tcp(TcpStream),
    /// Behind an answered CONNECT.
    Unix(UnixStream),
    /// Packets of konnectivity.
    Grpc(Box<Tunnelled>),
}

impl Stream {
    /// Makes a TCP connection end with a reset, instead of after its buffered data.
    pub(crate) fn reset_at_end(&self) -> Result<()> {
        match self {
            Self::Tcp(stream) => SockRef::from(stream).set_linger(Some(Duration::ZERO)).context("SO_LINGER"),
            Self::Unix(_) | Self::Grpc(_) => Ok(()),
        }
    }

    /// Closes: immediately, unless the protocol answers a close.
    pub(crate) async fn close(self) -> Result<()> {
        match self {
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
            Self::Grpc(stream) => timeout(PATIENCE, stream.close()).await.context("no CLOSE_RSP")?,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Grpc(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Grpc(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Grpc(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Grpc(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}

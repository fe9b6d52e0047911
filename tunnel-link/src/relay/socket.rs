//! Socket of a tunnelled connection: its options, and how it closes.
//!
//! A failure must never look like an end of file, which could be taken for a complete answer. So the socket is set to
//! close with a TCP reset before anything can fail, and only a connection that ended well in both directions reverts
//! that. A cancelled task and a killed process reset their connections too.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tunnel_runtime::net::refine;

use crate::link;
use crate::tcp_info::unacknowledged;

/// Number of connections that wait in a listener, as in [`TcpListener::bind`].
const BACKLOG: u32 = 1024;
/// Unsent bytes in the kernel above which the socket is not written to. Limits the kernel memory held for a receiver
/// that does not read.
const NOTSENT_LOWAT: u32 = 256 << 10;
/// Idle time of a tunnelled connection before the first keepalive probe.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// Maximum time for which a client may read none of the last bytes; its connection is then reset without them.
const FLUSH_PATIENCE: Duration = Duration::from_secs(10);

/// Listens on an address. `prepare` sets options that accepted sockets inherit; they are set before it listens, because a
/// connection may come at once.
///
/// # Errors
/// As socket(2), bind(2) and listen(2).
pub fn listen(address: SocketAddr, prepare: impl FnOnce(&TcpSocket)) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    listen_on(socket, address, prepare)
}

/// [`listen`] with this socket.
///
/// # Errors
/// As bind(2) and listen(2).
pub fn listen_on(
    socket: TcpSocket,
    address: SocketAddr,
    prepare: impl FnOnce(&TcpSocket),
) -> io::Result<TcpListener> {
    // As TcpListener::bind does.
    socket.set_reuseaddr(true)?;
    prepare(&socket);
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Connects to a target, from this address if there is one. If nothing listens on a port of this host, the kernel may choose that
/// port as the source, and connect the socket to itself (simultaneous open, RFC 9293 section 3.5): this is refused.
///
/// # Errors
/// Those of socket(2), bind(2) and connect(2).
pub async fn connect_target(target: SocketAddr, from: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = if target.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Before it connects: a client may leave while it does.
    prepare_socket(&socket);
    if let Some(from) = from {
        socket.bind((from, 0).into())?;
    }
    not_to_itself(socket.connect(target).await?, target)
}

fn not_to_itself(socket: TcpStream, target: SocketAddr) -> io::Result<TcpStream> {
    // The unspecified address is this host's loopback.
    let target = if target.ip().is_unspecified() { socket.peer_addr()? } else { target };
    if socket.local_addr()? == target {
        // It ends with a reset. Else the port would be taken for a minute when its program starts again.
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(socket)
}

/// Sets the options of a tunnelled connection's socket, on either end, and [`reset_on_drop`]. Accepted sockets inherit
/// what is set on their listener.
pub fn prepare_socket(socket: &impl AsFd) {
    reset_on_drop(socket);
    tune_socket(socket);
    // Else an urgent byte is missing in what is read (RFC 6093 section 5). MPTCP has none.
    refine("SO_OOBINLINE", SockRef::from(socket).set_out_of_band_inline(true));
}

/// Sets the options that links and answers of the admin port need too.
pub fn tune_socket(socket: &impl AsFd) {
    let socket = SockRef::from(socket);
    refine("TCP_NODELAY", socket.set_tcp_nodelay(true));
    refine("SO_KEEPALIVE", socket.set_tcp_keepalive(&link::keepalive().with_time(KEEPALIVE_TIME)));
    refine("TCP_NOTSENT_LOWAT", socket.set_tcp_notsent_lowat(NOTSENT_LOWAT));
}

/// Makes the socket's close a TCP RST.
pub fn reset_on_drop(socket: &impl AsFd) {
    linger(socket, Some(Duration::ZERO));
}

/// Undoes [`reset_on_drop`]: the socket's close is an end of file.
pub fn end_on_drop(socket: &impl AsFd) {
    linger(socket, None);
}

/// Waits until the peer's kernel has all written bytes, because a reset discards unsent ones. Gives up if nothing
/// moves for [`FLUSH_PATIENCE`].
pub async fn flushed(socket: &impl AsFd) {
    let mut last = (0, 0);
    let mut moved = Instant::now();
    let mut pause = Duration::from_millis(1);
    // The kernel has no event for this.
    loop {
        let now = match unacknowledged(socket) {
            Ok(now) => now,
            Err(error) => return tracing::debug!(%error, "failed to read the send queue of a socket"),
        };
        if now == (0, 0) || moved.elapsed() > FLUSH_PATIENCE {
            return;
        }
        if now != last {
            (last, moved) = (now, Instant::now());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Returns when the socket has failed. An end of file is no failure: the peer may only have finished sending.
pub async fn lost(socket: &TcpStream) -> io::Error {
    if socket.ready(Interest::ERROR).await.is_ok()
        && let Ok(Some(error)) | Err(error) = socket.take_error()
    {
        return error;
    }
    // Another caller was told of the error, such as a failed write.
    std::future::pending().await
}

/// Sets SO_LINGER, the only one of these options that correctness depends on: without it a failure looks like an end
/// of file. Every kernel has it; if a sandbox refuses it, that is logged.
fn linger(socket: &impl AsFd, time: Option<Duration>) {
    refine("SO_LINGER", SockRef::from(socket).set_linger(time));
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn a_connection_to_itself_is_refused() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let own = socket.local_addr().unwrap();
        reset_on_drop(&socket);
        let connected = socket.connect(own).await.expect("the kernel connects it to itself");
        let error = not_to_itself(connected, own).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let socket = TcpSocket::new_v4().unwrap();
        reset_on_drop(&socket);
        socket.bind(own).unwrap();
        let unspecified = SocketAddr::from(([0, 0, 0, 0], own.port()));
        let connected = socket.connect(unspecified).await.expect("the kernel connects it to itself");
        assert!(not_to_itself(connected, unspecified).is_err());
        let listener = TcpListener::bind(own).await.expect("the port is free at once");
        connect_target(listener.local_addr().unwrap(), None).await.unwrap();
    }

    #[tokio::test]
    async fn a_cancelled_dial_ends_with_a_reset() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut dial = Box::pin(connect_target(listener.local_addr().unwrap(), None));
        // The kernel has made the connection, which is not seen yet.
        assert!(poll_fn(|cx| Poll::Ready(dial.as_mut().poll(cx).is_pending())).await);
        drop(dial);
        let (mut accepted, _) = listener.accept().await.unwrap();
        let error = accepted.read(&mut [0]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn an_urgent_byte_is_read_in_its_place() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), prepare_socket).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut accepted, _) = listener.accept().await.unwrap();
        let client = SockRef::from(&client);
        assert_eq!((client.send(b"ab").unwrap(), client.send_out_of_band(b"!").unwrap()), (2, 1));
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut bytes = Vec::new();
        accepted.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(bytes, b"ab!");
    }

    #[tokio::test]
    async fn what_a_listener_accepts_inherits_every_option() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = listen(address.parse().unwrap(), prepare_socket).unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (accepted, _) = listener.accept().await.unwrap();
            let accepted = SockRef::from(&accepted);
            assert_eq!(accepted.linger().unwrap(), Some(Duration::ZERO));
            assert!(accepted.tcp_nodelay().unwrap() && accepted.keepalive().unwrap());
            assert_eq!(accepted.tcp_keepalive_time().unwrap(), KEEPALIVE_TIME);
            assert_eq!(accepted.tcp_keepalive_interval().unwrap(), Duration::from_secs(5));
            assert_eq!(accepted.tcp_keepalive_retries().unwrap(), 3);
            assert_eq!(accepted.tcp_notsent_lowat().unwrap(), NOTSENT_LOWAT);
        }
    }
}

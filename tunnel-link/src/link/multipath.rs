//! MPTCP (RFC 8684): a link survives the failure of one of its host's uplinks. `ip mptcp endpoint` on the host names their
//! addresses.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpSocket;
use tunnel_runtime::kernel;

/// First kernel whose MPTCP knows all options that matter, congestion control and keepalive among them.
const SINCE: (u32, u32) = (6, 1);

/// Returns a socket for TCP that offers or accepts MPTCP too. A listener accepts ordinary sockets from peers that do not use it.
///
/// # Errors
/// If this kernel has no MPTCP, or does not permit it (`net.mptcp.enabled`).
pub fn multipath_socket(address: SocketAddr) -> io::Result<TcpSocket> {
    if kernel::version().is_none_or(|version| version < SINCE) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel is older than Linux 6.1"));
    }
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::MPTCP))?;
    socket.set_nonblocking(true)?;
    Ok(TcpSocket::from_std_stream(socket.into()))
}

/// True if the connection uses MPTCP, or offered it. The kernel then reports only the first path, which may be the one that has
/// failed, and has neither TCP_USER_TIMEOUT nor TCP_RTO_MAX_MS.
pub(super) fn is_multipath(socket: &impl AsFd) -> bool {
    SockRef::from(socket).protocol().is_ok_and(|protocol| protocol == Some(Protocol::MPTCP))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;
    use crate::relay::{listen_on, tune_socket};

    #[tokio::test]
    async fn a_listener_takes_peers_with_and_without_it() {
        let any = "127.0.0.1:0".parse().unwrap();
        let socket = match multipath_socket(any) {
            Ok(socket) => socket,
            Err(error) => return eprintln!("not tested: this kernel has no MPTCP: {error}"),
        };
        let listener = listen_on(socket, any, tune_socket).unwrap();
        let address = listener.local_addr().unwrap();
        let _plain = TcpStream::connect(address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(!is_multipath(&accepted));
        assert!(
            SockRef::from(&accepted).tcp_nodelay().unwrap(),
            "accepted sockets inherit the listener's options"
        );
        let multipath = multipath_socket(any).unwrap().connect(address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(is_multipath(&multipath) && is_multipath(&accepted));
        let plain = tokio::net::TcpListener::bind(any).await.unwrap();
        let refused = multipath_socket(any).unwrap().connect(plain.local_addr().unwrap()).await;
        assert!(refused.is_ok(), "a peer without it: {refused:?}");
    }
}

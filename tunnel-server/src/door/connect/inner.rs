//! Puts TLS in front of code that relays plain sockets: a pair of loopback sockets, one of which has the TLS side.
//!
//! Relaying depends on a socket's own backpressure, half-close and reset. The pair gives a TLS client all three, and
//! the limits that come with them, at the cost of one more copy.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tunnel_core::carry::end_on_drop;

/// Bytes copied at a time in each direction: one TLS record.
const BUFFER: usize = 16 << 10;

/// Returns two sockets that are connected to each other.
pub(crate) async fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let one = TcpStream::connect(listener.local_addr()?).await?;
    let own = one.local_addr()?;
    loop {
        // Any process of this host may connect first.
        let (other, peer) = listener.accept().await?;
        if peer == own {
            return Ok((one, other));
        }
    }
}

/// Relays until both directions have ended. An error on either side resets the other: both are armed for that.
pub(super) async fn relay(mut tls: TlsStream<TcpStream>, mut inner: TcpStream) {
    match tokio::io::copy_bidirectional_with_sizes(&mut tls, &mut inner, BUFFER, BUFFER).await {
        Ok(_) => {
            end_on_drop(tls.get_ref().0);
            end_on_drop(&inner);
        }
        Err(error) => tracing::debug!(%error, "a client's TLS connection broke"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn a_pair_is_connected_with_itself() {
        let (mut one, mut other) = pair().await.unwrap();
        one.write_all(b"x").await.unwrap();
        one.shutdown().await.unwrap();
        let mut read = Vec::new();
        other.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"x");
        assert_eq!(one.peer_addr().unwrap(), other.local_addr().unwrap());
    }
}

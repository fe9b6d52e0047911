//! Resets the connections that are led here while a server stops.

use std::os::fd::OwnedFd;

use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::accept::accept;
use tunnel_runtime::log_once::LogRarely;

use super::redirect::REDIRECT;

/// Resets every connection to this listening socket until the result is dropped. While a server drains, its routing rules stay
/// for open connections, and route new ones here too. Without a listener an IPv4 client would get no answer: the kernel sends no
/// RST from an address that is not local.
pub(crate) fn refuse(socket: OwnedFd) -> Option<AbortOnDropHandle<()>> {
    let listener = TcpListener::from_std(socket.into()).inspect_err(|error| {
        tracing::warn!(%error, "failed to reset connections by route while draining, they get no answer");
    });
    Some(AbortOnDropHandle::new(tokio::spawn(reset_all(listener.ok()?))))
}

async fn reset_all(listener: TcpListener) {
    let failing = LogRarely::default();
    loop {
        // An accepted socket has inherited that its end is a reset.
        drop(accept(|| listener.accept(), REDIRECT, &failing).await);
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpStream;
    use tunnel_link::relay::prepare_socket;

    use super::*;

    #[tokio::test]
    async fn every_client_is_reset() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        prepare_socket(&listener);
        let address = listener.local_addr().unwrap();
        let _refusing = refuse(listener.into()).unwrap();
        for _ in 0..2 {
            let error = match TcpStream::connect(address).await {
                Ok(mut client) => client.read(&mut [0_u8]).await.unwrap_err(),
                // The reset came first.
                Err(error) => error,
            };
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
    }
}

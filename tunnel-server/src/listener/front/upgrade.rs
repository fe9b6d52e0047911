//! Connections that were upgraded from HTTP to another protocol, such as SPDY or WebSocket for `kubectl exec`.

use std::io;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, split};
use tunnel_link::relay::{Copying, Side, Traffic};
use tunnel_runtime::error::chain;

use super::body::Exchange;
use crate::listener::socket::Watched;

/// Bytes copied at a time in each direction.
const BUFFER: usize = 16 << 10;

/// A connection that has changed its protocol, for a client that is being told so.
pub(super) struct Upgraded {
    pub(super) client: OnUpgrade,
    pub(super) target: OnUpgrade,
    pub(super) exchange: Exchange,
}

impl Upgraded {
    /// Relays bytes both ways until both ends have ended. Bytes that one end sent before the other had switched come first:
    /// hyper keeps them.
    pub(super) async fn run(self, watched: Watched) {
        let Self { client, target, exchange } = self;
        let target = match target.await {
            Ok(target) => target,
            Err(error) => return exchange.broken(&chain(&error)),
        };
        let Ok(client) = client.await else { return exchange.abandoned() };
        let (mut client, mut target) = (TokioIo::new(client), TokioIo::new(target));
        let ended = tokio::select! {
            biased;
            ended = copy(&mut client, &mut target) => ended,
            // Also while a client that does not read keeps the copying from noticing.
            failed = exchange.record.aborted() => return exchange.broken(&failed.reason),
            // Also while the target is silent: after the client's FIN the copying does not see a reset.
            _ = watched.lost() => return exchange.abandoned(),
        };
        match ended {
            Ok(()) => exchange.complete(),
            // The error does not tell which end it was. The pipe knows if it was the target's.
            Err(error) => exchange.severed(&error, &watched).await,
        }
    }
}

/// Copies both ways until both directions have ended, as [`Copying::run`].
///
/// # Errors
/// An end failed.
async fn copy(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    target: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<()> {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_target, mut to_target) = split(target);
    // Nobody reads it: the pipe counts the bytes.
    let traffic = Traffic::default();
    // After a failed write, a read from the pipe fails too, once everything has been read.
    let copying = Copying { traffic: &traffic, side: Side::Server, piece: BUFFER, trusts_end: true };
    let copied = copying.run((&mut from_client, &mut to_client), (&mut from_target, &mut to_target)).await;
    copied.map_err(|(_, error)| error)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::net::{TcpListener, TcpStream};
    use tunnel_link::relay::{flushed, pipe, reset_on_drop};

    use super::*;

    #[tokio::test]
    async fn what_a_target_sent_before_its_reset_arrives_though_the_client_still_sends() {
        // The last piece does not fill the buffer.
        const SENT: usize = 40_000;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut sender, _) = listener.accept().await.unwrap();
        sender.write_all(&[7; SENT]).await.unwrap();
        // The reset would overtake what has not arrived.
        flushed(&sender).await;
        reset_on_drop(&sender);
        drop(sender);
        let (mut target, far) = pipe();
        let traffic = Traffic::default();
        let relaying = far.run_to_socket(&mut dialled, &traffic, pending());
        // The answer does not fit in.
        let (client, mut accepted) = duplex(4 << 10);
        let (mut answer, mut upload) = split(client);
        let copying = async move { copy(&mut accepted, &mut target).await };
        let uploading = async { while upload.write_all(&[1; 1 << 10]).await.is_ok() {} };
        let mut arrived = Vec::new();
        let all = async { tokio::join!(relaying, copying, uploading, answer.read_to_end(&mut arrived)) };
        let ((), ended, (), _) = tokio::time::timeout(Duration::from_secs(30), all).await.expect("it ends");
        assert_eq!((ended.unwrap_err().kind(), arrived.len()), (io::ErrorKind::ConnectionReset, SENT));
    }
}

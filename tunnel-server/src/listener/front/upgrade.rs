//! Connections that were upgraded from HTTP to another protocol, such as SPDY or WebSocket for `kubectl exec`.

use std::io;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy as discard, sink, split};
use tokio::sync::SetOnce;
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

/// Copies both ways until both directions have ended. The client gets everything that the target sent before a failure.
/// [`tokio::io::copy_bidirectional`] drops what it has read ahead then.
///
/// # Errors
/// An end failed.
async fn copy(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    target: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<()> {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_target, mut to_target) = split(target);
    let answered = SetOnce::new();
    let up = async {
        let mut piece = vec![0; BUFFER];
        loop {
            let length = from_client.read(&mut piece).await?;
            let passed = pass(&piece[..length], &mut to_target).await;
            if passed.is_err() {
                // A client may write everything before it reads the answer.
                let mut nowhere = sink();
                tokio::select! {
                    _ = answered.wait() => {}
                    discarded = discard(&mut from_client, &mut nowhere) => discarded.map(drop)?,
                }
            }
            if length == 0 || passed.is_err() {
                return Ok::<_, io::Error>(passed);
            }
        }
    };
    let down = async {
        let mut piece = vec![0; BUFFER];
        loop {
            // After a failed write this fails too, once everything has been read.
            let length = from_target.read(&mut piece).await?;
            pass(&piece[..length], &mut to_client).await?;
            if length == 0 {
                let _ = answered.set(());
                return Ok::<_, io::Error>(());
            }
        }
    };
    let (passed, ()) = tokio::try_join!(up, down)?;
    passed
}

/// Writes a piece, or the end of file if it is empty.
async fn pass(piece: &[u8], to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    if piece.is_empty() {
        return to.shutdown().await;
    }
    to.write_all(piece).await?;
    to.flush().await
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use tokio::io::duplex;
    use tokio::net::{TcpListener, TcpStream};
    use tunnel_link::relay::{Traffic, flushed, pipe, reset_on_drop};

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

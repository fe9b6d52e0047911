//! Connections that this server dials itself, to targets that are not on edge nodes.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Side, Totals, connect_target, copy, end_on_drop, flushed, lost, reset_on_drop};
use tunnel_runtime::net::lookup_holding;

use super::access_log::AccessLogGuard;
use super::context::Failed;
use super::socket::PrefixedSocket;

/// Maximum time to connect, the same as agents'.
pub(super) const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Limits concurrent name lookups. Two threads wait for each, for half a minute if no name server answers, and other
/// work needs such threads too: the redirect's BPF programs take this process for dead if its heartbeat waits behind
/// callers' lookups.
static LOOKUPS: Semaphore = Semaphore::const_new(64);

/// Returns the addresses of a host from this host's resolver.
///
/// # Errors
/// The host is unknown, or was not resolved within the time for a dial ([`io::ErrorKind::TimedOut`]).
pub(super) async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    resolve_in_turn(host, port, &LOOKUPS).await
}

async fn resolve_in_turn(host: &str, port: u16, turns: &'static Semaphore) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let looked_up = async move {
        // Held until the resolver answers, even if nobody waits for that any more.
        let turn = Arc::new(turns.acquire().await.map_err(io::Error::other)?);
        lookup_holding(host, port, &turn).await
    };
    let looked_up = tokio::time::timeout(DIAL_TIMEOUT, looked_up).await;
    looked_up.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "i/o timeout")))
}

/// Connects to a target.
///
/// # Errors
/// The dial failed or timed out; the error holds the outcome.
pub(super) async fn connect(target: SocketAddr) -> Result<TcpStream, Failed> {
    let failed = |outcome, why: &dyn std::fmt::Display| Failed {
        outcome,
        reason: format!("dial tcp {target}: {why}"),
    };
    match tokio::time::timeout(DIAL_TIMEOUT, connect_target(target, None)).await {
        Ok(Ok(socket)) => Ok(socket),
        Ok(Err(error)) => match error.kind() {
            std::io::ErrorKind::ConnectionRefused => Err(failed(Outcome::Refused, &"connection refused")),
            std::io::ErrorKind::TimedOut => Err(failed(Outcome::TimedOut, &"i/o timeout")),
            _ => Err(failed(Outcome::Unreachable, &error)),
        },
        Err(_) => Err(failed(Outcome::TimedOut, &format!("i/o timeout after {} s", DIAL_TIMEOUT.as_secs()))),
    }
}

/// Relays until both directions have ended, `gone` completes, or the server stops. Resets the target unless everything
/// went well.
pub(super) async fn pump(
    mut socket: TcpStream,
    record: &AccessLogGuard,
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    gone: impl Future<Output = ()>,
) -> Result<(), Failed> {
    let (abort, traffic) = record.relaying(None, &Totals::default());
    let ending = async {
        tokio::select! {
            () = record.forced().cancelled() => (Outcome::Shutdown, ""),
            aborted = abort.triggered() => aborted,
        }
    };
    tokio::select! {
        biased;
        ended = copy(&mut socket, read, write, &traffic, Side::Server) => {
            ended.map_err(|(outcome, reason)| Failed { outcome, reason })
        }
        () = gone => Err(Failed {
            outcome: Outcome::ClientReset,
            reason: "the caller has gone".to_owned(),
        }),
        (outcome, reason) = ending => Err(Failed {
            outcome,
            reason: if reason.is_empty() { "this server stops" } else { reason }.to_owned(),
        }),
    }
}

/// Relays a client's socket, after bytes that were already read from it.
pub(super) async fn relay(
    client: TcpStream,
    target: TcpStream,
    prefix: Bytes,
    record: &AccessLogGuard,
) -> Result<(), Failed> {
    let client = Arc::new(client);
    let (mut read, mut write) = split(PrefixedSocket::new(client.clone(), prefix));
    // Until both directions have ended well.
    reset_on_drop(&*client);
    // After the client's FIN the copy reads no more from it, so it does not see a reset.
    let gone = async { drop(lost(&client).await) };
    let ended = pump(target, record, &mut read, &mut write, gone).await;
    match &ended {
        Ok(()) => end_on_drop(&*client),
        // A reset discards unsent data.
        Err(failed) if failed.outcome == Outcome::TargetReset => record.unless_ended(flushed(&*client)).await,
        Err(_) => {}
    }
    ended
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;
    use crate::listener::context::{ListenerContext, OpenRequest};

    #[tokio::test]
    async fn a_client_that_has_gone_ends_a_connection_to_a_silent_target() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let target = TcpStream::connect(address).await.unwrap();
        let (_silent, _) = listener.accept().await.unwrap();
        let context = ListenerContext::without_nodes();
        let request = OpenRequest::new("edge-1".parse().unwrap(), address);
        let record = AccessLogGuard::new("test", from, &request, &context);
        let mut relaying = std::pin::pin!(relay(accepted, target, Bytes::new(), &record));
        let second = Duration::from_secs(1);
        client.shutdown().await.unwrap();
        assert!(tokio::time::timeout(second, relaying.as_mut()).await.is_err(), "it may wait for an answer");
        SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
        drop(client);
        let ended = tokio::time::timeout(30 * second, relaying).await.expect("it ends with its client");
        assert_eq!(ended.unwrap_err().outcome, Outcome::ClientReset);
    }

    #[tokio::test]
    async fn the_last_bytes_before_a_targets_reset_arrive() {
        const SENT: usize = 32 << 10;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpSocket::new_v4().unwrap();
        // Most of the bytes wait in the server's kernel.
        client.set_recv_buffer_size(4096).unwrap();
        let mut client = client.connect(address).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let dialled = TcpStream::connect(address).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        target.write_all(&[7; SENT]).await.unwrap();
        SockRef::from(&target).set_linger(Some(Duration::ZERO)).unwrap();
        let context = ListenerContext::without_nodes();
        let request = OpenRequest::new("edge-1".parse().unwrap(), address);
        let record = AccessLogGuard::new("test", from, &request, &context);
        let mut relaying = std::pin::pin!(relay(accepted, dialled, Bytes::new(), &record));
        // The reset would overtake what has not been read.
        flushed(&target).await;
        drop(target);
        let early = tokio::time::timeout(Duration::from_millis(500), relaying.as_mut()).await;
        assert!(early.is_err(), "it waits for the client: {early:?}");
        let mut read = Vec::new();
        let (ended, _) = tokio::join!(relaying, client.read_to_end(&mut read));
        assert_eq!((ended.unwrap_err().outcome, read.len()), (Outcome::TargetReset, SENT));
    }

    #[tokio::test]
    async fn what_was_read_before_is_freed_once_the_target_has_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let _client = TcpStream::connect(address).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let dialled = TcpStream::connect(address).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        let context = ListenerContext::without_nodes();
        let request = OpenRequest::new("edge-1".parse().unwrap(), address);
        let record = AccessLogGuard::new("test", from, &request, &context);
        let held: Arc<[u8]> = Arc::from(&b"hello"[..]);
        let prefix = Bytes::from_owner(held.clone());
        let mut relaying = std::pin::pin!(relay(accepted, dialled, prefix, &record));
        let mut arrived = [0; 5];
        tokio::select! {
            ended = relaying.as_mut() => panic!("{ended:?}"),
            read = target.read_exact(&mut arrived) => assert_eq!(read.unwrap(), 5),
        }
        assert_eq!((&arrived, Arc::strong_count(&held)), (b"hello", 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_waits_for_its_turn_and_an_address_for_nothing() {
        let turns: &'static Semaphore = Box::leak(Box::new(Semaphore::new(1)));
        let held = turns.acquire().await.unwrap();
        let late = resolve_in_turn("localhost", 80, turns).await.unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let address = resolve_in_turn("fd00::7", 80, turns).await.unwrap();
        assert_eq!(address, ["[fd00::7]:80".parse().unwrap()]);
        drop(held);
        assert_eq!(turns.available_permits(), 1, "nothing waits for an answer that nobody wants");
    }
}

//! Accepts connections despite temporary errors, such as a full file descriptor table.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::watch;

use crate::log_once::LogRarely;
use crate::net::refine;

/// Pause before the next attempt when the process or the host is out of resources.
const PAUSE: Duration = Duration::from_millis(100);

/// Tells listeners whether to accept. While they do not, connections wait in them, or are accepted by another process
/// that has the same listeners.
#[derive(Clone, Debug)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    pub fn new(open: bool) -> Self {
        Self(Arc::new(watch::Sender::new(open)))
    }

    pub fn set(&self, open: bool) {
        self.0.send_replace(open);
    }

    /// Waits until it is open.
    pub async fn opened(&self) {
        // This never fails, because the gate holds the sender.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }

    pub fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it is closed.
    pub async fn closed(&self) {
        let _ = self.0.subscribe().wait_for(|open| !*open).await;
    }

    pub fn guard(&self, listener: TcpListener) -> Gated {
        Gated { listener, failing: LogRarely::default(), open: self.0.subscribe(), _gate: self.clone() }
    }
}

/// A listener behind a [`Gate`].
#[derive(Debug)]
pub struct Gated {
    listener: TcpListener,
    failing: LogRarely,
    open: watch::Receiver<bool>,
    /// Keeps the sender, so that waiting never fails.
    _gate: Gate,
}

impl AsFd for Gated {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Gated {
    /// Returns the next connection. Errors are logged, and do not end the wait.
    pub async fn accept(&mut self, listener: &'static str) -> (TcpStream, SocketAddr) {
        loop {
            if self.open.wait_for(|open| *open).await.is_err() {
                return pending().await;
            }
            tokio::select! {
                biased;
                _ = self.open.changed() => {}
                accepted = accept(|| self.listener.accept(), listener, &self.failing) => return accepted,
            }
        }
    }
}

/// Returns the next connection of a socket. Errors are logged as rarely as `failing` says, and do not end the wait.
pub async fn accept<C, F: Future<Output = io::Result<C>>>(
    next: impl Fn() -> F,
    listener: &'static str,
    failing: &LogRarely,
) -> C {
    loop {
        match next().await {
            Ok(accepted) => return accepted,
            Err(error) if is_of_one_connection(&error) => {
                tracing::debug!(listener, %error, "connection lost before it was accepted");
            }
            Err(error) => {
                if let Some(left_out) = failing.due(Instant::now()) {
                    tracing::error!(listener, %error, left_out, "failed to accept a connection, check the limit of open files (ulimit -n)");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Resets every connection to this listening socket, TCP or Unix, until dropped.
pub async fn reset_all(socket: OwnedFd, listener: &'static str) {
    if let Err(error) = reset_each(socket, listener).await {
        tracing::warn!(listener, %error, "failed to reset connections, they get no answer");
    }
}

async fn reset_each(socket: OwnedFd, listener: &'static str) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    let failing = LogRarely::default();
    if socket_domain(&socket)? == AddressFamily::UNIX {
        let socket = UnixListener::from_std(socket.into())?;
        loop {
            drop(accept(|| socket.accept(), listener, &failing).await);
        }
    }
    let socket = TcpListener::from_std(socket.into())?;
    loop {
        let (accepted, _) = accept(|| socket.accept(), listener, &failing).await;
        // Otherwise its end is an end of file, which a client could take for an answer.
        refine("SO_LINGER", SockRef::from(&accepted).set_linger(Some(Duration::ZERO)));
    }
}

/// True for an error of the connection that was about to be accepted, not of the listener (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted, TimedOut};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted | TimedOut)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn every_client_is_reset() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _resetting = tokio::spawn(reset_all(listener.into(), "test"));
        for _ in 0..2 {
            let error = match TcpStream::connect(address).await {
                Ok(mut client) => client.read(&mut [0_u8]).await.unwrap_err(),
                // The reset came first.
                Err(error) => error,
            };
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let _resetting = tokio::spawn(reset_all(listener.into(), "test"));
        for _ in 0..2 {
            let mut client = UnixStream::connect(&path).await.unwrap();
            assert_eq!(client.read(&mut [0_u8]).await.unwrap(), 0);
        }
    }

    #[tokio::test]
    async fn connections_wait_while_the_gate_is_closed() {
        let gate = Gate::new(false);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut gated = gate.guard(listener);
        let client = TcpStream::connect(address).await.unwrap();
        let closed = tokio::time::timeout(Duration::from_millis(50), gated.accept("test")).await;
        assert!(closed.is_err(), "accepted behind a closed gate");
        gate.set(true);
        let (_, peer) = gated.accept("test").await;
        assert_eq!(peer, client.local_addr().unwrap());
        let waiting = tokio::spawn(async move { gated.accept("test").await });
        gate.set(false);
        let second = TcpStream::connect(address).await.unwrap();
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        gate.set(true);
        assert_eq!(waiting.await.unwrap().1, second.local_addr().unwrap());
    }
}

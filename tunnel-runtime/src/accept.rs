//! Accepts connections despite temporary errors, such as a full file descriptor table.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::log_once::LogRarely;

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

/// True for an error of the connection that was about to be accepted, not of the listener (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted, TimedOut};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted | TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

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

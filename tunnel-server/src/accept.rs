//! Accepting connections in spite of temporary errors, such as a full table of file descriptors.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// How long to wait when the process or the host is out of resources for another connection.
const PAUSE: Duration = Duration::from_millis(100);

/// The next connection. Errors are logged, and do not end the wait.
pub(crate) async fn accept(listener: &TcpListener, door: &'static str) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if is_of_one_connection(&error) => {
                tracing::debug!(door, %error, "connection lost in accept");
            }
            Err(error) => {
                tracing::error!(door, %error, "cannot accept; is the limit of open files (ulimit -n) too low?");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Errors that belong to the connection that was about to be accepted, not to the listener (accept(2)).
fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted, TimedOut};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted | TimedOut)
}

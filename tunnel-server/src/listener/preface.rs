//! Reads the first bytes of a client, and answers a client that is turned away.

use std::fmt::Display;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::context::OpenError;

/// Maximum time in which a client has to send its first bytes, which name the node.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum pause in what a client still sends after its last answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time for a client to read its last answer and to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) enum PrefaceError<E> {
    Invalid(E),
    TimedOut,
    /// The socket failed or was closed.
    Lost(OpenError),
}

/// Reads into `read` until `parse` returns a value. `what` names it in errors.
pub(super) async fn read_preface<T, E>(
    socket: &mut (impl AsyncRead + Unpin),
    read: &mut BytesMut,
    what: &str,
    mut parse: impl FnMut(&[u8]) -> Result<Option<T>, E>,
) -> Result<T, PrefaceError<E>> {
    let reading = async {
        loop {
            if let Some(parsed) = parse(read).map_err(PrefaceError::Invalid)? {
                return Ok(parsed);
            }
            read.reserve(2048);
            if socket.read_buf(read).await.map_err(|error| PrefaceError::Lost(error.into()))? == 0 {
                let reason = format!("closed before a whole {what}");
                return Err(PrefaceError::Lost(OpenError::Client(reason)));
            }
        }
    };
    tokio::time::timeout(READ_TIMEOUT, reading).await.unwrap_or(Err(PrefaceError::TimedOut))
}

/// Message for [`PrefaceError::TimedOut`].
pub(super) fn timed_out(what: &str) -> String {
    format!("no whole {what} within {} s", READ_TIMEOUT.as_secs())
}

/// Returns an answer over HTTP/1.1 after which the connection ends. `status` is what the status line says.
pub(super) fn last_answer(status: impl Display, reason: &str) -> String {
    let body = format!("tunnel-server: {reason}\n");
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Sends a last `message` to a client, and gives it time to read what it was sent. It may still be sending a body that
/// nobody wants: bytes that are unread at the close, or arrive later, make the kernel reset the connection, and the
/// reset may overtake the answer (RFC 9112, section 9.6).
pub(super) async fn answer(socket: &mut TcpStream, message: &[u8]) {
    let answering = async {
        socket.write_all(message).await?;
        socket.shutdown().await?;
        // On the heap: inside the future it would take memory of every connection.
        let mut rest = vec![0; 4096];
        while tokio::time::timeout(ANSWER_TIMEOUT, socket.read(&mut rest)).await?? > 0 {}
        std::io::Result::Ok(())
    };
    if !matches!(tokio::time::timeout(CLOSE_TIMEOUT, answering).await, Ok(Ok(()))) {
        tracing::debug!("client did not read the last answer");
    }
}

//! HTTP/1.1 answers to a client whose connection fails before anything was relayed.

use http::StatusCode;
use tokio::net::TcpStream;
use tunnel_core::outcome::Outcome;

use super::preface;

/// Returns the status for a failure on the way to the target.
pub(super) fn status_of(outcome: Outcome) -> StatusCode {
    match outcome {
        Outcome::NoTunnel | Outcome::Busy | Outcome::Shutdown => StatusCode::SERVICE_UNAVAILABLE,
        Outcome::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        Outcome::Denied => StatusCode::FORBIDDEN,
        _ => StatusCode::BAD_GATEWAY,
    }
}

/// Answers and closes the connection. `more` holds further header lines.
pub(super) async fn refuse(socket: &mut TcpStream, status: StatusCode, more: &str, reason: &str) {
    let body = format!("tunnel-server: {reason}\n");
    let answer = format!(
        "HTTP/1.1 {status}\r\n{more}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    preface::answer(socket, answer.as_bytes()).await;
}

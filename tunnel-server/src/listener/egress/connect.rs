//! HTTP/1.1 CONNECT, one request for each connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tunnel_link::outcome::Outcome;
use tunnel_runtime::text::printable;

use super::dial::{Dialler, EgressClient};
use super::halves::{Over, Writer, closed, hung_up};
use crate::listener::answer::status_of;
use crate::listener::preface::{PrefaceError, last_answer, read_preface, timed_out};

/// Maximum length of a request's head, in bytes.
const LONGEST_HEAD: usize = 16 << 10;
const MOST_HEADERS: usize = 64;
/// Maximum number of bytes read from a caller before the connection is up.
const EARLY: usize = 64 << 10;
const HEAD: &str = "CONNECT request";
/// Interval at which to check that a caller that sends no more is still there, while its target is dialled.
const CHECK: Duration = Duration::from_millis(50);

/// Target of a request, and the length of its head.
#[derive(Debug, PartialEq, Eq)]
struct ConnectRequest {
    target: String,
    length: usize,
}

/// Parses a head. Returns `None` if it is not complete yet.
fn parse(read: &[u8]) -> Result<Option<ConnectRequest>, (StatusCode, String)> {
    let bad = |reason: String| (StatusCode::BAD_REQUEST, reason);
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(read) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if read.len() < LONGEST_HEAD => return Ok(None),
        Ok(httparse::Status::Partial) => {
            return Err(bad(format!("the request's head is larger than {LONGEST_HEAD} bytes")));
        }
        Err(error) => return Err(bad(format!("this is neither gRPC nor HTTP/1.1: {error}"))),
    };
    let method = request.method.unwrap_or_default();
    if method != "CONNECT" {
        let reason = format!("{} is not served here: use CONNECT HOST:PORT", printable(method, 20));
        return Err((StatusCode::METHOD_NOT_ALLOWED, reason));
    }
    // A client that frames a body means something else by CONNECT (RFC 9110 section 9.3.6).
    let framed = request.headers.iter().any(|header| {
        header.name.eq_ignore_ascii_case("transfer-encoding")
            || (header.name.eq_ignore_ascii_case("content-length") && header.value != b"0")
    });
    if framed {
        return Err(bad("a CONNECT request has no body".to_owned()));
    }
    Ok(Some(ConnectRequest { target: request.path.unwrap_or_default().to_owned(), length }))
}

/// Serves one connection from its head to its end.
pub(super) async fn serve(
    dialler: &Dialler,
    caller: &EgressClient,
    mut read: impl AsyncRead + Unpin,
    mut write: impl Writer,
    watched: Arc<OwnedFd>,
    mut early: BytesMut,
) -> Over {
    let request = match read_preface(&mut read, &mut early, HEAD, parse).await {
        Ok(request) => request,
        Err(PrefaceError::Lost(_)) => return Over::Lost,
        Err(PrefaceError::Invalid((status, reason))) => return refuse(&mut write, status, &reason).await,
        Err(PrefaceError::TimedOut) => {
            return refuse(&mut write, StatusCode::REQUEST_TIMEOUT, &timed_out(HEAD)).await;
        }
    };
    let _ = early.split_to(request.length);
    let gone = until_gone(&mut read, &mut early, &watched);
    let connected = match dialler.dial(&request.target, caller, gone).await {
        Ok(connected) => connected,
        Err(failed) => return refuse(&mut write, status_of(failed.outcome), &failed.in_words_of_go()).await,
    };
    let head = b"HTTP/1.1 200 Connection Established\r\n\r\n";
    let up = write.send_alone(head).await;
    let mut read = io::Cursor::new(early.freeze()).chain(read);
    let gone = async {
        if up.is_ok() {
            closed(&watched).await;
        }
    };
    // The access log has the result; the client cannot be told.
    match connected.run(&mut read, &mut write, gone).await {
        Ok(()) => Over::Ended,
        Err(failed) if failed.outcome == Outcome::TargetReset => Over::BrokenOff,
        Err(_) => Over::Lost,
    }
}

/// Reads what a caller sends before it gets an answer, and completes when it has gone. A caller that has only closed
/// its half still waits for the answer.
async fn until_gone(read: &mut (impl AsyncRead + Unpin), early: &mut BytesMut, watched: &OwnedFd) {
    while early.len() < EARLY {
        early.reserve(2048);
        match read.read_buf(early).await {
            Ok(0) => return hung_up(watched, CHECK).await,
            Err(_) => return,
            Ok(_) => {}
        }
    }
    std::future::pending::<()>().await;
}

/// Answers with an error. The reason is also in the status line, which is all that kube-apiserver shows.
async fn refuse(write: &mut impl Writer, status: StatusCode, reason: &str) -> Over {
    let answer = last_answer(format_args!("{} {}", status.as_u16(), printable(reason, 300)), reason);
    let told = async {
        write.write_all(answer.as_bytes()).await?;
        write.shutdown().await
    };
    if told.await.is_ok() { Over::Ended } else { Over::Lost }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connect_is_taken() {
        let head = b"CONNECT edge-1:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
        let request = ConnectRequest { target: "edge-1:10250".to_owned(), length: head.len() };
        assert_eq!(parse(head), Ok(Some(request)));
        for end in 0..head.len() {
            assert_eq!(parse(&head[..end]), Ok(None), "{end}");
        }
        for (head, status) in [
            ("GET / HTTP/1.1\r\n\r\n", StatusCode::METHOD_NOT_ALLOWED),
            ("\x16\x03\x01", StatusCode::BAD_REQUEST),
            ("CONNECT a:1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", StatusCode::BAD_REQUEST),
            ("CONNECT a:1 HTTP/1.1\r\nContent-Length: 3\r\n\r\n", StatusCode::BAD_REQUEST),
        ] {
            assert_eq!(parse(head.as_bytes()).unwrap_err().0, status, "{head:?}");
        }
        let endless = [b"CONNECT a:1 HTTP/1.1\r\nA: ".as_slice(), &[b'a'; LONGEST_HEAD]].concat();
        assert_eq!(parse(&endless).unwrap_err().0, StatusCode::BAD_REQUEST);
    }
}

//! Carrying one connection: may the target be dialled, dial it with a deadline, pump.

use std::future::{poll_fn, ready};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use tokio::net::TcpStream;
use tonic::{Code, Status};
use tunnel_core::carry::{Abort, Relay, Side, TARGET_HEADER, Traffic, prepare_socket};
use tunnel_core::outcome::Outcome;

use crate::session::SessionState;

/// A dial's deadline when the server names none.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);
/// The longest deadline that a server may name.
const LONGEST_DEADLINE: Duration = Duration::from_secs(60);

/// Answers one Carry stream, from the request to the end of both directions.
pub(crate) async fn carry(
    session: Arc<SessionState>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let wish = wish(request.headers());
    let inbound = request.into_body();
    let started = Instant::now();
    let connection = session.connection();
    let dialled = tokio::select! {
        dialled = dial(&session, wish) => dialled,
        // The caller gave up: so does the dial.
        _ = poll_fn(|cx| respond.poll_reset(cx)) => {
            session.metrics.dialled("cancelled", started.elapsed());
            return;
        }
    };
    let (target, mut socket) = match dialled {
        Ok(dialled) => dialled,
        Err(refusal) => {
            session.metrics.dialled(refusal.label(), started.elapsed());
            tracing::info!(server = %session.server, reason = %refusal, "connection refused");
            refuse(&mut respond, &refusal);
            return;
        }
    };
    session.metrics.dialled("ok", started.elapsed());
    let mut send = match accept(&mut respond) {
        Ok(send) => send,
        Err(error) => {
            tracing::debug!(%error, "the server went away while the target was dialled");
            return;
        }
    };
    let abort = Arc::new(Abort::default());
    let traffic = Traffic::part_of(vec![session.metrics.carried.clone()]);
    let relay = Relay { side: Side::Agent, stalls: &session.stalls, abort: &abort, traffic: &traffic };
    let stop = session.stop.clone();
    let ended = {
        let mut run = std::pin::pin!(relay.run(&mut socket, Bytes::new(), &mut send, ready(Ok(inbound))));
        tokio::select! {
            ended = &mut run => ended,
            () = stop.cancelled() => {
                abort.trigger(Outcome::Shutdown);
                run.await
            }
        }
    };
    let outcome = ended.as_ref().map_or_else(|broken| broken.outcome(Side::Agent), |()| Outcome::Ok);
    session.metrics.ended(outcome);
    tracing::debug!(
        server = %session.server,
        %target,
        to_target = traffic.to_socket(),
        from_target = traffic.from_socket(),
        duration_ms = started.elapsed().as_millis() as u64,
        %outcome,
        error = ended.err().map(tracing::field::display),
        "connection"
    );
    drop(connection);
}

/// Why a target was not connected.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{TARGET_HEADER} is not an IP address and port: {0:?}")]
    NotAnAddress(String),
    #[error("{target} may not be dialled here: {reason}")]
    Denied { target: SocketAddr, reason: String },
    #[error("{0} dials are pending already")]
    Busy(usize),
    #[error("{target} timed out after {} s", after.as_secs_f32())]
    TimedOut { target: SocketAddr, after: Duration },
    #[error("connection refused by {0}")]
    Refused(SocketAddr),
    #[error("{target} is unreachable from the node: {error}")]
    Unreachable { target: SocketAddr, error: io::Error },
}

impl Refusal {
    const fn code(&self) -> Code {
        match self {
            Self::NotAnAddress(_) => Code::InvalidArgument,
            Self::Denied { .. } => Outcome::Denied.code(),
            Self::Busy(_) => Outcome::Busy.code(),
            Self::TimedOut { .. } => Outcome::TimedOut.code(),
            Self::Refused(_) => Outcome::Refused.code(),
            Self::Unreachable { .. } => Outcome::Unreachable.code(),
        }
    }

    const fn label(&self) -> &'static str {
        match self {
            Self::NotAnAddress(_) => Outcome::Protocol.as_str(),
            _ => Outcome::from_code(self.code()).as_str(),
        }
    }

    fn of(target: SocketAddr, deadline: Duration, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Self::Refused(target),
            io::ErrorKind::TimedOut => Self::TimedOut { target, after: deadline },
            _ => Self::Unreachable { target, error },
        }
    }
}

/// The target and the deadline.
fn wish(headers: &HeaderMap) -> Result<(SocketAddr, Duration), Refusal> {
    let named = headers.get(TARGET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    let target: SocketAddr =
        std::str::from_utf8(named).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
            Refusal::NotAnAddress(String::from_utf8_lossy(&named[..named.len().min(64)]).into_owned())
        })?;
    let deadline = headers
        .get("grpc-timeout")
        .and_then(|value| parse_timeout(value.as_bytes()))
        .unwrap_or(DEFAULT_DEADLINE)
        .min(LONGEST_DEADLINE);
    Ok((target, deadline))
}

async fn dial(
    session: &SessionState,
    wish: Result<(SocketAddr, Duration), Refusal>,
) -> Result<(SocketAddr, TcpStream), Refusal> {
    let (target, deadline) = wish?;
    session
        .policy
        .check(target, &session.loopback_ports())
        .map_err(|denied| Refusal::Denied { target, reason: denied.to_string() })?;
    let _pending = session.pending.try_acquire().map_err(|_| Refusal::Busy(session.pending_limit()))?;
    let socket = tokio::time::timeout(deadline, TcpStream::connect(target))
        .await
        .map_err(|_| Refusal::TimedOut { target, after: deadline })?
        .map_err(|error| Refusal::of(target, deadline, error))?;
    prepare_socket(&socket).map_err(|error| Refusal::Unreachable { target, error })?;
    Ok((target, socket))
}

/// `grpc-timeout`: up to eight digits and a unit (gRPC over HTTP/2, "Requests").
fn parse_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let amount: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(amount * 3600),
        b'M' => Duration::from_secs(amount * 60),
        b'S' => Duration::from_secs(amount),
        b'm' => Duration::from_millis(amount),
        b'u' => Duration::from_micros(amount),
        b'n' => Duration::from_nanos(amount),
        _ => return None,
    })
}

fn accept(respond: &mut SendResponse<Bytes>) -> Result<SendStream<Bytes>, h2::Error> {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    respond.send_response(response, false)
}

/// Answers with a status only, which tells the server that nothing was connected.
fn refuse(respond: &mut SendResponse<Bytes>, refusal: &Refusal) {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let status = Status::new(refusal.code(), refusal.to_string());
    if status.add_header(response.headers_mut()).is_err() || respond.send_response(response, true).is_err() {
        respond.send_reset(Reason::CANCEL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_says() {
        assert_eq!(parse_timeout(b"5000m"), Some(Duration::from_secs(5)));
        assert_eq!(parse_timeout(b"1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse_timeout(b"99999999n"), Some(Duration::from_nanos(99_999_999)));
        for bad in [&b""[..], b"m", b"5", b"-5S", b"123456789S", b"5x", "5µ".as_bytes()] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }
}

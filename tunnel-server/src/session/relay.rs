//! A connection on a link: the request, and the wait for the answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use tonic::{Code, Status};
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Relay, RelayError, Side, StallBound, TARGET_HEADER, Traffic};
use tunnel_runtime::text::printable;

use super::link::Link;

/// Time for an agent to connect to a target.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Time for which a link may leave a dial unacknowledged, plus twice its round-trip time.
const SILENCE: Duration = Duration::from_millis(2500);
/// Added to the dial deadline for the way through the tunnel; after both, the agent counts as hung.
const DIAL_GRACE: Duration = Duration::from_secs(3);

/// A connection that was requested on a link and has no answer yet.
pub(crate) struct Asked {
    pub(crate) response: ResponseFuture,
    pub(crate) send: SendStream<Bytes>,
    pub(crate) since: Instant,
}

/// The link and the limits for relaying a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct On<'a> {
    pub(crate) link: &'a Link,
    /// The peer that was asked, for errors.
    pub(crate) to: &'a str,
    /// Limits the bytes held for clients that do not read.
    pub(crate) stalls: &'a StallBound,
}

impl<'a> On<'a> {
    /// The relay of a client's socket.
    pub(crate) fn relay(self, abort: &'a Arc<Abort>, traffic: &'a Traffic) -> Relay<'a> {
        Relay { side: Side::Server, flow: &self.link.flow, stalls: self.stalls, abort, traffic }
    }
}

/// Requests a connection to `target` on the link. `to` names the peer, for errors.
///
/// # Errors
/// If the link can relay nothing any more, or nothing more at present.
pub(crate) async fn ask(
    link: &Link,
    to: &str,
    path: &str,
    target: SocketAddr,
    more: HeaderMap,
) -> Result<Asked, RelayError> {
    let request = relay_request(path, target, more)
        .map_err(|error| RelayError::Dial(Outcome::Protocol, error.to_string()))?;
    let mut stream = link.send.clone();
    std::future::poll_fn(|cx| stream.poll_ready(cx)).await.map_err(RelayError::Link)?;
    // Beyond the peer's limit h2 would queue the stream. One stream is the session's own.
    let most = stream.current_max_send_streams();
    if link.connections() as usize >= most {
        return Err(RelayError::Dial(Outcome::Busy, format!("{to} accepts no more than {most} streams")));
    }
    let (response, send) = stream.send_request(request, false).map_err(RelayError::Link)?;
    link.opened(response.stream_id().into());
    Ok(Asked { response, send, since: Instant::now() })
}

fn relay_request(path: &str, target: SocketAddr, more: HeaderMap) -> Result<Request<()>, http::Error> {
    let mut request = Request::builder()
        .method(Method::POST)
        .version(Version::HTTP_2)
        .uri(http::Uri::builder().scheme("https").authority("agent").path_and_query(path).build()?)
        .header(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"))
        .header(header::TE, HeaderValue::from_static("trailers"))
        .header("grpc-timeout", format!("{}S", DIAL_DEADLINE.as_secs()))
        .header(TARGET_HEADER, target.to_string())
        .body(())?;
    request.headers_mut().extend(more);
    Ok(request)
}

impl Asked {
    /// Returns the stream to the agent and the wait for its answer. `connected` gets the duration of the agent's dial.
    pub(crate) fn answer(
        self,
        on: On<'_>,
        target: SocketAddr,
        connected: impl FnOnce(Duration),
    ) -> (SendStream<Bytes>, impl Future<Output = Result<RecvStream, RelayError>>) {
        let Self { response, send, since } = self;
        // Boxed, so that its memory is freed once the agent has connected.
        let answer = Box::pin(async move {
            let answer = dialled(on.to, target, on.link, response).await;
            connected(since.elapsed());
            answer.map(Response::into_body)
        });
        (send, answer)
    }
}

/// Returns when the link has not even acknowledged for so long that its line must be down. A slow line acknowledges.
async fn silent(flow: &Flow) -> Duration {
    let mut pause = SILENCE;
    loop {
        tokio::time::sleep(pause).await;
        let patience = SILENCE + flow.rtt.last().unwrap_or_default() * 2;
        pause = match flow.silence().await {
            Some(silence) if silence.lasts >= patience => return silence.lasts,
            Some(silence) => patience - silence.lasts,
            None => SILENCE,
        };
    }
}

/// Waits for the answer: headers mean connected, a status has the reason of a failure. `to` names the peer.
pub(crate) async fn dialled(
    to: &str,
    target: SocketAddr,
    link: &Link,
    response: ResponseFuture,
) -> Result<Response<RecvStream>, RelayError> {
    let limit = DIAL_DEADLINE + DIAL_GRACE;
    let response = tokio::select! {
        response = tokio::time::timeout(limit, response) => response,
        silence = silent(&link.flow) => {
            link.note_unanswered();
            let reason = format!("the link to {to} has been silent for {:.1} s", silence.as_secs_f32());
            return Err(RelayError::Dial(Outcome::TimedOut, reason));
        }
    };
    let response = response.map_err(|_| {
        let reason = format!("{to} did not answer the dial of {target} within {} s", limit.as_secs());
        RelayError::Dial(Outcome::TimedOut, reason)
    })??;
    if response.status() != StatusCode::OK {
        let reason = format!("{to} answered with HTTP status {}", response.status());
        return Err(RelayError::Dial(Outcome::Protocol, reason));
    }
    match Status::from_header_map(response.headers()) {
        None => Ok(response),
        // The agent sends headers first, even for a target that closes immediately.
        Some(status) if status.code() == Code::Ok => {
            let reason = format!("{to} ended the stream without connecting");
            Err(RelayError::Dial(Outcome::Protocol, reason))
        }
        Some(status) => {
            let outcome = Outcome::from_code(status.code());
            let verb = match outcome {
                Outcome::TimedOut => "gave up",
                Outcome::Protocol => "answered",
                _ => "refused",
            };
            Err(RelayError::Dial(outcome, format!("{to} {verb}: {}", printable(status.message(), 300))))
        }
    }
}

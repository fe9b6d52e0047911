//! One TCP connection with an agent or with another server, and the connections on it: the request, and the wait for the
//! answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Relay, RelayError, Side, StallBound, TARGET_HEADER, Traffic};
use tunnel_runtime::text::printable;

/// Streams that a link opens before it is replaced. A client can open 2^30 streams on one HTTP/2 connection; the next
/// one would fail and end the link with everything on it, so it is replaced a little earlier.
pub const MOST_STREAMS: u32 = (1 << 30) - (1 << 20);

/// Time for an agent to connect to a target.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Time for which a link may leave a dial unacknowledged, plus twice its round-trip time.
const SILENCE: Duration = Duration::from_millis(2500);
/// Time for the agent's answer: the dial deadline, and 3 s for the way through the tunnel.
const ANSWER: Duration = DIAL_DEADLINE.saturating_add(Duration::from_secs(3));
/// No link receives this many bytes.
const NONE: u64 = u64::MAX;

/// Number of streams that a link opens before it is replaced.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    pub(crate) most: u32,
    /// Cancelled when that number is reached.
    pub(crate) spent: CancellationToken,
}

impl Streams {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, spent: CancellationToken::new() }
    }
}

/// One TCP connection with an agent.
#[derive(Debug)]
pub struct Link {
    /// 0 for the link with which the session begins and ends.
    pub number: u32,
    /// Measurements of its path.
    pub flow: Arc<Flow>,
    /// Cancelled when its connections have to end: with the link, with the session, or when the server's drain time is
    /// over. A token of its own, because every poll of a connection's task locks it.
    pub(crate) over: CancellationToken,
    pub(crate) send: SendRequest<Bytes>,
    /// Runtime of the thread that owns the link. Its streams and their sockets stay on that thread.
    pub(crate) worker: Handle,
    streams: Streams,
    connections: AtomicU32,
    /// Bytes received when a request was left unanswered, or [`NONE`]. Anything received later, even the answer to a PING,
    /// shows that the other end works.
    unanswered: AtomicU64,
}

impl Link {
    pub(crate) fn new(
        number: u32,
        flow: Arc<Flow>,
        over: CancellationToken,
        send: SendRequest<Bytes>,
        worker: Handle,
        streams: Streams,
    ) -> Arc<Self> {
        Arc::new(Self {
            number,
            flow,
            over,
            send,
            worker,
            streams,
            connections: AtomicU32::new(0),
            unanswered: AtomicU64::new(NONE),
        })
    }

    /// Number of connections on it now.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Records that the stream with this number was opened. A client's stream numbers are odd.
    pub(super) fn opened(&self, stream: u32) {
        if stream / 2 >= self.streams.most {
            self.streams.spent.cancel();
        }
    }

    /// Has it replaced.
    pub(super) fn spend(&self) {
        self.streams.spent.cancel();
    }

    /// True if it has opened as many streams as it may, or its certificate is over: it has to be replaced.
    pub(super) fn is_spent(&self) -> bool {
        self.streams.spent.is_cancelled()
    }

    /// Records that a request was left unanswered: the line may be down, or the other end frozen.
    pub(crate) fn note_unanswered(&self) {
        self.unanswered.store(self.flow.received(), Ordering::Relaxed);
    }

    /// True if it left a request unanswered and has received nothing since.
    pub(crate) fn is_silent(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) == self.flow.received()
    }

    /// Requests a connection to `target`. `to` names the peer, for errors.
    ///
    /// # Errors
    /// If the link can relay nothing any more, or nothing more at present.
    pub(crate) async fn ask(
        &self,
        to: &str,
        path: &str,
        target: SocketAddr,
        more: HeaderMap,
    ) -> Result<PendingStream, RelayError> {
        let request = relay_request(path, target, more)
            .map_err(|error| RelayError::Dial(Outcome::Protocol, error.to_string()))?;
        let mut stream = self.send.clone();
        std::future::poll_fn(|cx| stream.poll_ready(cx)).await.map_err(RelayError::Link)?;
        // Beyond the peer's limit h2 would queue the stream. One stream is the session's own.
        let most = stream.current_max_send_streams();
        if self.connections() as usize >= most {
            return Err(RelayError::Dial(Outcome::Busy, format!("{to} accepts no more than {most} streams")));
        }
        let (response, send) = stream.send_request(request, false).map_err(RelayError::Link)?;
        self.opened(response.stream_id().into());
        Ok(PendingStream { response, send, since: Instant::now() })
    }
}

/// A link with one more connection on it until this is dropped.
#[derive(Debug)]
pub struct Taken {
    link: Arc<Link>,
    /// Connections on all links of the session, including links that take no more.
    total: Arc<AtomicU32>,
}

impl Taken {
    pub(super) fn new(link: &Arc<Link>, total: &Arc<AtomicU32>) -> Self {
        link.connections.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(1, Ordering::Relaxed);
        Self { link: link.clone(), total: total.clone() }
    }
}

impl std::ops::Deref for Taken {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.link.connections.fetch_sub(1, Ordering::Relaxed);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that was requested on a link and has no answer yet.
pub(crate) struct PendingStream {
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

impl PendingStream {
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

/// Returns when the answer is late: with the length of the silence if the link has not even acknowledged for so long that its
/// line must be down (a slow line acknowledges), or `None` if the agent counts as hung. Both times share one timer, because every
/// dial pays for it.
async fn late(flow: &Flow) -> Option<Duration> {
    let deadline = tokio::time::Instant::now() + ANSWER;
    let mut pause = SILENCE;
    loop {
        let next = tokio::time::Instant::now() + pause;
        tokio::time::sleep_until(next.min(deadline)).await;
        if next >= deadline {
            return None;
        }
        let patience = SILENCE + flow.rtt.last().unwrap_or_default() * 2;
        pause = match flow.silence().await {
            Some(silence) if silence.lasts >= patience => return Some(silence.lasts),
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
    let response = tokio::select! {
        response = response => response?,
        late = late(&link.flow) => {
            let reason = match late {
                Some(silence) => {
                    link.note_unanswered();
                    format!("the link to {to} has been silent for {:.1} s", silence.as_secs_f32())
                }
                None => format!("{to} did not answer the dial of {target} within {} s", ANSWER.as_secs()),
            };
            return Err(RelayError::Dial(Outcome::TimedOut, reason));
        }
    };
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

#[cfg(test)]
mod tests {
    use std::future::pending;

    use h2::Reason;
    use h2::server::SendResponse;
    use tunnel_link::relay::RELAY_PATH;

    use super::super::links::tests::link;
    use super::*;

    #[tokio::test]
    async fn a_request_is_unanswered_until_something_arrives() {
        let link = link(0, Duration::from_millis(1)).await;
        assert!(!link.is_silent(), "nothing was asked");
        link.flow.add_received(700);
        link.note_unanswered();
        assert!(link.is_silent());
        link.flow.add_received(1);
        assert!(!link.is_silent());
        link.note_unanswered();
        assert!(link.is_silent());
    }

    /// Returns the answer that a client gets if the agent answers the stream like this.
    async fn heard<F: Future<Output = ()> + Send + 'static>(
        agent: impl FnOnce(SendResponse<Bytes>) -> F + Send + 'static,
    ) -> Result<(), (Outcome, String)> {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(far).await.unwrap();
            let (request, respond) = connection.accept().await.unwrap().unwrap();
            assert_eq!(
                (&request.headers()[TARGET_HEADER], &request.headers()["grpc-timeout"]),
                (&HeaderValue::from_static("192.0.2.1:10250"), &HeaderValue::from_static("5S"))
            );
            let drive = async { while connection.accept().await.is_some() {} };
            tokio::join!(agent(respond), drive)
        });
        let (send, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        let (flow, over) = (Arc::new(Flow::default()), CancellationToken::new());
        let link = Link::new(0, flow, over, send, Handle::current(), Streams::new(MOST_STREAMS));
        let (to, target) = ("the agent of edge-1", "192.0.2.1:10250".parse().unwrap());
        let stalls = StallBound::new(1 << 20, 1 << 16);
        let pending = link.ask(to, RELAY_PATH, target, HeaderMap::new()).await.unwrap();
        let (_send, answer) = pending.answer(On { link: &link, to, stalls: &stalls }, target, |_| ());
        let answered = answer.await.map(drop);
        answered.map_err(|error| (error.outcome(Side::Server), error.to_string()))
    }

    /// Sends headers that end the stream.
    fn ends(mut respond: SendResponse<Bytes>, status: StatusCode, grpc: Option<(&str, &str)>) {
        let mut response = Response::builder().status(status);
        if let Some((code, message)) = grpc {
            response = response.header("grpc-status", code).header("grpc-message", message);
        }
        respond.send_response(response.body(()).unwrap(), true).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn every_answer_but_headers_is_a_failure_with_its_reason() {
        let connected = heard(async |mut respond| {
            let _stream = respond.send_response(Response::new(()), false).unwrap();
            pending::<()>().await;
        });
        assert_eq!(connected.await, Ok(()));
        let http = heard(async |respond| ends(respond, StatusCode::SERVICE_UNAVAILABLE, None)).await;
        let reason = "the agent of edge-1 answered with HTTP status 503 Service Unavailable";
        assert_eq!(http, Err((Outcome::Protocol, reason.into())));
        // A proxy's page says nothing of a connection, whatever status of gRPC it has.
        let page = heard(async |respond| ends(respond, StatusCode::BAD_GATEWAY, Some(("0", "")))).await;
        assert_eq!(page.unwrap_err().0, Outcome::Protocol);
        let reason = "the agent of edge-1 ended the stream without connecting";
        let ended = heard(async |respond| ends(respond, StatusCode::OK, Some(("0", "")))).await;
        assert_eq!(ended, Err((Outcome::Protocol, reason.into())));
        let denied = heard(async |respond| ends(respond, StatusCode::OK, Some(("7", "not%0Aallowed")))).await;
        let (outcome, reason) = denied.unwrap_err();
        assert_eq!(outcome, Outcome::from_code(Code::PermissionDenied));
        assert!(
            reason.starts_with("the agent of edge-1 refused: not") && !reason.contains('\n'),
            "{reason:?}"
        );
        let late = heard(async |respond| ends(respond, StatusCode::OK, Some(("4", "no answer")))).await;
        assert_eq!(late, Err((Outcome::TimedOut, "the agent of edge-1 gave up: no answer".into())));
        let reset = heard(async |mut respond| respond.send_reset(Reason::CONNECT_ERROR)).await;
        assert_eq!(reset.unwrap_err().0, Outcome::TargetReset);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_does_not_answer_is_given_up_after_its_time_and_the_ways() {
        let begin = tokio::time::Instant::now();
        let hung = heard(async |respond| {
            let _respond = respond;
            pending::<()>().await;
        });
        let reason = "the agent of edge-1 did not answer the dial of 192.0.2.1:10250 within 8 s";
        assert_eq!(hung.await, Err((Outcome::TimedOut, reason.into())));
        assert_eq!(begin.elapsed().as_secs(), 8);
    }
}

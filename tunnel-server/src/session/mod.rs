//! The sessions with the agents: taking their links, and opening a stream for each connection that a door brings.

mod agent_port;
mod attach;
mod registry;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderValue, Method, Request, StatusCode, Version, header};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tunnel_core::carry::{
    Abort, CARRY_PATH, Relay, RelayError, Side, StallBound, TARGET_HEADER, Totals, Traffic,
};
use tunnel_core::identity::NodeName;
use tunnel_core::link::Rtt;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

pub use agent_port::{AgentPort, AgentPortConfig};
pub use registry::{Fenced, Sessions};
pub use workers::Workers;

/// How long an agent may take to connect to a target.
pub const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// What the tunnel itself may add to that before the agent counts as hung.
const DIAL_GRACE: Duration = Duration::from_secs(3);

/// One agent's link, attached.
pub struct Session {
    /// Unique in this process.
    pub id: u64,
    /// The node, as its certificate names it.
    pub node: NodeName,
    /// The session's number; higher ones win.
    pub epoch: u64,
    /// Where the agent dials from.
    pub peer: SocketAddr,
    /// When it attached.
    pub since: Instant,
    /// What the agent says it is.
    pub agent_version: String,
    /// The link's round-trip time.
    pub rtt: Rtt,
    /// Bounds what is held for callers that do not read.
    pub stalls: StallBound,
    /// Connections carried now.
    pub connections: AtomicU32,
    /// Bytes carried: from callers to the node, and back to them.
    pub carried: Totals,
    /// Ends the session.
    pub closed: CancellationToken,
    send: SendRequest<Bytes>,
    worker: Handle,
}

impl Session {
    /// The thread that owns the link: carry on it.
    pub const fn worker(&self) -> &Handle {
        &self.worker
    }

    /// Carries a connection that a door accepted to `target`, as the agent sees it, until both directions ended.
    /// `connected` is told how long the agent's dial took.
    ///
    /// # Errors
    /// Whatever ended it early; the socket then sends a TCP RST when it is dropped.
    pub async fn carry(
        &self,
        socket: &mut TcpStream,
        prefix: Bytes,
        target: SocketAddr,
        abort: &Arc<Abort>,
        traffic: &Traffic,
        connected: impl FnOnce(Duration),
    ) -> Result<(), RelayError> {
        let _counted = Counted::new(self);
        let mut link = self.send.clone();
        let request =
            carry_request(target).map_err(|error| RelayError::Dial(Outcome::Protocol, error.to_string()))?;
        if let Err(error) = std::future::poll_fn(|cx| link.poll_ready(cx)).await {
            // Nothing can be carried on this link any more, whatever its PINGs say.
            self.closed.cancel();
            return Err(RelayError::Link(error));
        }
        // Beyond what the agent takes, h2 would queue the stream; one is the session's own.
        if self.connections.load(Ordering::Relaxed) as usize >= link.current_max_send_streams() {
            let reason =
                format!("{} takes no more than {} streams", self.node, link.current_max_send_streams());
            return Err(RelayError::Dial(Outcome::Busy, reason));
        }
        let (response, mut send) = link.send_request(request, false).map_err(RelayError::Link)?;
        let asked = Instant::now();
        // Its room is given back once the agent has connected.
        let inbound = Box::pin(async move {
            let answer = dialled(&self.node, target, response).await;
            connected(asked.elapsed());
            answer
        });
        Relay { side: Side::Server, stalls: &self.stalls, abort, traffic }
            .run(socket, prefix, &mut send, inbound)
            .await
    }
}

struct Counted<'a>(&'a Session);

impl<'a> Counted<'a> {
    fn new(session: &'a Session) -> Self {
        session.connections.fetch_add(1, Ordering::Relaxed);
        Self(session)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn carry_request(target: SocketAddr) -> Result<Request<()>, http::Error> {
    Request::builder()
        .method(Method::POST)
        .version(Version::HTTP_2)
        .uri(http::Uri::builder().scheme("https").authority("agent").path_and_query(CARRY_PATH).build()?)
        .header(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"))
        .header(header::TE, HeaderValue::from_static("trailers"))
        .header("grpc-timeout", format!("{}S", DIAL_DEADLINE.as_secs()))
        .header(TARGET_HEADER, target.to_string())
        .body(())
}

/// Waits for the agent's answer: headers mean connected, a status tells why not.
async fn dialled(
    node: &NodeName,
    target: SocketAddr,
    response: ResponseFuture,
) -> Result<RecvStream, RelayError> {
    let limit = DIAL_DEADLINE + DIAL_GRACE;
    let response = tokio::time::timeout(limit, response).await.map_err(|_| {
        RelayError::Dial(
            Outcome::TimedOut,
            format!("{node} did not answer the dial of {target} within {} s", limit.as_secs()),
        )
    })??;
    if response.status() != StatusCode::OK {
        return Err(RelayError::Dial(
            Outcome::Protocol,
            format!("{node} answered with HTTP status {}", response.status()),
        ));
    }
    match Status::from_header_map(response.headers()) {
        None => Ok(response.into_body()),
        // A target that accepts and is done at once still sends its headers first.
        Some(status) if status.code() == Code::Ok => {
            Err(RelayError::Dial(Outcome::Protocol, format!("{node} ended the stream without connecting")))
        }
        Some(status) => {
            let outcome = Outcome::from_code(status.code());
            let verb = match outcome {
                Outcome::TimedOut => "gave up",
                Outcome::Protocol => "answered",
                _ => "refused",
            };
            Err(RelayError::Dial(outcome, format!("{node} {verb}: {}", printable(status.message(), 300))))
        }
    }
}

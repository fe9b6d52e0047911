//! The sessions with the agents: which node has one, and a stream on its link for each connection.

mod registry;
mod workers;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

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
use tunnel_core::link::Flow;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use crate::pki::Refusal;

pub use registry::{Fenced, Sessions};
pub use workers::Workers;

/// How long an agent may take to connect to a target.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Added to that for the way through the tunnel; then the agent counts as hung.
const DIAL_GRACE: Duration = Duration::from_secs(3);

/// An attached link.
pub struct Session {
    /// Unique in this process.
    pub id: u64,
    /// From the agent's certificate.
    pub node: NodeName,
    /// A newer session of the node has a higher number, and replaces this one.
    pub epoch: u64,
    /// When the agent's certificate was issued.
    pub issued: SystemTime,
    /// Set once the agent may no longer have a session; see [`Session::refuse`].
    pub(crate) refusal: OnceLock<Refusal>,
    /// Where the agent dials from.
    pub peer: SocketAddr,
    pub since: Instant,
    /// As the agent reports it.
    pub agent_version: String,
    /// What is known about the link's path.
    pub flow: Arc<Flow>,
    /// Bounds what is held for clients that do not read.
    pub stalls: StallBound,
    pub connections: AtomicU32,
    /// Bytes carried, from clients to the node and back.
    pub carried: Totals,
    /// Cancelled when the session has to end; see [`Session::close`].
    pub closed: CancellationToken,
    /// Cancelled when its connections have to: with the session, or when the time of the server's drain is up. One token of
    /// the session's own, because every poll of a connection's task locks it.
    pub(crate) over: CancellationToken,
    pub(crate) send: SendRequest<Bytes>,
    /// The thread that owns the link. Its streams and their sockets stay there.
    pub(crate) worker: Handle,
}

impl Session {
    /// Ends the session, and tells its agent why.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        // The first reason is as good as the next.
        let _ = self.refusal.set(refusal);
        self.close();
    }

    /// Ends the session and its connections.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.over.cancel();
    }

    /// Carries an accepted connection to `target`, which the agent dials, until both directions have ended. Has to run
    /// on [`Session::worker`]. `connected` gets the duration of the agent's dial.
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
            // Nothing can be carried on this link any more, even if its PINGs are still answered.
            self.close();
            return Err(RelayError::Link(error));
        }
        // Beyond the agent's limit h2 would queue the stream. One of them is the session's own.
        if self.connections.load(Ordering::Relaxed) as usize >= link.current_max_send_streams() {
            let reason =
                format!("{} accepts no more than {} streams", self.node, link.current_max_send_streams());
            return Err(RelayError::Dial(Outcome::Busy, reason));
        }
        let (response, mut send) = link.send_request(request, false).map_err(RelayError::Link)?;
        let asked = Instant::now();
        // Boxed: its memory is freed once the agent has connected.
        let inbound = Box::pin(async move {
            let answer = dialled(&self.node, target, response).await;
            connected(asked.elapsed());
            answer
        });
        Relay { side: Side::Server, flow: &self.flow, stalls: &self.stalls, abort, traffic }
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

/// Waits for the agent's answer: headers mean connected, a status says why not.
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
        // Even for a target that closes immediately, the agent sends headers first.
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

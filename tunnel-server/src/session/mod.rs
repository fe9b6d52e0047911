//! The sessions with the agents: which node has one, and a stream on its link for each connection.

mod link_metrics;
mod links;
mod registry;
mod workers;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use h2::RecvStream;
use h2::client::ResponseFuture;
use http::{HeaderValue, Method, Request, StatusCode, Version, header};
use tokio::net::TcpStream;
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

pub use link_metrics::register_links;
pub use links::{Link, Links, NotWanted, Taken};
pub(crate) use registry::Forgotten;
pub use registry::{Fenced, LastEnd, Sessions};
pub use workers::Workers;

/// How long an agent may take to connect to a target.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// How long a link may leave a dial unacknowledged, and twice its round-trip time.
const SILENCE: Duration = Duration::from_millis(2500);
/// Added to that for the way through the tunnel; then the agent counts as hung.
const DIAL_GRACE: Duration = Duration::from_secs(3);

/// An attached agent.
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
    pub links: Links,
    /// Bounds what is held for clients that do not read.
    pub stalls: StallBound,
    /// Bytes carried, from clients to the node and back.
    pub carried: Totals,
    /// Cancelled when the session has to end; see [`Session::close`].
    pub closed: CancellationToken,
    /// Cancelled when its connections have to end: with the session, or when the time of the server's drain is up.
    pub(crate) over: CancellationToken,
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

    /// Ends a link and its connections; the first one's end is that of the session.
    fn close_link(&self, link: &Link) {
        if link.number == 0 {
            return self.close();
        }
        self.links.part(link);
        link.over.cancel();
    }

    /// Carries an accepted connection, and what was read from it, to `target`, which the agent dials, over `link` until both directions have ended.
    /// Has to run on [`Link::worker`]. `connected` gets the duration of the agent's dial.
    ///
    /// # Errors
    /// Whatever ended it early; the socket then sends a TCP RST when it is dropped.
    pub async fn carry(
        &self,
        link: &Link,
        (socket, prefix): (&mut TcpStream, Bytes),
        target: SocketAddr,
        abort: &Arc<Abort>,
        traffic: &Traffic,
        connected: impl FnOnce(Duration),
    ) -> Result<(), RelayError> {
        let mut stream = link.send.clone();
        let request =
            carry_request(target).map_err(|error| RelayError::Dial(Outcome::Protocol, error.to_string()))?;
        if let Err(error) = std::future::poll_fn(|cx| stream.poll_ready(cx)).await {
            // Nothing can be carried on this link any more, even if its PINGs are still answered.
            self.close_link(link);
            return Err(RelayError::Link(error));
        }
        // Beyond the agent's limit h2 would queue the stream. One of them is the session's own.
        let most = stream.current_max_send_streams();
        if link.connections() as usize >= most {
            let reason = format!("{} accepts no more than {most} streams", self.node);
            return Err(RelayError::Dial(Outcome::Busy, reason));
        }
        let (response, mut send) = stream.send_request(request, false).map_err(RelayError::Link)?;
        let asked = Instant::now();
        // Boxed: its memory is freed once the agent has connected.
        let inbound = Box::pin(async move {
            let answer = dialled(&self.node, target, &link.flow, response).await;
            connected(asked.elapsed());
            answer
        });
        Relay { side: Side::Server, flow: &link.flow, stalls: &self.stalls, abort, traffic }
            .run(socket, prefix, &mut send, inbound)
            .await
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

/// Ends once the link has not even acknowledged for so long that its line must be out. A slow line acknowledges.
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

/// Waits for the agent's answer: headers mean connected, a status says why not.
async fn dialled(
    node: &NodeName,
    target: SocketAddr,
    flow: &Flow,
    response: ResponseFuture,
) -> Result<RecvStream, RelayError> {
    let limit = DIAL_DEADLINE + DIAL_GRACE;
    let response = tokio::select! {
        response = tokio::time::timeout(limit, response) => response,
        silence = silent(flow) => {
            let reason = format!("the link to {node} has been silent for {:.1} s", silence.as_secs_f32());
            return Err(RelayError::Dial(Outcome::TimedOut, reason));
        }
    };
    let response = response.map_err(|_| {
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

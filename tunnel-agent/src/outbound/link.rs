//! The connection with a server over which this agent opens streams. There is at most one, made on demand.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderValue, Method, Request, StatusCode, Version, header};
use tokio::sync::{Mutex, watch};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tunnel_link::link::{self, Flow, HANDSHAKE_TIMEOUT, LinkIo};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{RelayError, StallBound, TARGET_HEADER};
use tunnel_pki::{ALPN_EDGE, agent_tls, server_name};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::text::printable;

use crate::reach::Server;
use crate::session::{LinkSet, Shared};

/// Maximum time for a server to accept a stream.
const ANSWER: Duration = Duration::from_secs(10);
/// Maximum links tried for one connection.
const ATTEMPTS: usize = 3;

/// A connection with a server.
pub(super) struct Link {
    send: SendRequest<Bytes>,
    pub(super) flow: Arc<Flow>,
    pub(super) stalls: StallBound,
    /// Its address at this end, if that is one of this node's that can go away.
    local: Option<IpAddr>,
    /// Cancelled when the link has ended.
    pub(super) over: CancellationToken,
    /// Cancelled when no new stream may use the link.
    used_up: CancellationToken,
}

/// A stream for one connection.
pub(super) struct Stream {
    pub(super) link: Arc<Link>,
    pub(super) send: SendStream<Bytes>,
    pub(super) answer: BoxFuture<'static, Result<RecvStream, RelayError>>,
}

pub(super) struct Links {
    shared: Arc<Shared>,
    servers: watch::Receiver<Arc<Vec<HostPort>>>,
    sessions: Arc<LinkSet>,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    link: Option<Arc<Link>>,
    /// Time and reason of the last failure to connect.
    failed: Option<(Instant, String)>,
}

impl Links {
    pub(super) fn new(
        shared: Arc<Shared>,
        servers: watch::Receiver<Arc<Vec<HostPort>>>,
        sessions: Arc<LinkSet>,
    ) -> Self {
        Self { shared, servers, sessions, current: Mutex::default() }
    }

    /// Opens a stream, unless `given_up` is true once there is a link. Without a target, the client names it to the
    /// server itself.
    ///
    /// # Errors
    /// No server can be reached, or the client has given up.
    pub(super) async fn open(
        &self,
        target: Option<&HostPort>,
        given_up: impl Fn() -> bool,
    ) -> Result<Stream, RelayError> {
        let no_tunnel = |reason| RelayError::Dial(Outcome::NoTunnel, reason);
        let mut last = String::new();
        for _ in 0..ATTEMPTS {
            let link = self.link().await.map_err(no_tunnel)?;
            if given_up() {
                let reason = "the client closed before a server was reached".to_owned();
                return Err(RelayError::Dial(Outcome::ClientReset, reason));
            }
            match ask(&link, target).await {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    // The server stops or has gone. Another one, or the next one at its address, takes over.
                    link.used_up.cancel();
                    last = link::reason(&error);
                }
            }
        }
        Err(no_tunnel(last))
    }

    /// Returns the current link, or makes a new one. If that fails, it fails for everyone who waits for it: clients
    /// must not wait for one attempt after the other.
    async fn link(&self) -> Result<Arc<Link>, String> {
        let asked = Instant::now();
        let mut current = self.current.lock().await;
        if let Some(link) = current.link.as_ref().filter(|link| self.may_use(link)) {
            return Ok(link.clone());
        }
        if let Some((ended, reason)) = &current.failed
            && asked < *ended
        {
            return Err(reason.clone());
        }
        current.link = None;
        match self.connect_to_any().await {
            Ok(link) => Ok(current.link.insert(link).clone()),
            Err(reason) => {
                current.failed = Some((Instant::now(), reason.clone()));
                Err(reason)
            }
        }
    }

    /// False also for a link whose address this node has lost: nothing arrives over it any more, which its PINGs notice much
    /// later.
    fn may_use(&self, link: &Link) -> bool {
        let lost = link.local.is_some_and(|local| !self.has(local));
        if lost {
            link.used_up.cancel();
        }
        !link.used_up.is_cancelled()
    }

    fn has(&self, address: IpAddr) -> bool {
        self.shared.runtime.addresses.borrow().contains(&address)
    }

    async fn connect_to_any(&self) -> Result<Arc<Link>, String> {
        let servers = self.servers.borrow().clone();
        let mut reasons = Vec::new();
        for server in in_order(&servers, &self.sessions.attached_at()) {
            match tokio::time::timeout(HANDSHAKE_TIMEOUT, self.connect(server)).await {
                Ok(Ok(link)) => return Ok(link),
                Ok(Err(error)) => reasons.push(format!("{server}: {error}")),
                Err(_) => reasons.push(format!("{server}: no answer")),
            }
        }
        Err(none_reached(&reasons))
    }

    async fn connect(&self, server: &HostPort) -> io::Result<Arc<Link>> {
        let tls = agent_tls(&self.shared.identity.borrow(), ALPN_EDGE).map_err(io::Error::other)?;
        let reached = self.shared.runtime.config.reach.connect(&Server::Named(server.to_string())).await?;
        link::tune_link(&reached.stream);
        let local = reached.stream.local_addr()?.ip();
        let local = (!reached.stream.is_multipath() && self.has(local)).then_some(local);
        let stream = TlsConnector::from(tls).connect(server_name(), reached.stream).await?;
        let io = LinkIo::new(stream);
        let flow = io.flow();
        let (send, mut connection) =
            link::client_builder().handshake::<_, Bytes>(io).await.map_err(io::Error::other)?;
        let pings = connection.ping_pong();
        let (over, used_up) = (CancellationToken::new(), CancellationToken::new());
        let stalls = StallBound::new(link::AGENT_STALL_BYTES, link::STREAM_WINDOW as usize);
        let (of_link, all) = (flow.clone(), used_up.clone());
        let link = Arc::new(Link { send, flow: of_link, stalls, local, over: over.clone(), used_up: all });
        let ended = over.drop_guard();
        let driven = link::drive(connection, flow.clone());
        let weak = Arc::downgrade(&link);
        let server = server.clone();
        // The task ends with the connection, which ends when the last stream and the link are dropped.
        tokio::spawn(async move {
            let alive = async {
                let Some(pings) = pings else { return std::future::pending().await };
                let tick = || {
                    if let Some(link) = weak.upgrade() {
                        link.stalls.sweep();
                    }
                };
                link::keep_alive(pings, &flow, tick).await
            };
            let reason = tokio::select! {
                ended = driven => ended.err().map(|error| link::reason(&error)),
                dead = alive => Some(dead.to_string()),
            };
            used_up.cancel();
            drop(ended);
            tracing::debug!(%server, reason, "outbound link ended");
        });
        Ok(link)
    }
}

/// `reasons` has one entry for each server.
fn none_reached(reasons: &[String]) -> String {
    match reasons {
        [] => "no server is known yet: they are found through the API server".to_owned(),
        reasons => format!("no server can be reached: {}", reasons.join("; ")),
    }
}

/// Puts attached servers first, because they can be reached.
fn in_order<'a>(servers: &'a [HostPort], attached: &BTreeSet<String>) -> Vec<&'a HostPort> {
    let (mut first, others): (Vec<_>, Vec<_>) =
        servers.iter().partition(|server| attached.contains(&server.to_string()));
    first.extend(others);
    first
}

async fn ask(link: &Arc<Link>, target: Option<&HostPort>) -> Result<Stream, h2::Error> {
    let mut send = link.send.clone();
    std::future::poll_fn(|cx| send.poll_ready(cx)).await?;
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    *request.uri_mut() = http::Uri::from_static(EDGE_RELAY_URI);
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(target) = target.and_then(|target| HeaderValue::from_str(&target.to_string()).ok()) {
        headers.insert(TARGET_HEADER, target);
    }
    let (response, stream) = send.send_request(request, false)?;
    let used_up = link.used_up.clone();
    let answer = Box::pin(async move {
        let Ok(response) = tokio::time::timeout(ANSWER, response).await else {
            // A NAT may have forgotten the link. PING decides about its other streams.
            used_up.cancel();
            return Err(RelayError::Dial(Outcome::TimedOut, "the server did not answer".to_owned()));
        };
        let response = response?;
        if response.status() != StatusCode::OK {
            let reason = format!("the server answered with HTTP status {}", response.status());
            return Err(RelayError::Dial(Outcome::Protocol, reason));
        }
        match Status::from_header_map(response.headers()) {
            None => Ok(response.into_body()),
            Some(status) => {
                let reason = format!("the server refused: {}", printable(status.message(), 300));
                Err(RelayError::Dial(Outcome::from_code(status.code()), reason))
            }
        }
    });
    Ok(Stream { link: link.clone(), send: stream, answer })
}

/// URI of the streams.
const EDGE_RELAY_URI: &str = "https://server/postern.tunnel.v1.Edge/Relay";

#[cfg(test)]
mod tests {
    use tunnel_link::relay::EDGE_RELAY_PATH;

    use super::*;

    #[test]
    fn the_uri_has_the_path() {
        assert_eq!(http::Uri::from_static(EDGE_RELAY_URI).path(), EDGE_RELAY_PATH);
    }

    #[test]
    fn who_gets_nothing_is_told_why() {
        let none = none_reached(&[]);
        assert!(none.starts_with("no server is known yet"), "{none}");
        let reasons = ["a:1: no answer", "b:1: connection refused"].map(str::to_owned);
        assert_eq!(
            none_reached(&reasons),
            "no server can be reached: a:1: no answer; b:1: connection refused"
        );
    }

    #[test]
    fn servers_that_are_attached_are_tried_first() {
        let servers = ["a:1", "b:1", "c:1", "d:1"].map(|server| server.parse::<HostPort>().unwrap());
        let attached = BTreeSet::from(["d:1", "b:1", "x:1"].map(str::to_owned));
        let order = in_order(&servers, &attached);
        let order: Vec<_> = order.into_iter().map(ToString::to_string).collect();
        assert_eq!(order, ["b:1", "d:1", "a:1", "c:1"]);
    }
}

//! State and types that all listeners use.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_link::konnectivity::in_words_of_go;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{RelayError, Side};
use tunnel_routing::{NodeAddress, Router};
use tunnel_runtime::NodeName;
use tunnel_runtime::lifecycle::Drain;

use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::runtime::Runtime;
use crate::session::{Sessions, Workers};

/// State that all listeners share.
#[derive(Clone)]
pub struct ListenerContext {
    pub router: Arc<Router>,
    pub sessions: Arc<Sessions>,
    pub peers: Arc<Peers>,
    pub metrics: Metrics,
    pub workers: Arc<Workers>,
    /// Tracks the connections in flight.
    pub drain: Drain,
}

impl ListenerContext {
    pub fn of(runtime: &Runtime) -> Self {
        Self {
            router: runtime.router.clone(),
            sessions: runtime.sessions.clone(),
            peers: runtime.peers.clone(),
            metrics: runtime.metrics.clone(),
            workers: runtime.workers.clone(),
            drain: runtime.drain.clone(),
        }
    }

    /// Serves a caller's connection on one of the threads for handshakes: its TLS and HTTP, which anybody can ask for, do not
    /// delay what other listeners accept.
    pub(crate) fn serve_apart<F>(
        &self,
        socket: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let socket = socket.into_std();
        let work = async move {
            match socket.and_then(TcpStream::from_std) {
                Ok(socket) => serve(socket).await,
                Err(error) => tracing::warn!(%error, "failed to set up a client's socket"),
            }
        };
        self.drain.spawn_on(work, self.workers.next_handshake());
    }
}

#[cfg(test)]
impl ListenerContext {
    pub(crate) fn without_nodes() -> Self {
        let mut registry = prometheus_client::registry::Registry::default();
        let router = crate::runtime::without_nodes(&mut registry);
        let metrics = Metrics::new(&mut registry);
        Self {
            router: router.clone(),
            sessions: Arc::new(Sessions::new(router.clone(), metrics.clone())),
            peers: Arc::new(Peers::new(router)),
            metrics,
            workers: Workers::here(),
            drain: Drain::new(tunnel_runtime::lifecycle::Shutdown::default()),
        }
    }
}

/// The destination that a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// The node whose agent dials.
    pub node: NodeName,
    /// The address that the agent dials.
    pub target: SocketAddr,
    /// The address by which the node was found, which ends the connection once another node has it. The target may be
    /// the node's loopback instead. `None` if the client named both node and target.
    pub found_by: Option<IpAddr>,
    /// Bytes that were read from the client already; they are relayed first.
    pub prefix: Bytes,
}

impl OpenRequest {
    /// Creates a request of a client that named both node and target.
    pub fn new(node: NodeName, target: SocketAddr) -> Self {
        Self { node, target, found_by: None, prefix: Bytes::new() }
    }

    /// Creates a request for a node that was found by an address of it, or of a pod on it.
    pub fn to_found(found: NodeAddress, target: SocketAddr) -> Self {
        Self { found_by: Some(found.address), ..Self::new(found.node, target) }
    }

    /// Creates a request for a port of such a node or pod.
    pub(crate) fn to_port(found: NodeAddress, port: u16, router: &Router) -> Self {
        let target = router.dialled(&found, port);
        Self::to_found(found, target)
    }
}

/// A permitted destination, and the side that dials it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// The node's agent dials it.
    Edge(OpenRequest),
    /// This server dials it.
    Cloud(SocketAddr),
}

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Edge(request) => write!(f, "{} at {}", request.node, request.target),
            Self::Cloud(target) => write!(f, "{target}"),
        }
    }
}

/// Reason for which a client gets no connection, or lost it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) outcome: Outcome,
    pub(crate) reason: String,
}

impl Failed {
    pub(crate) fn of(error: &RelayError) -> Self {
        Self { outcome: error.outcome(Side::Server), reason: error.to_string() }
    }

    /// Returns the reason with the words by which Go programs tell errors apart.
    pub(crate) fn in_words_of_go(self) -> String {
        in_words_of_go(self.outcome, self.reason)
    }
}

/// Reason for which a connection is not relayed: it is closed, or will be reset.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The redirect's own connection to itself: not logged.
    #[error("a self-test of the redirect")]
    SelfTest,
    /// The client's request is not served.
    #[error("{0}")]
    Client(String),
    #[error("{0}")]
    Socket(#[from] std::io::Error),
}

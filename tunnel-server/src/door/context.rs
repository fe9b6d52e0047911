//! What doors are given, and what they return.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::Drain;
use tunnel_core::outcome::Outcome;

use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::route::Router;
use crate::session::Sessions;

/// A way in: finds out for each accepted connection which node it is for.
pub trait Door: Send + Sync + 'static {
    /// The door's name in logs and metrics.
    const NAME: &'static str;
    /// Whether `open` waits for the client, who then needs a place first.
    const READS: bool = true;

    /// Finds out what the client wants to reach.
    fn open(
        &self,
        socket: &mut TcpStream,
        router: &Router,
    ) -> impl Future<Output = Result<OpenRequest, OpenError>> + Send;

    /// Tells a client that has not been sent anything yet why its connection fails, if the door's protocol can.
    fn failed(_socket: &mut TcpStream, _outcome: Outcome, _detail: &str) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// What all doors work with.
#[derive(Clone)]
pub struct DoorContext {
    pub router: Arc<Router>,
    pub sessions: Arc<Sessions>,
    pub peers: Arc<Peers>,
    pub metrics: Metrics,
    /// Tracks the connections in flight.
    pub drain: Drain,
}

/// What a client wants to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// The node whose agent dials.
    pub node: NodeName,
    /// What it dials.
    pub target: SocketAddr,
    /// What was read from the client already: it is carried first.
    pub prefix: Bytes,
}

/// Why a connection is not carried: it is closed, or will be reset.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The redirect's own connection to itself: not logged.
    #[error("a self-test of the redirect")]
    SelfTest,
    /// What the client asked for is not served.
    #[error("{0}")]
    Client(String),
    /// The client's socket failed.
    #[error("{0}")]
    Socket(#[from] std::io::Error),
}

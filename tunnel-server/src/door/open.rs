//! What a door is.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_core::outcome::Outcome;

use super::context::{OpenError, OpenRequest};
use super::front::Front;
use crate::admission::source_key;
use crate::route::Router;

/// A way in: finds out for each accepted connection which node it is for.
pub(crate) trait Door: Send + Sync + 'static {
    /// The door's name in logs and metrics.
    const NAME: &'static str;
    /// Whether `open` waits for the client, who then needs a place first.
    const READS: bool = true;

    /// The client's address as logs and bounds have it; `accepted` is what accept(2) returned.
    fn client(&self, _socket: &TcpStream, accepted: SocketAddr, _router: &Router) -> SocketAddr {
        accepted
    }

    /// Which source a connection counts as.
    fn source(_socket: &TcpStream, client: IpAddr, _router: &Router) -> IpAddr {
        source_key(client)
    }

    /// Finds out what the client wants to reach.
    fn open(
        &self,
        socket: &mut TcpStream,
        router: &Router,
    ) -> impl Future<Output = Result<Opened, OpenError>> + Send;

    /// Tells a client that has not been sent anything yet why its connection fails, if the door's protocol can.
    fn failed(_socket: &mut TcpStream, _outcome: Outcome, _detail: &str) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// What a door makes of a connection.
pub(crate) enum Opened {
    /// It is carried to one node, byte by byte.
    Carried(OpenRequest),
    /// This server answers it, and each request names its own node.
    Served {
        front: Arc<Front>,
        /// What was read from the client already.
        prefix: Bytes,
    },
    /// The door has carried it itself, to its end.
    Ended,
}

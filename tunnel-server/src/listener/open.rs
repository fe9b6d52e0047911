//! The trait of listeners.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_routing::Router;

use super::context::{OpenError, OpenRequest};
use super::front::Front;
use crate::admission::source_key;
use crate::metrics::Permit;

/// A kind of listener, which finds the node of each accepted connection.
pub(crate) trait Listener: Send + Sync + 'static {
    /// True if `open` waits for the client, which then needs a place first.
    const READS: bool = true;

    /// The listener's name in logs and metrics.
    fn name(&self) -> &'static str;

    /// Returns the client's address for logs and limits; `accepted` is what accept(2) returned.
    fn client(&self, _socket: &TcpStream, accepted: SocketAddr, _router: &Router) -> SocketAddr {
        accepted
    }

    /// Returns the source that a connection counts as.
    fn source(_socket: &TcpStream, client: IpAddr, _router: &Router) -> IpAddr {
        source_key(client)
    }

    /// Finds the destination that the client wants to reach.
    fn open(
        &self,
        socket: &mut TcpStream,
        router: &Router,
    ) -> impl Future<Output = Result<Opened, OpenError>> + Send;
}

/// Result of [`Listener::open`].
pub(crate) enum Opened {
    /// The connection is relayed to one node, byte by byte.
    Relayed(OpenRequest),
    /// The same, as long as the client may.
    Permitted(OpenRequest, Arc<dyn Permit>),
    /// This server answers the client, and each request names its own node.
    Served {
        front: Arc<Front>,
        /// Bytes that were already read from the client.
        prefix: Bytes,
    },
}

//! The sessions with the agents: one per node, with a stream on a link for each connection.

pub mod bench;
mod link;
mod link_metrics;
mod links;
mod registry;
mod relay;
mod unanswered;
mod workers;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_link::relay::{OF_NODE_HEADER, RELAY_PATH, RelayError, StallBound, Totals};
use tunnel_routing::Router;
use tunnel_runtime::NodeName;

use crate::admission::Shares;
use crate::pki::{Credential, Refusal};

pub(crate) use link::Streams;
pub use link::{Link, MOST_STREAMS, Taken};
pub use link_metrics::register_links;
#[cfg(test)]
pub(crate) use links::tests::link as test_link;
pub use links::{Links, NotWanted};
pub(crate) use registry::Forgotten;
pub(crate) use registry::Move;
pub use registry::{Fenced, LastEnd, Sessions};
pub(crate) use relay::{Asked, On, ask, dialled};
pub use workers::Workers;

/// An attached agent.
pub struct Session {
    /// Unique in this process.
    pub id: u64,
    /// Node name in the agent's certificate.
    pub node: NodeName,
    /// Knows the addresses of the node's inventory entry.
    pub(crate) router: Arc<Router>,
    /// Number of the session: a newer session of the node has a higher one and replaces this one.
    pub epoch: u64,
    /// The parts of the agent's certificate that are kept.
    pub(crate) credential: ArcSwap<Credential>,
    /// Set once the agent may no longer have a session; see [`Session::refuse`].
    pub(crate) refusal: OnceLock<Refusal>,
    /// Set once the agent was told to look for another server.
    pub(crate) moving: AtomicBool,
    /// Cancelled when a newer session has replaced this one, which finishes its connections.
    pub(crate) replaced: CancellationToken,
    /// Set before that if the newer session is that of the agent's successor.
    pub(crate) succeeded: AtomicBool,
    /// Address from which the agent dials.
    pub peer: SocketAddr,
    pub since: Instant,
    /// Version reported by the agent.
    pub agent_version: String,
    pub links: Links,
    /// Limits the bytes held for clients that do not read.
    pub stalls: StallBound,
    /// The agent's limit of connections, shared by sources.
    pub(crate) places: Shares,
    /// Bytes relayed, from clients to the node and back.
    pub relayed: Totals,
    /// Cancelled when the session has to end; see [`Session::close`].
    pub closed: CancellationToken,
    /// Cancelled when its connections have to end: with the session, or when the server's drain time is over.
    pub(crate) over: CancellationToken,
    /// Set once its first link has ended.
    pub(crate) forgotten: AtomicBool,
}

impl Session {
    /// The limit of concurrent connections that the agent accepts, over all links.
    pub(crate) fn places(&self) -> Shares {
        self.places.within(self.links.most_streams())
    }

    /// Ends the session and tells its agent the reason.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        // If there is a reason already, it stays.
        let _ = self.refusal.set(refusal);
        self.close();
    }

    /// Ends the session and its connections.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.over.cancel();
    }

    /// Closes a link and its connections; closing the first one closes the session.
    fn close_link(&self, link: &Link) {
        if link.number == 0 {
            return self.close();
        }
        self.links.part(link);
        link.over.cancel();
    }

    /// Requests a connection to `target` on the link; the agent dials it.
    ///
    /// # Errors
    /// If the link can relay nothing any more, or nothing more at present.
    pub(crate) async fn ask(&self, link: &Link, target: SocketAddr) -> Result<Asked, RelayError> {
        let mut more = HeaderMap::new();
        if self.router.snapshot().names(&self.node, target.ip()) {
            more.insert(OF_NODE_HEADER, HeaderValue::from_static("1"));
        }
        let asked = ask(link, self.node.as_str(), RELAY_PATH, target, more).await;
        if let Err(RelayError::Link(_)) = asked {
            // Even if its PINGs are still answered.
            self.close_link(link);
        }
        asked
    }
}

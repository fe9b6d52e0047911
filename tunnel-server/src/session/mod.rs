//! The sessions with the agents: which node has one, and a stream on its link for each connection.

mod carry;
mod link;
mod link_metrics;
mod links;
mod registry;
mod unanswered;
mod workers;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use http::{HeaderMap, HeaderValue};
use tokio_util::sync::CancellationToken;
use tunnel_core::carry::{CARRY_PATH, OF_NODE_HEADER, RelayError, StallBound, Totals};
use tunnel_core::identity::NodeName;

use crate::admission::Shares;
use crate::pki::Refusal;
use crate::route::Router;

pub(crate) use carry::{Asked, On, ask, dialled};
pub(crate) use link::Streams;
pub use link::{Link, MOST_STREAMS, Taken};
pub use link_metrics::register_links;
#[cfg(test)]
pub(crate) use links::tests::link as test_link;
pub use links::{Links, NotWanted};
pub(crate) use registry::Forgotten;
pub(crate) use registry::Move;
pub use registry::{Fenced, LastEnd, Sessions};
pub use workers::Workers;

/// An attached agent.
pub struct Session {
    /// Unique in this process.
    pub id: u64,
    /// From the agent's certificate.
    pub node: NodeName,
    /// Has the addresses that the node's inventory entry names.
    pub(crate) router: Arc<Router>,
    /// A newer session of the node has a higher number, and replaces this one.
    pub epoch: u64,
    /// When the agent's certificate was issued.
    pub issued: SystemTime,
    /// Set once the agent may no longer have a session; see [`Session::refuse`].
    pub(crate) refusal: OnceLock<Refusal>,
    /// Its agent was told to look for another server.
    pub(crate) moving: AtomicBool,
    /// Cancelled when the session of its agent's successor has the node's place.
    pub(crate) succeeded: CancellationToken,
    /// Where the agent dials from.
    pub peer: SocketAddr,
    pub since: Instant,
    /// As the agent reports it.
    pub agent_version: String,
    pub links: Links,
    /// Bounds what is held for clients that do not read.
    pub stalls: StallBound,
    /// What the agent accepts, shared by sources.
    pub(crate) places: Shares,
    /// Bytes carried, from clients to the node and back.
    pub carried: Totals,
    /// Cancelled when the session has to end; see [`Session::close`].
    pub closed: CancellationToken,
    /// Cancelled when its connections have to end: with the session, or when the time of the server's drain is up.
    pub(crate) over: CancellationToken,
    /// Set once its first link has ended.
    pub(crate) forgotten: AtomicBool,
}

impl Session {
    /// The connections that the agent accepts at a time, for all links together.
    pub(crate) fn places(&self) -> Shares {
        self.places.within(self.links.most_streams())
    }

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

    /// Asks on the link for a connection to `target`, which the agent dials.
    ///
    /// # Errors
    /// Nothing can be carried on the link any more, or no more than there is.
    pub(crate) async fn ask(&self, link: &Link, target: SocketAddr) -> Result<Asked, RelayError> {
        let mut more = HeaderMap::new();
        if self.router.snapshot().names(&self.node, target.ip()) {
            more.insert(OF_NODE_HEADER, HeaderValue::from_static("1"));
        }
        let asked = ask(link, self.node.as_str(), CARRY_PATH, target, more).await;
        if let Err(RelayError::Link(_)) = asked {
            // Even if its PINGs are still answered.
            self.close_link(link);
        }
        asked
    }
}

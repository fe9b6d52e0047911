//! What carries a connection to its node: the agent's session here, or another server that has one.

use std::net::SocketAddr;
use std::sync::Arc;

use tunnel_core::carry::{RelayError, Totals};

use super::context::{DoorContext, OpenRequest};
use crate::peers::OnPeer;
use crate::session::{Asked, Link, On, Session, Taken};

pub(super) enum Way {
    Session(Arc<Session>, Taken),
    /// Boxed: most connections have the other one.
    Peer(Box<OnPeer>),
}

impl Way {
    /// Chooses one. Other servers are asked one after the other, each only once.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn find(
        context: &DoorContext,
        request: &OpenRequest,
        client: SocketAddr,
    ) -> Result<Self, String> {
        let node = &request.node;
        if let Some(session) = context.sessions.get(node) {
            let link = session.links.take();
            return Ok(Self::Session(session, link));
        }
        let mut reasons = Vec::new();
        for peer in context.peers.holders(node) {
            match peer.ask(node, request.target, client).await {
                Ok(on_peer) => return Ok(Self::Peer(Box::new(on_peer))),
                Err(reason) => reasons.push(format!("; server {}: {reason}", peer.server_id)),
            }
        }
        let seen = match context.sessions.last_end(node) {
            Some(end) => format!("last seen {} s ago", end.at.elapsed().as_secs()),
            None => "not seen since this server started".to_owned(),
        };
        Err(format!("no tunnel to node {node} ({seen}){}", reasons.concat()))
    }

    /// The server that has the node, if it is another one.
    pub(super) fn server_id(&self) -> Option<&str> {
        match self {
            Self::Session(..) => None,
            Self::Peer(on_peer) => Some(&on_peer.peer.server_id),
        }
    }

    pub(super) fn link(&self) -> &Link {
        match self {
            Self::Session(_, link) => link,
            Self::Peer(on_peer) => &on_peer.link,
        }
    }

    pub(super) fn carried(&self) -> &Totals {
        match self {
            Self::Session(session, _) => &session.carried,
            Self::Peer(on_peer) => &on_peer.peer.carried,
        }
    }

    /// Asks for the connection, unless that is done.
    ///
    /// # Errors
    /// Nothing can be carried on the link any more, or no more than there is.
    pub(super) async fn ask(&mut self, target: SocketAddr) -> Result<Asked, RelayError> {
        match self {
            Self::Session(session, link) => session.ask(link, target).await,
            Self::Peer(on_peer) => on_peer.asked(),
        }
    }

    /// What carrying needs.
    pub(super) fn on(&self) -> On<'_> {
        match self {
            Self::Session(session, link) => On { link, to: session.node.as_str(), stalls: &session.stalls },
            Self::Peer(on_peer) => on_peer.on(),
        }
    }
}

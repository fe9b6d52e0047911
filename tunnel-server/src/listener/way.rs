//! The way to a connection's node: the agent's session on this server, or another server that has one.

use std::net::SocketAddr;
use std::sync::Arc;

use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{RelayError, Totals};
use tunnel_routing::RETURN;

use super::access_log::AccessLogGuard;
use super::context::{Failed, ListenerContext, OpenRequest};
use crate::admission::{Full, Share};
use crate::peers::{OnPeer, Peer};
use crate::session::{Link, On, PendingStream, Session, Taken};

pub(super) enum Way {
    Session(Arc<Session>, Taken),
    /// Boxed: most connections use a session of this server.
    Peer(Box<OnPeer>),
}

impl Way {
    /// Takes the connection's place, finds a way to its node, and notes both in `record`.
    ///
    /// # Errors
    /// There is no place or no way; the error says why.
    pub(super) async fn find(
        context: &ListenerContext,
        request: &OpenRequest,
        client: SocketAddr,
        place: Result<Share, Full>,
        record: &mut AccessLogGuard,
    ) -> Result<Self, Failed> {
        let admitted = place.and_then(|mut place| {
            let reached = place.reaches(&request.node);
            // Kept even if it was refused: the client still has to get the reason.
            record.hold(place);
            reached
        });
        admitted.map_err(|full| record.refused(&full))?;
        let found = tokio::select! {
            biased;
            failed = record.aborted() => return Err(failed),
            found = Self::wait(context, request, client) => found,
        };
        let way = found.map_err(|reason| Failed { outcome: Outcome::NoTunnel, reason })?;
        match &way {
            // Only now: its agent may just have come back, or another server's has been asked.
            Self::Session(session, _) => {
                record.reaches_agent(&session.places()).map_err(|full| record.refused(&full))?;
            }
            Self::Peer(on_peer) => record.via(&on_peer.peer.server_id),
        }
        Ok(way)
    }

    /// Chooses a way, and waits for one while the node's agent is expected back.
    ///
    /// # Errors
    /// There is no way; the error says why.
    async fn wait(
        context: &ListenerContext,
        request: &OpenRequest,
        client: SocketAddr,
    ) -> Result<Self, String> {
        let node = &request.node;
        let (mut asked, mut reasons) = (Vec::new(), String::new());
        loop {
            match Self::choose(context, request, client, &mut asked).await {
                Ok(way) => return Ok(way),
                Err(more) => reasons.push_str(&more),
            }
            let look_again = match context.router.awaited(node) {
                Some(awaited) => {
                    let returned = tokio::time::timeout(RETURN, awaited.cancelled()).await.is_ok();
                    if returned {
                        asked.clear();
                        reasons.clear();
                    }
                    returned
                }
                // The agent may have returned meanwhile, here or at another server.
                None => {
                    let is_new = |peer: &Arc<Peer>| !asked.iter().any(|asked| Arc::ptr_eq(asked, peer));
                    context.sessions.get(node).is_some() || context.peers.holders(node).iter().any(is_new)
                }
            };
            if look_again {
                continue;
            }
            let seen = match context.sessions.last_end(node) {
                Some(end) => format!("last seen {} s ago", end.at.elapsed().as_secs()),
                None => "not seen since this server started".to_owned(),
            };
            return Err(format!("no tunnel to node {node} ({seen}){reasons}"));
        }
    }

    /// Asks the other servers one after the other if this one has no session, or a silent one. If no other server has a
    /// live one, uses the silent session here, or one on another server: its network connection may be back. Passes by those
    /// that were `asked` before: links, of which a server may have several.
    ///
    /// # Errors
    /// No server has a session; the error holds the other servers' reasons.
    async fn choose(
        context: &ListenerContext,
        request: &OpenRequest,
        client: SocketAddr,
        asked: &mut Vec<Arc<Peer>>,
    ) -> Result<Self, String> {
        let node = &request.node;
        let session = context.sessions.get(node);
        if let Some(session) = session.as_ref().filter(|session| !session.links.are_silent()) {
            return Ok(Self::session(session));
        }
        let (mut reasons, mut silent) = (Vec::new(), Vec::new());
        reasons.extend(context.peers.refusal(node).map(|refusal| format!("; {refusal}")));
        for peer in context.peers.holders(node) {
            if asked.iter().any(|asked| Arc::ptr_eq(asked, &peer)) {
                continue;
            }
            asked.push(peer.clone());
            match peer.ask(node, request.target, client, true).await {
                Ok(on_peer) => return Ok(Self::Peer(Box::new(on_peer))),
                Err(refused) if refused.silent => silent.push(peer),
                Err(refused) => reasons.push(format!("; server {}: {}", peer.server_id, refused.reason)),
            }
        }
        if let Some(session) = &session {
            return Ok(Self::session(session));
        }
        for peer in silent {
            match peer.ask(node, request.target, client, false).await {
                Ok(on_peer) => return Ok(Self::Peer(Box::new(on_peer))),
                Err(refused) => reasons.push(format!("; server {}: {}", peer.server_id, refused.reason)),
            }
        }
        Err(reasons.concat())
    }

    fn session(session: &Arc<Session>) -> Self {
        Self::Session(session.clone(), session.links.take())
    }

    pub(super) fn link(&self) -> &Link {
        match self {
            Self::Session(_, link) => link,
            Self::Peer(on_peer) => &on_peer.link,
        }
    }

    pub(super) fn relayed(&self) -> &Totals {
        match self {
            Self::Session(session, _) => &session.relayed,
            Self::Peer(on_peer) => &on_peer.peer.relayed,
        }
    }

    /// Asks for the connection, unless that is done.
    ///
    /// # Errors
    /// The link has failed, or has as many streams as the other end accepts.
    pub(super) async fn ask(&mut self, target: SocketAddr) -> Result<PendingStream, RelayError> {
        match self {
            Self::Session(session, link) => session.ask(link, target).await,
            Self::Peer(on_peer) => on_peer.take_pending(),
        }
    }

    /// Returns the parts that relaying needs.
    pub(super) fn on(&self) -> On<'_> {
        match self {
            Self::Session(session, link) => On { link, to: session.node.as_str(), stalls: &session.stalls },
            Self::Peer(on_peer) => {
                On { link: &on_peer.link, to: &on_peer.peer.server_id, stalls: &on_peer.peer.stalls }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use h2::server::SendResponse;
    use http::{Response, StatusCode};
    use tokio::runtime::Handle;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::admission::Shares;
    use crate::session::{MOST_STREAMS, Streams};

    /// Another server, which answers each connection like this.
    async fn server(
        server_id: &str,
        mut answer: impl FnMut(&mut SendResponse<Bytes>) + Send + 'static,
    ) -> Arc<Peer> {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut link = h2::server::handshake(far).await.unwrap();
            // If one were dropped, its stream would be reset.
            let mut answered = Vec::new();
            while let Some(Ok((_, mut respond))) = link.accept().await {
                answer(&mut respond);
                answered.push(respond);
            }
        });
        let (send, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        let streams = Streams::new(MOST_STREAMS);
        let link = Link::new(0, Arc::default(), CancellationToken::new(), send, Handle::current(), streams);
        let told_by = (server_id.to_owned(), "1.0.0".to_owned(), "10.70.0.2:10262".to_owned());
        Arc::new(Peer::new(told_by, link, CancellationToken::new(), CancellationToken::new()))
    }

    fn asks_the_agent(respond: &mut SendResponse<Bytes>) {
        let mut proceed = Response::new(());
        *proceed.status_mut() = StatusCode::CONTINUE;
        respond.send_informational(proceed).unwrap();
    }

    fn refuses(respond: &mut SendResponse<Bytes>) {
        let refusal = Response::builder().header("grpc-status", "5").header("grpc-message", "not here");
        respond.send_response(refusal.body(()).unwrap(), true).unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_was_waited_for_gives_a_place_too() {
        let context = ListenerContext::without_nodes();
        let request = OpenRequest::new("edge-1".parse().unwrap(), "192.0.2.1:10250".parse().unwrap());
        let client = SocketAddr::from(([10, 0, 0, 1], 1));
        let lost = context.sessions.replace("edge-1", 1).await;
        context.sessions.unregister(&lost);
        let mut record = AccessLogGuard::new("http", client, &request, &context);
        let (found, back) = tokio::join!(
            Way::find(&context, &request, client, Shares::new(10).admit(client.ip()), &mut record),
            context.sessions.replace("edge-1", 2),
        );
        assert!(matches!(found, Ok(Way::Session(session, _)) if Arc::ptr_eq(&session, &back)));
        let only = back.places.within(1);
        assert!(only.admit_at_agent(client.ip()).is_err());
        drop(record);
        assert!(only.admit_at_agent(client.ip()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_gets_the_node_while_its_last_one_refuses_is_asked_too() {
        // The last one is another link with the same server.
        for (name, has_it) in [("server-c", true), ("server-c", false), ("server-b", true)] {
            let context = ListenerContext::without_nodes();
            let request = OpenRequest::new("edge-1".parse().unwrap(), "192.0.2.1:10250".parse().unwrap());
            let answer: fn(&mut SendResponse<Bytes>) = if has_it { asks_the_agent } else { refuses };
            let next = server(name, answer).await;
            let (peers, node) = (context.peers.clone(), request.node.clone());
            let last = server("server-b", move |respond| {
                peers.gained(&next, &node);
                refuses(respond);
            });
            context.peers.gained(&last.await, &request.node);
            let found = Way::wait(&context, &request, request.target).await;
            match found {
                Ok(Way::Peer(on_peer)) => assert!(has_it && on_peer.peer.server_id == name),
                Ok(Way::Session(..)) => panic!("no agent is attached here"),
                Err(error) => {
                    let reasons = "; server server-b: not here; server server-c: not here";
                    assert!(!has_it && error.ends_with(reasons), "{error}");
                }
            }
        }
    }
}

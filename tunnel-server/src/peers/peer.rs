//! A link with another server.

use std::collections::HashSet;
use std::fmt::Display;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tunnel_link::grpc::{Channel, origin};
use tunnel_link::link;
use tunnel_link::outcome::Outcome;
use tunnel_link::proto::StatusRequest;
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::relay::{
    CLIENT_HEADER, NODE_HEADER, PEER_RELAY_PATH, RelayError, StallBound, Totals, UNLESS_SILENT_HEADER,
};
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use crate::session::{Link, Links, PendingStream, Placing, Taken};

/// Time for another server to report if it has the node, plus four times the round-trip time: it does not have to ask
/// anyone else.
const ANSWER: Duration = Duration::from_secs(1);

/// Largest status that is taken, in bytes; 100,000 nodes with three tunnels each take a fifth of it.
const LARGEST_STATUS: usize = 256 << 20;

/// Another server that this one is connected to.
pub struct Peer {
    pub server_id: String,
    pub version: String,
    /// Address at which it was dialled.
    pub address: String,
    pub since: Instant,
    /// Bytes forwarded, from clients to nodes and back.
    pub relayed: Totals,
    pub links: Links,
    pub(crate) stalls: StallBound,
    /// Cancelled when it drains.
    pub(super) draining: CancellationToken,
    /// Closes the link when cancelled.
    pub(super) closed: CancellationToken,
    /// The nodes that it has, by its own account.
    nodes: Mutex<HashSet<NodeName>>,
}

impl Peer {
    pub(crate) fn new(
        (server_id, version, address): (String, String, String),
        link: Arc<Link>,
        closed: CancellationToken,
        draining: CancellationToken,
    ) -> Self {
        Self {
            server_id,
            version,
            address,
            since: Instant::now(),
            relayed: Totals::default(),
            links: Links::new(link, 1, Placing::Apart),
            stalls: StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize),
            draining,
            closed,
            nodes: Mutex::default(),
        }
    }

    /// True if it drains.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    pub(crate) fn nodes(&self) -> MutexGuard<'_, HashSet<NodeName>> {
        self.nodes.lock()
    }

    /// Its status, as JSON.
    ///
    /// # Errors
    /// The reason why it has not told it.
    pub(crate) async fn status(&self) -> Result<String, String> {
        let link = self.links.all().into_iter().next().ok_or_else(|| "its link has ended".to_owned())?;
        let failed = |status: Status| match status.code() {
            Code::Unimplemented => format!("its version {} does not tell its status", self.version),
            _ => printable(status.message(), 200),
        };
        let mut client = PeerClient::with_origin(Channel::new(link.send.clone()), origin());
        let mut parts = client.status(StatusRequest {}).await.map_err(failed)?.into_inner();
        let mut json = Vec::new();
        while let Some(part) = parts.message().await.map_err(failed)? {
            if json.len() + part.json.len() > LARGEST_STATUS {
                return Err(format!("its status is longer than {} MiB", LARGEST_STATUS >> 20));
            }
            json.extend(part.json);
        }
        String::from_utf8(json).map_err(|error| format!("its status is not text: {error}"))
    }

    /// Requests it to ask the node's agent for a connection to `target`; with `unless_silent` only if its own path to
    /// the node is not silent. When this returns, the agent has been asked.
    ///
    /// # Errors
    /// The reason why it has not; another server may be asked.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        node: &NodeName,
        target: SocketAddr,
        client: SocketAddr,
        unless_silent: bool,
    ) -> Result<OnPeer, NotAsked> {
        let link = self.links.take();
        let more = metadata(node, client, unless_silent);
        let mut pending = match link.ask(&self.server_id, PEER_RELAY_PATH, target, more).await {
            Ok(pending) => pending,
            Err(error) => {
                if matches!(error, RelayError::Link(_)) {
                    self.closed.cancel();
                }
                return Err(NotAsked::because(error.to_string()));
            }
        };
        let patience = ANSWER + self.links.rtt().unwrap_or_default() * 4;
        match tokio::time::timeout(patience, poll_fn(|cx| pending.response.poll_informational(cx))).await {
            Ok(Some(Ok(_))) => Ok(OnPeer { peer: self.clone(), link, pending: Some(pending) }),
            Ok(Some(Err(error))) => Err(NotAsked::because(link::reason(&error))),
            Ok(None) => Err(match pending.response.await {
                Ok(answer) => match Status::from_header_map(answer.headers()) {
                    Some(status) => NotAsked {
                        reason: printable(status.message(), 300),
                        silent: status.code() == Code::Unavailable,
                    },
                    None => {
                        NotAsked::because(format!("it answered with HTTP status {} at once", answer.status()))
                    }
                },
                Err(error) => NotAsked::because(link::reason(&error)),
            }),
            Err(_) => {
                link.note_unanswered();
                Err(NotAsked::because(format!("no answer within {} ms", patience.as_millis())))
            }
        }
    }
}

/// Reason why another server has not asked a node's agent.
#[derive(Debug)]
pub(crate) struct NotAsked {
    pub(crate) reason: String,
    /// True if it has the node, but its own path there is silent.
    pub(crate) silent: bool,
}

impl NotAsked {
    fn because(reason: String) -> Self {
        Self { reason, silent: false }
    }
}

fn metadata(node: &NodeName, client: SocketAddr, unless_silent: bool) -> HeaderMap {
    let text = |value: &dyn Display| HeaderValue::try_from(value.to_string()).ok();
    let unless_silent = unless_silent.then(|| HeaderValue::from_static("1"));
    [(NODE_HEADER, text(node)), (CLIENT_HEADER, text(&client)), (UNLESS_SILENT_HEADER, unless_silent)]
        .into_iter()
        .filter_map(|(name, value)| Some((HeaderName::from_static(name), value?)))
        .collect()
}

/// A connection forwarded to another server.
pub(crate) struct OnPeer {
    pub(crate) peer: Arc<Peer>,
    pub(crate) link: Taken,
    /// Set until it is relayed.
    pending: Option<PendingStream>,
}

impl OnPeer {
    /// Takes the stream that has no answer yet; only once.
    ///
    /// # Errors
    /// On the second call.
    pub(crate) fn take_pending(&mut self) -> Result<PendingStream, RelayError> {
        let again = || RelayError::Dial(Outcome::Protocol, "it is relayed already".to_owned());
        self.pending.take().ok_or_else(again)
    }
}

#[cfg(test)]
mod tests {
    use http::{Response, StatusCode};
    use tokio::runtime::Handle;
    use tunnel_link::link::Flow;

    use super::*;
    use crate::session::Streams;

    #[tokio::test]
    async fn a_link_that_is_used_up_is_left_as_that_of_a_server_that_stops() {
        let (near, far) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut link = h2::server::handshake(far).await.unwrap();
            let mut asked = Vec::new();
            while let Some(Ok((_, mut respond))) = link.accept().await {
                let mut proceed = Response::new(());
                *proceed.status_mut() = StatusCode::CONTINUE;
                respond.send_informational(proceed).unwrap();
                asked.push(respond);
            }
        });
        let (send, connection) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(connection);
        let draining = CancellationToken::new();
        let streams = Streams { most: 3, spent: draining.clone() };
        let (over, flow) = (CancellationToken::new(), Arc::<Flow>::default());
        let link = Link::new(0, flow, over.clone(), send, Handle::current(), streams);
        let told_by = ["server-b", "1.0.0", "10.70.0.2:10262"].map(str::to_owned).into();
        let peer = Arc::new(Peer::new(told_by, link, CancellationToken::new(), draining));
        let (node, address) = ("edge-1".parse().unwrap(), "192.0.2.1:10250".parse().unwrap());
        let mut relayed = Vec::new();
        for left in [false, false, false, true, true] {
            relayed.push(peer.ask(&node, address, address, true).await.unwrap());
            assert_eq!(peer.is_draining(), left, "after {}", relayed.len());
        }
        assert!(!over.is_cancelled() && !peer.closed.is_cancelled());
        assert_eq!(peer.links.connections(), 5);
    }
}

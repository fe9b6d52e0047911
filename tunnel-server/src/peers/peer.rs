//! A link with another server.

use std::collections::HashSet;
use std::fmt::Display;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tunnel_core::carry::{CLIENT_HEADER, NODE_HEADER, PEER_CARRY_PATH, RelayError, StallBound, Totals};
use tunnel_core::identity::NodeName;
use tunnel_core::link;
use tunnel_core::outcome::Outcome;
use tunnel_core::text::printable;

use crate::session::{Asked, Link, Links, On, Taken, ask};

/// How long another server may take to say whether it has the node, and four times the round-trip time: it need not ask
/// anyone.
const ANSWER: Duration = Duration::from_secs(1);

/// Another server that this one is connected with.
pub struct Peer {
    pub server_id: String,
    pub version: String,
    /// Where it was dialled.
    pub address: String,
    pub since: Instant,
    /// Bytes carried, from clients to nodes and back.
    pub carried: Totals,
    pub(super) links: Links,
    pub(super) stalls: StallBound,
    /// It stops soon.
    pub(super) draining: CancellationToken,
    pub(super) unanswered: Unanswered,
    /// Ends the link.
    pub(super) closed: CancellationToken,
    /// The nodes that it says it has.
    nodes: Mutex<HashSet<NodeName>>,
}

impl Peer {
    pub(super) fn new(
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
            carried: Totals::default(),
            links: Links::new(link, 1),
            stalls: StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize),
            draining,
            unanswered: Unanswered::default(),
            closed,
            nodes: Mutex::default(),
        }
    }

    /// Whether it stops soon.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Whether it has left an ask unanswered and sent nothing since, as one that is frozen.
    pub(super) fn is_silent(&self) -> bool {
        self.unanswered.lasts(self.links.received())
    }

    /// How many nodes it has.
    pub fn node_count(&self) -> usize {
        self.nodes().len()
    }

    /// Connections that it carries for this server.
    pub fn connections(&self) -> u32 {
        self.links.connections()
    }

    pub fn rtt(&self) -> Option<Duration> {
        self.links.rtt()
    }

    pub(super) fn nodes(&self) -> MutexGuard<'_, HashSet<NodeName>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it ask the node's agent for a connection to `target`. When this returns, the agent has been asked.
    ///
    /// # Errors
    /// Why it has not; another server may be asked.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        node: &NodeName,
        target: SocketAddr,
        client: SocketAddr,
    ) -> Result<OnPeer, String> {
        let link = self.links.take();
        let mut asked =
            match ask(&link, &self.server_id, PEER_CARRY_PATH, target, metadata(node, client)).await {
                Ok(asked) => asked,
                Err(error) => {
                    if matches!(error, RelayError::Link(_)) {
                        self.closed.cancel();
                    }
                    return Err(error.to_string());
                }
            };
        let patience = ANSWER + self.rtt().unwrap_or_default() * 4;
        match tokio::time::timeout(patience, poll_fn(|cx| asked.response.poll_informational(cx))).await {
            Ok(Some(Ok(_))) => Ok(OnPeer { peer: self.clone(), link, asked: Some(asked) }),
            Ok(Some(Err(error))) => Err(link::reason(&error)),
            Ok(None) => Err(match asked.response.await {
                Ok(answer) => match Status::from_header_map(answer.headers()) {
                    Some(status) => printable(status.message(), 300),
                    None => format!("it answered with HTTP status {} at once", answer.status()),
                },
                Err(error) => link::reason(&error),
            }),
            Err(_) => {
                self.unanswered.add(link.flow.received());
                Err(format!("no answer within {} ms", patience.as_millis()))
            }
        }
    }
}

/// An ask that was left unanswered. Whatever arrives later, if only the answer to a PING, shows that the other server works.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<Option<u64>>);

impl Unanswered {
    /// `received`: the bytes that the link has received so far.
    pub(super) fn add(&self, received: u64) {
        *self.lock() = Some(received);
    }

    fn lasts(&self, received: u64) -> bool {
        *self.lock() == Some(received)
    }

    fn lock(&self) -> MutexGuard<'_, Option<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn metadata(node: &NodeName, client: SocketAddr) -> HeaderMap {
    let text = |value: &dyn Display| HeaderValue::try_from(value.to_string()).ok();
    [(NODE_HEADER, text(node)), (CLIENT_HEADER, text(&client))]
        .into_iter()
        .filter_map(|(name, value)| Some((HeaderName::from_static(name), value?)))
        .collect()
}

/// A connection that another server passes on.
pub(crate) struct OnPeer {
    pub(crate) peer: Arc<Peer>,
    pub(crate) link: Taken,
    /// Until it is carried.
    asked: Option<Asked>,
}

impl OnPeer {
    /// What was asked; only once.
    ///
    /// # Errors
    /// A second time.
    pub(crate) fn asked(&mut self) -> Result<Asked, RelayError> {
        let again = || RelayError::Dial(Outcome::Protocol, "it is carried already".to_owned());
        self.asked.take().ok_or_else(again)
    }

    /// What carrying needs.
    pub(crate) fn on(&self) -> On<'_> {
        On { link: &self.link, to: &self.peer.server_id, stalls: &self.peer.stalls }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ask_is_unanswered_until_something_arrives() {
        let unanswered = Unanswered::default();
        assert!(!unanswered.lasts(0), "nothing was asked");
        unanswered.add(700);
        assert!(unanswered.lasts(700));
        assert!(!unanswered.lasts(701));
        unanswered.add(701);
        assert!(unanswered.lasts(701));
    }
}

//! The sessions with agents, and the live ones by node.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_link::relay::{OF_NODE_HEADER, RELAY_PATH, RelayError, StallBound, Totals};
use tunnel_routing::{Router, TunnelHolder};
use tunnel_runtime::NodeName;

use super::link::{Link, PendingStream};
use super::links::Links;
use crate::admission::Shares;
use crate::metrics::Metrics;
use crate::pki::{Credential, Refusal};

/// Number of moves that a follower may lag behind before it has to start again.
const MOVES: usize = 1 << 12;
/// Interval at which a session is looked at that may be ended once it is not used.
const UNUSED: Duration = Duration::from_secs(1);
/// Number of nodes for which the end of the last session is kept; beyond it the oldest is dropped.
const REMEMBERED: usize = 1 << 17;

/// Maximum number of sessions of one node whose agents are leaving. One more ends the oldest, so that an agent that
/// leaves again and again does not accumulate links.
const MOST_LEAVING: usize = 4;

/// Epochs are wall-clock milliseconds. An epoch further ahead of this server's clock than this does not come from a
/// correct clock, and does not fence one that does. A clock that has been wrong by hours, such as a hardware clock in
/// local time, is set back without this server having looked at it before.
const AHEAD: Duration = Duration::from_secs(24 * 3600);

/// Sort key of epochs: plausible by a correct clock, then the number. A copied identity that claims 2^64-2 is replaced
/// by the node's own agent; agents whose clocks are equally far ahead are still ordered by their numbers.
fn rank(epoch: u64, now: SystemTime) -> (bool, u64) {
    let limit = (now + AHEAD).duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    (u128::from(epoch) <= limit, epoch)
}

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
    /// Set once its agent has asked for the end of its connections.
    pub(crate) ending: AtomicBool,
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
    pub(crate) async fn ask(&self, link: &Link, target: SocketAddr) -> Result<PendingStream, RelayError> {
        let mut more = HeaderMap::new();
        if self.router.snapshot().names(&self.node, target.ip()) {
            more.insert(OF_NODE_HEADER, HeaderValue::from_static("1"));
        }
        let pending = link.ask(self.node.as_str(), RELAY_PATH, target, more).await;
        if let Err(RelayError::Link(_)) = pending {
            // Even if its PINGs are still answered.
            self.close_link(link);
        }
        pending
    }
}

/// A session was refused because a newer one is live.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node} has a newer session (number {live} from {peer}; this one is number {offered})")]
pub struct Fenced {
    node: NodeName,
    live: u64,
    offered: u64,
    peer: SocketAddr,
}

/// State of a session when it was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forgotten {
    /// Its agent had announced that it leaves.
    Leaving,
    Lost,
}

/// A node's session was registered here, or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) node: NodeName,
    pub(crate) here: bool,
}

/// The end of a node's last session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastEnd {
    pub at: Instant,
    /// None for a moment, until the session's task sets it.
    pub reason: Option<Arc<str>>,
}

/// The live sessions by node.
pub struct Sessions {
    live: RwLock<HashMap<NodeName, Arc<Session>>>,
    ended: Mutex<HashMap<NodeName, LastEnd>>,
    /// Sessions whose agents are leaving: they keep their connections and get no new ones. Each node's oldest is first.
    leaving: Mutex<HashMap<NodeName, VecDeque<Arc<Session>>>>,
    ids: AtomicU64,
    /// Each session asks it about its node.
    pub(crate) router: Arc<Router>,
    metrics: Metrics,
    changed: watch::Sender<u64>,
    moves: broadcast::Sender<Move>,
}

impl Sessions {
    /// Creates an empty registry. Updates `router` with the nodes that have a session.
    pub fn new(router: Arc<Router>, metrics: Metrics) -> Self {
        Self {
            live: RwLock::default(),
            ended: Mutex::default(),
            leaving: Mutex::default(),
            ids: AtomicU64::new(1),
            router,
            metrics,
            changed: watch::Sender::new(0),
            moves: broadcast::Sender::new(MOVES),
        }
    }

    /// Returns a session number that is unique in this process.
    pub fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub fn get(&self, node: &NodeName) -> Option<Arc<Session>> {
        self.live.read().get(node).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Session>> {
        self.live.read().values().cloned().collect()
    }

    /// Returns the live sessions, and those whose agents are leaving.
    pub(crate) fn linked(&self) -> Vec<Arc<Session>> {
        let mut linked = self.all();
        linked.extend(self.leaving.lock().values().flatten().cloned());
        linked
    }

    /// Returns a node's live session, and those whose agents are leaving.
    pub(crate) fn linked_of(&self, node: &NodeName) -> impl Iterator<Item = Arc<Session>> + use<> {
        self.get(node).into_iter().chain(self.leaving_of(node))
    }

    /// Returns the node's sessions that were let in by this credential.
    fn let_in_by(&self, node: &NodeName, credential: &Arc<Credential>) -> impl Iterator<Item = Arc<Session>> {
        self.linked_of(node).filter(|session| Arc::ptr_eq(&session.credential.load(), credential))
    }

    /// Ends the node's sessions that were let in by this credential. Returns false if there are none.
    pub(crate) fn refuse(&self, node: &NodeName, credential: &Arc<Credential>, refusal: &Refusal) -> bool {
        let sessions: Vec<_> = self.let_in_by(node, credential).collect();
        sessions.iter().for_each(|session| session.refuse(refusal.clone()));
        !sessions.is_empty()
    }

    /// Returns once no session of the node that was let in by this credential relays anything.
    pub(crate) async fn unused(&self, node: &NodeName, credential: &Arc<Credential>) {
        while self.let_in_by(node, credential).any(|session| session.links.connections() > 0) {
            tokio::time::sleep(UNUSED).await;
        }
    }

    /// Returns the node's sessions whose agents are leaving, the oldest first.
    pub(crate) fn leaving_of(&self, node: &NodeName) -> VecDeque<Arc<Session>> {
        self.leaving.lock().get(node).cloned().unwrap_or_default()
    }

    /// Returns the number of nodes with a live session.
    pub(crate) fn count(&self) -> usize {
        self.live.read().len()
    }

    /// Waits until no node has a live session.
    pub(crate) async fn none(&self) {
        let mut changed = self.changed();
        // `wait_for` would call `count` with the channel locked. Writers lock the sessions first, then the channel: a deadlock.
        while self.count() > 0 && changed.changed().await.is_ok() {}
    }

    /// Returns the nodes with a live session.
    pub fn live(&self) -> BTreeSet<NodeName> {
        self.live.read().keys().cloned().collect()
    }

    /// Incremented whenever a node gets or loses its session. A receiver may see several changes as one.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Returns the nodes with a session, and all moves from then on.
    pub(crate) fn follow(&self) -> (Vec<NodeName>, broadcast::Receiver<Move>) {
        let live = self.live.read();
        (live.keys().cloned().collect(), self.moves.subscribe())
    }

    /// Must be called under the lock, so that followers see changes in order.
    fn moved(&self, node: &NodeName, here: bool) {
        self.changed.send_modify(|changes| *changes += 1);
        // Fails if there is no follower.
        let _ = self.moves.send(Move { node: node.clone(), here });
    }

    /// Returns the time and reason of the end of the node's last session, even if it has another one now.
    pub fn last_end(&self, node: &NodeName) -> Option<LastEnd> {
        self.ended.lock().get(node).cloned()
    }

    /// Sets the reason why the node's session has ended.
    pub(crate) fn explain_end(&self, node: &NodeName, reason: &str) {
        if let Some(end) = self.ended.lock().get_mut(node) {
            end.reason.get_or_insert_with(|| reason.into());
        }
    }

    fn note_end(&self, node: &NodeName) {
        let end = LastEnd { at: Instant::now(), reason: None };
        let mut ended = self.ended.lock();
        if ended.len() >= REMEMBERED
            && !ended.contains_key(node)
            && let Some(oldest) = ended.iter().min_by_key(|(_, end)| end.at).map(|(node, _)| node.clone())
        {
            ended.remove(&oldest);
        }
        ended.insert(node.clone(), end);
    }

    /// Makes `session` the node's live one. Returns the older session that it replaces.
    ///
    /// # Errors
    /// If the live session has the same or a newer epoch.
    pub fn register(&self, session: Arc<Session>) -> Result<Option<Arc<Session>>, Fenced> {
        let (node, now) = (session.node.clone(), self.router.clock().now());
        let mut live = self.live.write();
        if let Some(current) = live.get(&node)
            && rank(current.epoch, now) >= rank(session.epoch, now)
        {
            return Err(Fenced { node, live: current.epoch, offered: session.epoch, peer: current.peer });
        }
        let older = live.insert(node.clone(), session);
        self.metrics.tunnels.set(i64::try_from(live.len()).unwrap_or(i64::MAX));
        if older.is_none() {
            self.router.set_live(&node, TunnelHolder::This, true);
            self.moved(&node, true);
        }
        Ok(older)
    }

    /// Removes `session` unless another one has already replaced it. Its agent is expected back, unless it may have no
    /// session any more.
    pub fn unregister(&self, session: &Session) {
        self.remove(session, session.refusal.get().is_none());
    }

    fn remove(&self, session: &Session, comes_back: bool) {
        {
            let mut live = self.live.write();
            if live.get(&session.node).is_none_or(|current| current.id != session.id) {
                return;
            }
            live.remove(&session.node);
            self.metrics.tunnels.set(i64::try_from(live.len()).unwrap_or(i64::MAX));
            if comes_back {
                self.router.lose(&session.node, TunnelHolder::This);
            } else {
                self.router.set_live(&session.node, TunnelHolder::This, false);
            }
            self.moved(&session.node, false);
        }
        self.note_end(&session.node);
    }

    /// Removes the session of an agent that is leaving; it finishes its connections. `comes_back` is false if the agent
    /// has announced that it stops. If the node has too many such sessions, the oldest ends.
    pub fn leave(&self, session: &Arc<Session>, comes_back: bool) {
        self.remove(session, comes_back && session.refusal.get().is_none());
        let oldest = {
            let mut leaving = self.leaving.lock();
            // The agent may announce it while its session ends, or after it was the oldest of too many.
            if session.forgotten.load(Ordering::Relaxed) || session.closed.is_cancelled() {
                return;
            }
            let sessions = leaving.entry(session.node.clone()).or_default();
            if sessions.iter().any(|other| other.id == session.id) {
                return;
            }
            sessions.push_back(session.clone());
            if sessions.len() <= MOST_LEAVING {
                self.metrics.sessions_leaving.inc();
                return;
            }
            sessions.pop_front()
        };
        let Some(oldest) = oldest else { return };
        tracing::warn!(
            node = %oldest.node, peer = %oldest.peer, epoch = oldest.epoch,
            connections = oldest.links.connections(),
            limit = MOST_LEAVING,
            "too many draining sessions of the node, closing the oldest"
        );
        oldest.close();
    }

    /// Forgets a session whose first link has ended.
    pub(crate) fn forget(&self, session: &Session) -> Forgotten {
        self.unregister(session);
        let mut leaving = self.leaving.lock();
        session.forgotten.store(true, Ordering::Relaxed);
        let Some(sessions) = leaving.get_mut(&session.node) else { return Forgotten::Lost };
        let Some(index) = sessions.iter().position(|other| other.id == session.id) else {
            return Forgotten::Lost;
        };
        sessions.remove(index);
        if sessions.is_empty() {
            leaving.remove(&session.node);
        }
        self.metrics.sessions_leaving.dec();
        Forgotten::Leaving
    }
}

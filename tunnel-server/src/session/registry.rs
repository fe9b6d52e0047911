//! The live sessions by node.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use tunnel_routing::{Holder, Router};
use tunnel_runtime::NodeName;

use super::Session;
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
    router: Arc<Router>,
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

    /// The router that each session asks about its node.
    pub(crate) fn router(&self) -> &Arc<Router> {
        &self.router
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
            self.router.set_live(&node, Holder::This, true);
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
                self.router.lose(&session.node, Holder::This);
            } else {
                self.router.set_live(&session.node, Holder::This, false);
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

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicBool;

    use arc_swap::ArcSwap;
    use prometheus_client::registry::Registry;
    use tokio_util::sync::CancellationToken;
    use tunnel_link::relay::{StallBound, Totals};

    use super::*;
    use crate::session::Links;
    use crate::session::links::tests::link;

    fn sessions() -> Sessions {
        let mut registry = Registry::default();
        let router = crate::runtime::without_nodes(&mut registry);
        Sessions::new(router, Metrics::new(&mut registry))
    }

    impl Sessions {
        /// The node's next agent attaches, and the previous one leaves.
        async fn replace(&self, node: &str, epoch: u64) -> Arc<Session> {
            let session = Arc::new(Session {
                id: self.next_id(),
                node: node.parse().unwrap(),
                router: self.router.clone(),
                epoch,
                credential: ArcSwap::from_pointee(Credential::token(SystemTime::now())),
                refusal: OnceLock::new(),
                moving: AtomicBool::new(false),
                replaced: CancellationToken::new(),
                succeeded: AtomicBool::new(false),
                peer: "203.0.113.9:40000".parse().unwrap(),
                since: Instant::now(),
                agent_version: String::new(),
                links: Links::new(link(0, Duration::ZERO).await, 1),
                stalls: StallBound::new(1 << 20, 1 << 20),
                places: crate::admission::Shares::new(0),
                relayed: Totals::default(),
                closed: CancellationToken::new(),
                over: CancellationToken::new(),
                forgotten: AtomicBool::new(false),
            });
            if let Some(older) = self.register(session.clone()).unwrap() {
                self.leave(&older, true);
            }
            session
        }

        /// Epochs of the node's sessions, the live one first.
        fn epochs(&self, node: &str) -> Vec<u64> {
            self.linked_of(&node.parse().unwrap()).map(|session| session.epoch).collect()
        }

        fn counted(&self) -> (i64, i64) {
            (self.metrics.tunnels.get(), self.metrics.sessions_leaving.get())
        }
    }

    #[tokio::test]
    async fn agents_that_are_replaced_one_after_the_other_finish_side_by_side() {
        let sessions = sessions();
        sessions.replace("other", 1).await;
        let other = sessions.replace("other", 2).await;
        let mut all = Vec::new();
        for epoch in 1..=5 {
            all.push(sessions.replace("edge-1", epoch).await);
        }
        let over = |all: &[Arc<Session>]| -> Vec<u64> {
            all.iter().filter(|session| session.over.is_cancelled()).map(|session| session.epoch).collect()
        };
        assert_eq!(sessions.epochs("edge-1"), [5, 1, 2, 3, 4]);
        assert_eq!((sessions.counted(), sessions.linked().len()), ((2, 5), 7));
        assert!(over(&all).is_empty());
        // Announced again as its event stream ends.
        sessions.leave(&all[0], true);
        assert_eq!((sessions.epochs("edge-1"), sessions.counted()), (vec![5, 1, 2, 3, 4], (2, 5)));

        // One too many.
        all.push(sessions.replace("edge-1", 6).await);
        assert_eq!((sessions.epochs("edge-1"), sessions.counted()), (vec![6, 2, 3, 4, 5], (2, 5)));
        assert_eq!(over(&all), [1]);
        assert!(all[0].closed.is_cancelled());
        sessions.leave(&all[0], true);
        assert_eq!(sessions.epochs("edge-1"), [6, 2, 3, 4, 5], "it has no place any more");
        assert_eq!(sessions.forget(&all[0]), Forgotten::Lost);

        // They may end in any order, and the others stay.
        for (index, left) in [(2, vec![6, 2, 4, 5]), (1, vec![6, 4, 5]), (4, vec![6, 4]), (3, vec![6])] {
            assert_eq!(sessions.forget(&all[index]), Forgotten::Leaving);
            assert_eq!(sessions.epochs("edge-1"), left);
        }
        assert_eq!((sessions.counted(), over(&all)), ((2, 1), vec![1]));
        assert_eq!(sessions.forget(&all[5]), Forgotten::Lost);
        assert_eq!((sessions.counted(), sessions.epochs("other")), ((1, 1), vec![2, 1]));
        sessions.leave(&other, true);
        assert_eq!((sessions.counted(), sessions.epochs("other")), ((0, 2), vec![1, 2]));
    }

    #[tokio::test]
    async fn a_session_that_has_ended_does_not_stay_as_one_that_leaves() {
        let sessions = sessions();
        let first = sessions.replace("edge-1", 1).await;
        assert_eq!(sessions.forget(&first), Forgotten::Lost);
        // The session's replacement is late.
        sessions.leave(&first, true);
        assert_eq!((sessions.epochs("edge-1"), sessions.counted()), (vec![], (0, 0)));
        let second = sessions.replace("edge-1", 2).await;
        sessions.leave(&second, true);
        assert_eq!(sessions.forget(&second), Forgotten::Leaving);
        sessions.leave(&second, true);
        assert_eq!((sessions.epochs("edge-1"), sessions.counted()), (vec![], (0, 0)));
    }

    #[tokio::test]
    async fn an_agent_is_expected_back_unless_it_has_left_or_may_not_come() {
        let sessions = sessions();
        let node: NodeName = "edge-1".parse().unwrap();
        let awaited = |sessions: &Sessions| sessions.router.awaited(&node).is_some();
        let first = sessions.replace("edge-1", 1).await;
        sessions.unregister(&first);
        assert!(awaited(&sessions));
        let second = sessions.replace("edge-1", 2).await;
        assert!(!awaited(&sessions), "it is back");
        second.refuse(Refusal::Unknown(node.clone()));
        sessions.unregister(&second);
        assert!(!awaited(&sessions), "its node was deleted");
        let third = sessions.replace("edge-1", 3).await;
        sessions.leave(&third, false);
        sessions.leave(&third, true);
        assert!(!awaited(&sessions), "it stops");
    }

    #[test]
    fn an_epoch_that_no_clock_explains_keeps_nobody_out() {
        let now = SystemTime::now();
        let ms =
            |time: SystemTime| u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        let newer = |than: u64, epoch: u64| rank(epoch, now) > rank(than, now);
        let (copy, agent) = (u64::MAX - 1, ms(now));
        assert!(newer(copy, agent) && !newer(agent, copy));
        // Also an agent that lost its file and whose clock is at 1970.
        assert!(newer(copy, 1));
        // Clocks differ slightly, and the next session is still newer.
        assert!(newer(ms(now + AHEAD) - 1, ms(now + AHEAD)) && newer(agent, ms(now + AHEAD / 2)));
        // A clock that is years ahead: its own sessions keep their order.
        let ahead = ms(now + Duration::from_secs(1 << 28));
        assert!(newer(ahead, ahead + 1) && !newer(ahead + 1, ahead));
        // A clock that is set back by hours makes no agent's number implausible.
        assert!(rank(agent, now - AHEAD / 2) > rank(agent - 1, now - AHEAD / 2));
        // A server whose clock starts at 1970 orders as before.
        assert!(rank(agent + 1, UNIX_EPOCH) > rank(agent, UNIX_EPOCH));
    }
}

use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use arc_swap::ArcSwap;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tunnel_link::relay::{StallBound, Totals};

use super::*;
use crate::session::links::tests::link;
use crate::session::{Links, Placing};

fn sessions() -> Sessions {
    let mut registry = Registry::default();
    let router = crate::runtime::without_nodes(&mut registry);
    Sessions::new(router, Metrics::new(&mut registry))
}

impl Sessions {
    /// The node's next agent attaches, and the previous one leaves.
    pub(crate) async fn replace(&self, node: &str, epoch: u64) -> Arc<Session> {
        self.replace_on(node, epoch, Links::new(link(0, Duration::ZERO).await, 1, Placing::Apart))
    }

    /// The same, on these links.
    pub(crate) fn replace_on(&self, node: &str, epoch: u64, links: Links) -> Arc<Session> {
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
            links,
            stalls: StallBound::new(1 << 20, 1 << 20),
            places: crate::admission::Shares::new(0),
            relayed: Totals::default(),
            closed: CancellationToken::new(),
            over: CancellationToken::new(),
            ending: AtomicBool::new(false),
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
    sessions.none().await;
}

#[tokio::test]
async fn the_end_of_the_last_session_is_noticed() {
    let sessions = sessions();
    let both = [sessions.replace("edge-1", 1).await, sessions.replace("edge-2", 1).await];
    let (mut ended, none) = (0, sessions.none());
    let ends = async {
        for session in &both {
            tokio::task::yield_now().await;
            sessions.leave(session, false);
            ended += 1;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = none => {}
        () = ends => {}
    }
    assert_eq!(ended, 2);
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
fn an_epoch_far_ahead_of_the_clock_yields_to_any_other() {
    let now = SystemTime::now();
    let ms = |time: SystemTime| u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
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

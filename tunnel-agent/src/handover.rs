//! State of a takeover between two agents of this node, in either direction, as far as sessions need it.

use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

/// Maximum delay of news about a session that the other agent had.
const NEWS: Duration = Duration::from_secs(30);

/// Progress of another agent of this node that takes over from this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// There is no other agent.
    #[default]
    Alone,
    /// Another agent is taking over and is attached at these addresses.
    Passing(BTreeSet<String>),
    /// Another agent has taken over.
    Passed,
}

impl Phase {
    /// True if this agent keeps sessions with the server at this address. An address at which it `stood_by` leads to a
    /// server that the successor may have through another address.
    fn leaves_to_us(&self, server: &str, stood_by: bool) -> bool {
        match self {
            Self::Alone => true,
            Self::Passing(attached) if stood_by => attached.is_empty(),
            Self::Passing(attached) => !attached.contains(server),
            Self::Passed => false,
        }
    }
}

/// The takeovers of an agent. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Handover(Arc<State>);

#[derive(Debug, Default)]
struct State {
    phase: watch::Sender<Phase>,
    /// Time when the last successor died.
    died: Mutex<Option<Instant>>,
    successor: AtomicBool,
    /// Time when this agent completed a takeover.
    succeeded: Mutex<Option<Instant>>,
}

/// True if the event is recent.
fn is_news(event: &Mutex<Option<Instant>>) -> bool {
    event.lock().is_some_and(|event| event.elapsed() < NEWS)
}

impl Handover {
    pub fn set(&self, phase: Phase) {
        if phase == Phase::Alone {
            *self.0.died.lock() = Some(Instant::now());
        }
        self.0.phase.send_replace(phase);
    }

    /// Sets the addresses at which the successor is attached. Has no effect once it has taken over.
    pub fn set_attached(&self, servers: BTreeSet<String>) {
        self.0.phase.send_if_modified(|phase| {
            let passing = matches!(phase, Phase::Passing(_));
            if passing {
                *phase = Phase::Passing(servers);
            }
            passing
        });
    }

    /// Notes that the server at this address reports the successor as attached, perhaps before the successor does.
    pub(crate) fn succeeded_at(&self, server: &str) {
        self.0.phase.send_if_modified(|phase| match phase {
            Phase::Passing(attached) => attached.insert(server.to_owned()),
            _ => false,
        });
    }

    /// Sets whether this agent is taking over from another one, so that its sessions may replace those of that one.
    pub fn set_successor(&self, successor: bool) {
        let was = self.0.successor.swap(successor, Ordering::Relaxed);
        if was && !successor {
            *self.0.succeeded.lock() = Some(Instant::now());
        }
    }

    /// True while this agent takes over, and for a moment after: when its link was lost, the other one may have
    /// attached again at the last moment, and a server reports that only now.
    pub fn is_successor(&self) -> bool {
        self.0.successor.load(Ordering::Relaxed) || is_news(&self.0.succeeded)
    }

    pub fn is_alone(&self) -> bool {
        *self.0.phase.borrow() == Phase::Alone
    }

    pub fn has_passed(&self) -> bool {
        *self.0.phase.borrow() == Phase::Passed
    }

    /// True if a server may report a successor: there is one, or was a moment ago.
    pub(crate) fn knows_successor(&self) -> bool {
        !self.is_alone() || is_news(&self.0.died)
    }

    async fn until(&self, reached: impl FnMut(&Phase) -> bool) {
        // The sender lives as long as `self`.
        if self.0.phase.subscribe().wait_for(reached).await.is_err() {
            pending::<()>().await;
        }
    }

    /// Waits until there is no successor, or it has died.
    pub(crate) async fn alone(&self) {
        self.until(|phase| *phase == Phase::Alone).await;
    }

    /// Waits until this agent is to dial the server at this address, at which it may have `stood_by`.
    pub(crate) async fn ours(&self, server: &str, stood_by: bool) {
        self.until(|phase| phase.leaves_to_us(server, stood_by)).await;
    }

    /// Waits until a successor has taken over.
    pub async fn passed(&self) {
        self.until(|phase| *phase == Phase::Passed).await;
    }

    /// Waits until no successor has taken over, or it has died.
    pub async fn leads(&self) {
        self.until(|phase| *phase != Phase::Passed).await;
    }

    /// Waits until no takeover is in progress.
    pub async fn settled(&self) {
        self.until(|phase| !matches!(phase, Phase::Passing(_))).await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn an_agent_keeps_what_its_successor_does_not_have_yet() {
        let handover = Handover::default();
        let dials = |server: &str| handover.ours(server, false).now_or_never().is_some();
        let states = || (dials("a:1"), dials("b:1"), handover.settled().now_or_never().is_some());
        assert_eq!((states(), handover.is_alone()), ((true, true, true), true));
        handover.set(Phase::Passing(BTreeSet::new()));
        assert_eq!(states(), (true, true, false), "it may not come that far");
        assert!(handover.leads().now_or_never().is_some());
        handover.set_attached(BTreeSet::from(["a:1".to_owned()]));
        assert_eq!((states(), handover.is_alone()), ((false, true, false), false));
        handover.set(Phase::Passed);
        handover.set_attached(BTreeSet::new());
        assert_eq!(states(), (false, false, true));
        assert!(handover.passed().now_or_never().is_some() && handover.leads().now_or_never().is_none());
        handover.set(Phase::Alone);
        assert_eq!(states(), (true, true, true), "it has died");
        assert!(handover.leads().now_or_never().is_some());
        assert!(handover.alone().now_or_never().is_some() && handover.knows_successor());
        assert!(!Handover::default().knows_successor());
    }

    #[test]
    fn an_agent_does_not_come_back_to_what_its_successor_has_through_another_address() {
        let handover = Handover::default();
        let dials = |server: &str| handover.ours(server, true).now_or_never().is_some();
        assert!(dials("a:2"));
        handover.succeeded_at("a:1");
        assert!(handover.is_alone(), "there is no successor");
        handover.set(Phase::Passing(BTreeSet::new()));
        assert!(dials("a:2"), "it has no server yet");
        handover.succeeded_at("a:1");
        assert!(!dials("a:2"), "the server says so first");
        assert!(handover.ours("b:1", false).now_or_never().is_some());
        assert!(handover.ours("a:1", false).now_or_never().is_none());
        handover.set_attached(BTreeSet::from(["a:2".to_owned()]));
        assert!(!dials("a:1"));
        handover.set_attached(BTreeSet::new());
        assert!(dials("a:1") && dials("a:2"), "it has lost it");
        handover.set(Phase::Passed);
        assert!(!dials("a:2"));
        handover.set(Phase::Alone);
        assert!(dials("a:2"), "it has died");
    }

    #[test]
    fn what_the_agent_before_did_last_may_be_told_after_it_was_taken_over_from() {
        let handover = Handover::default();
        handover.set_successor(false);
        assert!(!handover.is_successor(), "it has never taken over");
        handover.set_successor(true);
        assert!(handover.is_successor());
        handover.set_successor(false);
        assert!(handover.is_successor(), "the news may be under way");
        let before = Instant::now().checked_sub(NEWS);
        assert!(!is_news(&Mutex::new(before)), "it is none for ever");
    }
}

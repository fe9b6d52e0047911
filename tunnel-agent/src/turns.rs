//! Whose turn it is to dial: a bounded number at a time, shared fairly by the targets.
//!
//! A target may have as many dials under way as turns are free, so that a black hole takes half of them at most, and two
//! a third each. What has to wait does so until its own deadline; the target with the fewest under way goes first.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

#[derive(Clone, Debug)]
pub(crate) struct Turns {
    limit: usize,
    most_waiting: usize,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    /// Including those that have given up and were not removed yet.
    waiting: usize,
    targets: HashMap<SocketAddr, Target>,
    /// Targets with waiting dials.
    wanted: BTreeSet<(usize, SocketAddr)>,
}

#[derive(Debug, Default)]
struct Target {
    under_way: usize,
    waiters: VecDeque<oneshot::Sender<Turn>>,
}

/// A dial under way; dropping it passes the turn on.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    target: SocketAddr,
}

impl Turns {
    pub(crate) fn new(limit: usize, most_waiting: usize) -> Self {
        Self { limit, most_waiting, state: Arc::default() }
    }

    pub(crate) fn under_way(&self) -> usize {
        self.lock().under_way
    }

    /// Waits for a turn; None if too many wait already.
    pub(crate) async fn take(&self, target: SocketAddr) -> Option<Turn> {
        let granted = {
            let mut state = self.lock();
            if state.waiting >= self.most_waiting {
                state.forget_gone();
                if state.waiting >= self.most_waiting {
                    return None;
                }
            }
            let (turn, granted) = oneshot::channel();
            state.change(target, |target| target.waiters.push_back(turn));
            state.waiting += 1;
            granted
        };
        self.grant();
        granted.await.ok()
    }

    /// Gives free turns to those who wait.
    fn grant(&self) {
        loop {
            let (waiter, turn) = {
                let mut state = self.lock();
                let free = self.limit - state.under_way;
                let Some((_, target)) = state.wanted.first().copied().filter(|(own, _)| *own < free) else {
                    return;
                };
                let waiter = state.change(target, |target| {
                    let waiter = target.waiters.pop_front();
                    let live = waiter.filter(|waiter| !waiter.is_closed());
                    target.under_way += usize::from(live.is_some());
                    live
                });
                state.waiting -= 1;
                let Some(waiter) = waiter else { continue };
                state.under_way += 1;
                (waiter, Turn { turns: self.clone(), target })
            };
            // Without the lock: if nobody waits any more, the turn comes back and is passed on.
            let _ = waiter.send(turn);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn change<T>(&mut self, address: SocketAddr, change: impl FnOnce(&mut Target) -> T) -> T {
        let target = self.targets.entry(address).or_default();
        let before = target.wanted();
        let changed = change(target);
        let after = target.wanted();
        if target.under_way == 0 && after.is_none() {
            self.targets.remove(&address);
        }
        if before != after {
            before.map(|own| self.wanted.remove(&(own, address)));
            after.map(|own| self.wanted.insert((own, address)));
        }
        changed
    }

    fn forget_gone(&mut self) {
        let wanted: Vec<SocketAddr> = self.wanted.iter().map(|(_, address)| *address).collect();
        for address in wanted {
            let gone = self.change(address, |target| {
                let before = target.waiters.len();
                target.waiters.retain(|waiter| !waiter.is_closed());
                before - target.waiters.len()
            });
            self.waiting -= gone;
        }
    }
}

impl Target {
    /// Its place among the targets with waiting dials.
    fn wanted(&self) -> Option<usize> {
        (!self.waiters.is_empty()).then_some(self.under_way)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        {
            let mut state = self.turns.lock();
            state.under_way -= 1;
            state.change(self.target, |target| target.under_way -= 1);
        }
        self.turns.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    fn target(number: u16) -> SocketAddr {
        ([10, 0, 0, 1], 1000 + number).into()
    }

    type Taking = Pin<Box<dyn Future<Output = Option<Turn>>>>;

    /// A dial that asks for its turn, polled once.
    fn ask(turns: &Turns, number: u16) -> (Taking, Poll<Option<Turn>>) {
        let turns = turns.clone();
        let mut taking: Taking = Box::pin(async move { turns.take(target(number)).await });
        let asked = poll(&mut taking);
        (taking, asked)
    }

    fn poll(taking: &mut Taking) -> Poll<Option<Turn>> {
        taking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn black_holes_leave_turns_to_other_targets() {
        let turns = Turns::new(100, 1000);
        let held: Vec<_> = (0..200).map(|_| ask(&turns, 1)).collect();
        assert_eq!(held.iter().filter(|(_, asked)| asked.is_ready()).count(), 50);
        let more: Vec<_> = (0..200).map(|_| ask(&turns, 2)).collect();
        assert_eq!(more.iter().filter(|(_, asked)| asked.is_ready()).count(), 25);
        assert!(ask(&turns, 3).1.is_ready());
        drop((held, more));
        let state = turns.lock();
        assert_eq!((state.under_way, state.targets.len(), state.wanted.len()), (0, 0, 0));
    }

    #[test]
    fn too_many_waiters_are_refused_and_those_that_left_do_not_count() {
        let turns = Turns::new(2, 3);
        let (_first, held) = ask(&turns, 1);
        assert!(held.is_ready());
        let waiting: Vec<_> = (0..3).map(|_| ask(&turns, 1)).collect();
        assert!(matches!(ask(&turns, 2).1, Poll::Ready(None)));
        drop(waiting);
        assert!(matches!(ask(&turns, 2).1, Poll::Ready(Some(_))));
    }

    proptest! {
        /// Whatever comes, waits, leaves and ends: the bound holds, nobody waits who could go, and nothing is lost.
        #[test]
        fn every_turn_is_used(limit in 1usize..8, steps in prop::collection::vec((0u8..4, 0u16..4, 0usize..30), 1..200)) {
            let turns = Turns::new(limit, 1000);
            let mut waiting: Vec<(u16, Taking)> = Vec::new();
            let mut held: Vec<(u16, Turn)> = Vec::new();
            for (action, number, index) in steps {
                match action {
                    0 if !held.is_empty() => drop(held.swap_remove(index % held.len())),
                    1 if !waiting.is_empty() => drop(waiting.swap_remove(index % waiting.len())),
                    _ => match ask(&turns, number) {
                        (_, Poll::Ready(turn)) => held.push((number, turn.unwrap())),
                        (taking, Poll::Pending) => waiting.push((number, taking)),
                    },
                }
                let mut left = Vec::new();
                for (number, mut taking) in waiting {
                    match poll(&mut taking) {
                        Poll::Ready(turn) => held.push((number, turn.unwrap())),
                        Poll::Pending => left.push((number, taking)),
                    }
                }
                waiting = left;
                prop_assert!(held.len() <= limit);
                prop_assert_eq!(turns.under_way(), held.len());
                let mut own: HashMap<u16, usize> = HashMap::new();
                for (number, _) in &held {
                    *own.entry(*number).or_default() += 1;
                }
                for (number, _) in &waiting {
                    let own = own.get(number).copied().unwrap_or(0);
                    prop_assert!(own >= limit - held.len(), "{number} waits with {own} of {limit} under way");
                }
            }
            drop((held, waiting));
            let state = turns.lock();
            prop_assert_eq!(state.under_way, 0);
            prop_assert!(state.targets.is_empty() && state.wanted.is_empty() && state.waiting == 0);
        }
    }
}

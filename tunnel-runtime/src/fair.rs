//! A bounded number of turns that users share fairly, without configured shares: dials by target, queries by client.
//!
//! A user may have as many turns as are free, so one that wants all gets half of them, and two get a third each
//! (Choudhury and Hahne, "Dynamic queue length thresholds", 1998). A request above that waits, until its own deadline;
//! the user with the fewest turns goes first, and among equals the one whose last turn is longest ago. Waiting is limited by the
//! same rule.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

#[derive(Debug)]
pub struct FairShare<K: Ord + Hash + Clone> {
    shared: Arc<Shared<K>>,
}

#[derive(Debug)]
struct Shared<K: Ord + Hash + Clone> {
    limit: usize,
    most_waiting: usize,
    state: Mutex<State<K>>,
}

#[derive(Debug)]
struct State<K: Ord + Hash + Clone> {
    taken: usize,
    /// Includes requests that were given up and not removed yet.
    waiting: usize,
    users: HashMap<K, User<K>>,
    /// Counts users that came, and turns that were given.
    next: u64,
    /// Users that wait, ordered by their number of turns, then by their last one.
    wanted: BTreeSet<(usize, u64, K)>,
}

#[derive(Debug)]
struct User<K: Ord + Hash + Clone> {
    taken: usize,
    /// Number of its last turn, or of its first request.
    since: u64,
    waiters: VecDeque<oneshot::Sender<Turn<K>>>,
}

/// A turn; dropping it hands it to the next one waiting.
#[derive(Debug)]
pub struct Turn<K: Ord + Hash + Clone> {
    share: FairShare<K>,
    user: K,
}

impl<K: Ord + Hash + Clone> Clone for FairShare<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<K: Ord + Hash + Clone> FairShare<K> {
    /// Allows `limit` turns at a time, and `most_waiting` waiting requests of all users together.
    pub fn new(limit: usize, most_waiting: usize) -> Self {
        let state = State { taken: 0, waiting: 0, users: HashMap::new(), next: 0, wanted: BTreeSet::new() };
        Self { shared: Arc::new(Shared { limit, most_waiting, state: Mutex::new(state) }) }
    }

    /// Waits for a turn. `None` if too many requests of this user wait already.
    pub async fn take(&self, user: K) -> Option<Turn<K>> {
        let granted = {
            let mut state = self.shared.state.lock();
            if !state.may_wait(&user, self.shared.most_waiting) {
                state.forget_gone();
                if !state.may_wait(&user, self.shared.most_waiting) {
                    return None;
                }
            }
            let (turn, granted) = oneshot::channel();
            state.change(&user, |user| user.waiters.push_back(turn));
            state.waiting += 1;
            granted
        };
        self.grant();
        granted.await.ok()
    }

    /// Gives free turns to waiting requests.
    fn grant(&self) {
        loop {
            let (waiter, turn) = {
                let mut state = self.shared.state.lock();
                let free = self.shared.limit - state.taken;
                let Some((.., user)) = state.wanted.first().filter(|(own, ..)| *own < free).cloned() else {
                    return;
                };
                state.next += 1;
                let number = state.next;
                let waiter = state.change(&user, |user| {
                    let waiter = user.waiters.pop_front();
                    let live = waiter.filter(|waiter| !waiter.is_closed());
                    if live.is_some() {
                        user.taken += 1;
                        user.since = number;
                    }
                    live
                });
                state.waiting -= 1;
                let Some(waiter) = waiter else { continue };
                state.taken += 1;
                (waiter, Turn { share: self.clone(), user })
            };
            // Sent without the lock: if the request was given up, the turn is dropped and handed on.
            let _ = waiter.send(turn);
        }
    }
}

impl<K: Ord + Hash + Clone> State<K> {
    fn may_wait(&self, user: &K, most_waiting: usize) -> bool {
        self.users.get(user).map_or(0, |user| user.waiters.len()) < most_waiting - self.waiting
    }

    fn change<T>(&mut self, key: &K, change: impl FnOnce(&mut User<K>) -> T) -> T {
        self.next += 1;
        let since = self.next;
        let user = self.users.entry(key.clone()).or_insert_with(|| User {
            taken: 0,
            since,
            waiters: VecDeque::new(),
        });
        let before = user.wanted();
        let changed = change(user);
        let after = user.wanted();
        if user.taken == 0 && after.is_none() {
            self.users.remove(key);
        }
        if before != after {
            before.map(|(own, since)| self.wanted.remove(&(own, since, key.clone())));
            after.map(|(own, since)| self.wanted.insert((own, since, key.clone())));
        }
        changed
    }

    fn forget_gone(&mut self) {
        let wanted: Vec<K> = self.wanted.iter().map(|(.., user)| user.clone()).collect();
        for user in wanted {
            let gone = self.change(&user, |user| {
                let before = user.waiters.len();
                user.waiters.retain(|waiter| !waiter.is_closed());
                before - user.waiters.len()
            });
            self.waiting -= gone;
        }
    }
}

impl<K: Ord + Hash + Clone> User<K> {
    /// Returns the position among the waiting users; `None` if this one does not wait.
    fn wanted(&self) -> Option<(usize, u64)> {
        (!self.waiters.is_empty()).then_some((self.taken, self.since))
    }
}

impl<K: Ord + Hash + Clone> Drop for Turn<K> {
    fn drop(&mut self) {
        {
            let mut state = self.share.shared.state.lock();
            state.taken -= 1;
            state.change(&self.user, |user| user.taken -= 1);
        }
        self.share.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Taking = Pin<Box<dyn Future<Output = Option<Turn<u16>>>>>;

    /// Asks for a turn of a user, and polls once.
    fn ask(turns: &FairShare<u16>, user: u16) -> (Taking, Poll<Option<Turn<u16>>>) {
        let turns = turns.clone();
        let mut taking: Taking = Box::pin(async move { turns.take(user).await });
        let asked = poll(&mut taking);
        (taking, asked)
    }

    fn poll(taking: &mut Taking) -> Poll<Option<Turn<u16>>> {
        taking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn greedy_users_leave_turns_to_others() {
        let turns = FairShare::new(100, 1000);
        let held: Vec<_> = (0..200).map(|_| ask(&turns, 1)).collect();
        assert_eq!(held.iter().filter(|(_, asked)| asked.is_ready()).count(), 50);
        let more: Vec<_> = (0..200).map(|_| ask(&turns, 2)).collect();
        assert_eq!(more.iter().filter(|(_, asked)| asked.is_ready()).count(), 25);
        assert!(ask(&turns, 3).1.is_ready());
        drop((held, more));
        let state = turns.shared.state.lock();
        assert_eq!((state.taken, state.users.len(), state.wanted.len()), (0, 0, 0));
    }

    #[test]
    fn a_greedy_user_leaves_room_to_wait_and_those_that_left_do_not_count() {
        let turns = FairShare::new(2, 4);
        let (_first, held) = ask(&turns, 1);
        assert!(held.is_ready());
        let waiting: Vec<_> = (0..2).map(|_| ask(&turns, 1)).collect();
        assert!(waiting.iter().all(|(_, asked)| asked.is_pending()));
        assert!(matches!(ask(&turns, 1).1, Poll::Ready(None)));
        assert!(matches!(ask(&turns, 2).1, Poll::Ready(Some(_))));
        drop(waiting);
        assert!(ask(&turns, 1).1.is_pending());
    }

    #[test]
    fn users_that_want_as_much_take_turns() {
        const USERS: u16 = 4;
        let turns = FairShare::new(2, 1000);
        let held = [ask(&turns, USERS).1, ask(&turns, USERS + 1).1];
        let mut waiting: Vec<_> = (0..40).map(|n| (n % USERS, ask(&turns, n % USERS).0)).collect();
        drop(held);
        let mut given = Vec::new();
        while !waiting.is_empty() {
            let next = waiting.iter_mut().position(|(_, taking)| poll(taking).is_ready());
            given.push(waiting.remove(next.expect("a turn is free")).0);
        }
        for four in given.chunks(USERS.into()) {
            let mut four = four.to_vec();
            four.sort_unstable();
            assert_eq!(four, [0, 1, 2, 3], "{given:?}");
        }
    }

    proptest! {
        /// Whatever is taken, waits, leaves and ends: the limit holds, no request waits that could be served, and
        /// nothing is lost.
        #[test]
        fn every_turn_is_used(limit in 1usize..8, steps in prop::collection::vec((0u8..4, 0u16..4, 0usize..30), 1..200)) {
            let turns = FairShare::new(limit, 1000);
            let mut waiting: Vec<(u16, Taking)> = Vec::new();
            let mut held: Vec<(u16, Turn<u16>)> = Vec::new();
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
                prop_assert_eq!(turns.shared.state.lock().taken, held.len());
                let mut own: HashMap<u16, usize> = HashMap::new();
                for (number, _) in &held {
                    *own.entry(*number).or_default() += 1;
                }
                for (number, _) in &waiting {
                    let own = own.get(number).copied().unwrap_or(0);
                    prop_assert!(own >= limit - held.len(), "{number} waits with {own} of {limit} taken");
                }
            }
            drop((held, waiting));
            let state = turns.shared.state.lock();
            prop_assert_eq!(state.taken, 0);
            prop_assert!(state.users.is_empty() && state.wanted.is_empty() && state.waiting == 0);
        }
    }
}

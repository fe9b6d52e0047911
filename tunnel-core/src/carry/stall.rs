//! Bounds on the bytes that are held for receivers which do not read: one for each link, one for the process.
//!
//! A receiver that stops reading keeps at most one stream window of bytes here. That is legitimate
//! (`kubectl logs -f | less`) and harmless while few do it. So no connection is cut until the sum passes a bound: then
//! the one that has made no progress for longest goes first, at the process's bound that of the link which holds most, so
//! that no node can use up what the others need.
//!
//! A socket that is slowly read becomes writable again only when a third of its buffer is free. So before a connection is
//! cut its own task is asked what the kernel has sent meanwhile.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use tokio::sync::SetOnce;

use crate::memory::stall_budget;
use crate::outcome::Outcome;

/// A receiver that made progress this recently is slow, not stalled. On loopback, where segments have 64 KiB, a reader of
/// 10 KB/s opens its window every seven seconds.
const GRACE: Duration = Duration::from_secs(15);
/// How long a task may take to say what its socket does.
const ANSWER: Duration = Duration::from_millis(100);
/// How long that answer stays true.
const FRESH: Duration = Duration::from_secs(1);
/// The pause between two searches for the link that holds most, when the last one found nothing to cut.
const SCAN_PAUSE: Duration = Duration::from_millis(20);

const LINK_FULL: &str = "it did not read, and its link held more than it may for such receivers";
const PROCESS_FULL: &str =
    "it did not read, all links held more for such receivers than the memory allows, and its link held most";

/// Ends a carried connection from outside its task.
#[derive(Debug, Default)]
pub struct Abort(SetOnce<(Outcome, &'static str)>);

impl Abort {
    /// Ends the connection with `outcome`; only the first call counts.
    pub fn trigger(&self, outcome: Outcome) {
        self.trigger_for(outcome, "");
    }

    fn trigger_for(&self, outcome: Outcome, reason: &'static str) {
        let _ = self.0.set((outcome, reason));
    }

    /// Waits for [`Abort::trigger`]: the outcome, and why where that is not obvious.
    pub async fn triggered(&self) -> (Outcome, &'static str) {
        *self.0.wait().await
    }
}

/// The process's bound. Links take part while receivers are blocked.
#[derive(Debug)]
pub struct StallBudget {
    limit: usize,
    held: AtomicUsize,
    ids: AtomicU64,
    links: Mutex<BTreeMap<u64, Weak<Link>>>,
    scan: Mutex<Option<Instant>>,
}

impl StallBudget {
    /// Allows `bytes` to be held, and a quarter more within the grace.
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: bytes,
            held: AtomicUsize::new(0),
            ids: AtomicU64::new(0),
            links: Mutex::default(),
            scan: Mutex::default(),
        })
    }

    /// The budget of this process, from the memory that it may use.
    pub fn of_process() -> &'static Arc<Self> {
        static BUDGET: LazyLock<Arc<StallBudget>> = LazyLock::new(|| StallBudget::new(stall_budget()));
        &BUDGET
    }

    /// The bound, in bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes that are held for blocked receivers now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Cuts until the bound is kept. After a search that found nothing to cut, only an `urgent` one follows without a
    /// pause.
    fn check(&self, now: Instant, urgent: bool) {
        while self.held() > self.limit {
            let Ok(mut scan) = self.scan.try_lock() else { return };
            if !urgent && scan.is_some_and(|next| now < next) {
                return;
            }
            let fullest = lock(&self.links).values().filter_map(Weak::upgrade).max_by_key(|link| link.held());
            let hard = self.held() > self.limit + self.limit / 4;
            if !fullest.is_some_and(|link| link.relieve(hard, now, PROCESS_FULL)) {
                *scan = Some(now + SCAN_PAUSE);
                return;
            }
        }
    }
}

/// The receivers of one link that are blocked now.
#[derive(Debug)]
pub struct StallBound(Arc<Link>);

#[derive(Debug)]
struct Link {
    id: u64,
    limit: usize,
    ids: AtomicU64,
    /// As in `blocked`, for the search for the fullest link.
    held: AtomicUsize,
    blocked: Mutex<BTreeMap<Key, Receiver>>,
    budget: Arc<StallBudget>,
}

/// The last progress that is known, and a number.
type Key = (Instant, u64);

#[derive(Debug)]
struct Receiver {
    abort: Arc<Abort>,
    waker: Waker,
    held: usize,
    /// When its task was asked for its progress, until it answers.
    asked: Option<Instant>,
    answered: Option<Instant>,
}

impl StallBound {
    /// Allows `bytes` to be held, and twice that within the grace; but one `window` always.
    pub fn new(bytes: usize, window: usize) -> Self {
        Self::within(bytes, window, StallBudget::of_process())
    }

    /// The same as a part of `budget`.
    pub fn within(bytes: usize, window: usize, budget: &Arc<StallBudget>) -> Self {
        let link = Arc::new(Link {
            id: budget.ids.fetch_add(1, Ordering::Relaxed),
            limit: bytes.max(window),
            ids: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            blocked: Mutex::default(),
            budget: budget.clone(),
        });
        lock(&budget.links).insert(link.id, Arc::downgrade(&link));
        Self(link)
    }

    /// Counts a receiver as blocked until the ticket is dropped. `waker` wakes the task that updates the ticket.
    pub fn enter(&self, abort: &Arc<Abort>, waker: &Waker, held: usize) -> StallTicket<'_> {
        let link = &*self.0;
        let now = Instant::now();
        let key = (now, link.ids.fetch_add(1, Ordering::Relaxed));
        let receiver =
            Receiver { abort: abort.clone(), waker: waker.clone(), held, asked: None, answered: None };
        let mut blocked = lock(&link.blocked);
        blocked.insert(key, receiver);
        link.add(held);
        drop(blocked);
        link.check(now, false);
        StallTicket { link, key }
    }

    /// Cuts connections whose grace ended since; called before each PING.
    pub fn sweep(&self) {
        self.0.check(Instant::now(), true);
    }

    /// How many receivers are blocked now.
    pub fn blocked(&self) -> usize {
        lock(&self.0.blocked).len()
    }

    /// Bytes that are held for them.
    pub fn held(&self) -> usize {
        self.0.held()
    }
}

impl Drop for StallBound {
    fn drop(&mut self) {
        lock(&self.0.budget.links).remove(&self.0.id);
    }
}

impl Link {
    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.budget.held.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn check(&self, now: Instant, urgent: bool) {
        while self.held() > self.limit && self.relieve(self.held() > 2 * self.limit, now, LINK_FULL) {}
        self.budget.check(now, urgent);
    }

    /// Cuts the receiver without progress for longest, or asks its task about that first and returns false. One within
    /// the grace is cut only at a `hard` bound.
    fn relieve(&self, hard: bool, now: Instant, reason: &'static str) -> bool {
        let mut blocked = lock(&self.blocked);
        let Some(mut oldest) = blocked.first_entry() else { return false };
        if !hard && now.saturating_duration_since(oldest.key().0) < GRACE {
            return false;
        }
        let within =
            |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        let receiver = oldest.get_mut();
        if !within(receiver.answered, FRESH) {
            if within(receiver.asked, ANSWER) {
                return false;
            }
            // Without an answer only a hard bound is reason enough.
            if receiver.asked.is_none() || !hard {
                receiver.asked = Some(now);
                receiver.waker.wake_by_ref();
                return false;
            }
        }
        let receiver = oldest.remove();
        self.subtract(receiver.held);
        receiver.abort.trigger_for(Outcome::Stalled, reason);
        true
    }
}

/// A blocked receiver. Dropped when the receiver reads again or is gone.
#[derive(Debug)]
pub struct StallTicket<'a> {
    link: &'a Link,
    key: Key,
}

impl StallTicket<'_> {
    /// Says how much is held now. `idle` is called if this task was asked: for how long has the socket sent nothing?
    pub fn update(&mut self, waker: &Waker, held: usize, idle: impl FnOnce() -> Option<Duration>) {
        let link = self.link;
        let mut blocked = lock(&link.blocked);
        let Some(receiver) = blocked.get_mut(&self.key) else { return };
        link.add(held);
        link.subtract(std::mem::replace(&mut receiver.held, held));
        receiver.waker.clone_from(waker);
        let asked = receiver.asked.take().is_some();
        let now = Instant::now();
        if asked {
            receiver.answered = Some(now);
            let progress = idle().and_then(|idle| now.checked_sub(idle)).unwrap_or(self.key.0);
            if progress > self.key.0
                && let Some(receiver) = blocked.remove(&self.key)
            {
                self.key.0 = progress;
                blocked.insert(self.key, receiver);
            }
        }
        drop(blocked);
        link.check(now, asked);
    }
}

impl Drop for StallTicket<'_> {
    fn drop(&mut self) {
        if let Some(receiver) = lock(&self.link.blocked).remove(&self.key) {
            self.link.subtract(receiver.held);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const WINDOW: usize = 1 << 20;

    fn outcomes(aborts: &[Arc<Abort>]) -> Vec<bool> {
        aborts.iter().map(|abort| abort.0.get().is_some()).collect()
    }

    fn aborts(number: usize) -> Vec<Arc<Abort>> {
        (0..number).map(|_| Arc::default()).collect()
    }

    fn enter<'a>(bound: &'a StallBound, abort: &Arc<Abort>) -> StallTicket<'a> {
        bound.enter(abort, Waker::noop(), WINDOW)
    }

    fn answer(tickets: &mut [StallTicket<'_>], idle: impl Fn(usize) -> Duration) {
        for (number, ticket) in tickets.iter_mut().enumerate() {
            ticket.update(Waker::noop(), WINDOW, || Some(idle(number)));
        }
    }

    #[test]
    fn young_stalls_are_spared_until_there_are_far_too_many() {
        let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
        let aborts = aborts(5);
        let mut tickets: Vec<_> = aborts.iter().take(4).map(|abort| enter(&bound, abort)).collect();
        answer(&mut tickets, |_| Duration::MAX);
        assert_eq!(outcomes(&aborts), [false; 5]);
        tickets.push(enter(&bound, &aborts[4]));
        assert_eq!(outcomes(&aborts), [false; 5], "the longest blocked is asked first");
        answer(&mut tickets, |_| Duration::MAX);
        assert_eq!(outcomes(&aborts), [true, false, false, false, false]);
        assert_eq!((bound.blocked(), bound.held()), (4, 4 * WINDOW));
        drop(tickets);
        assert_eq!((bound.blocked(), bound.held(), bound.0.budget.held()), (0, 0, 0));
    }

    #[test]
    fn a_receiver_counts_what_is_held_for_it() {
        let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
        let aborts = aborts(500);
        let tickets: Vec<_> = aborts.iter().map(|abort| bound.enter(abort, Waker::noop(), 4096)).collect();
        bound.sweep();
        assert_eq!(bound.held(), 500 * 4096);
        assert!(outcomes(&aborts).iter().all(|cut| !cut));
        drop(tickets);
    }

    #[test]
    fn one_that_made_progress_is_spared_before_those_that_made_none() {
        let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
        let aborts = aborts(5);
        let mut tickets: Vec<_> = aborts.iter().map(|abort| enter(&bound, abort)).collect();
        // The first has been blocked for longest, and its socket sends.
        answer(&mut tickets, |number| if number == 0 { Duration::ZERO } else { Duration::MAX });
        answer(&mut tickets, |number| if number == 0 { Duration::ZERO } else { Duration::MAX });
        assert_eq!(outcomes(&aborts), [false, true, false, false, false]);
    }

    #[test]
    fn at_the_bound_of_the_process_the_link_that_holds_most_pays() {
        let budget = StallBudget::new(8 * WINDOW);
        let greedy = StallBound::within(100 * WINDOW, WINDOW, &budget);
        let modest = StallBound::within(100 * WINDOW, WINDOW, &budget);
        let (few, many) = (aborts(2), aborts(20));
        let mut kept: Vec<_> = few.iter().map(|abort| enter(&modest, abort)).collect();
        let mut tickets = Vec::new();
        for abort in &many {
            tickets.push(enter(&greedy, abort));
            // The next search of all links may have to wait; this one does not.
            greedy.sweep();
            answer(&mut tickets, |_| Duration::MAX);
            assert!(budget.held() <= 11 * WINDOW, "{} windows", budget.held() / WINDOW);
        }
        answer(&mut kept, |_| Duration::MAX);
        assert_eq!(outcomes(&few), [false; 2], "the modest link was there first, and keeps its part");
        let cut = outcomes(&many);
        assert!(cut[0] && !cut[19] && cut.is_sorted_by(|a, b| a >= b), "oldest first: {cut:?}");
        assert_eq!(many[0].0.get(), Some(&(Outcome::Stalled, PROCESS_FULL)));
        drop((tickets, kept));
        assert_eq!(budget.held(), 0);
    }

    /// As if the only receiver had been blocked since `since`; forgets whether its task was asked.
    fn blocked_since(ticket: &mut StallTicket<'_>, since: Instant) {
        let mut blocked = lock(&ticket.link.blocked);
        let mut receiver = blocked.remove(&ticket.key).unwrap();
        (receiver.asked, receiver.answered) = (None, None);
        ticket.key.0 = since;
        blocked.insert(ticket.key, receiver);
    }

    fn is_asked(ticket: &StallTicket<'_>) -> bool {
        lock(&ticket.link.blocked)[&ticket.key].asked.is_some()
    }

    #[test]
    fn a_receiver_is_cut_after_its_grace_or_at_the_hard_bound_but_asked_before() {
        #[derive(Debug, PartialEq)]
        enum Then {
            Spared,
            Asked,
            Cut,
        }
        use Then::{Asked, Cut, Spared};
        let (ms, none) = (Duration::from_millis(1), None);
        // The hard bound, for how long it has been blocked, and how long ago its task was asked and has answered.
        for (hard, since, asked, answered, then) in [
            (false, GRACE - ms, none, none, Spared),
            (false, GRACE, none, none, Asked),
            (false, GRACE, Some(ANSWER - ms), none, Spared),
            (false, GRACE, Some(ANSWER), none, Asked),
            (false, GRACE, none, Some(FRESH - ms), Cut),
            (false, GRACE, none, Some(FRESH), Asked),
            (true, Duration::ZERO, none, none, Asked),
            (true, Duration::ZERO, Some(ANSWER - ms), none, Spared),
            (true, Duration::ZERO, Some(ANSWER), none, Cut),
            (true, Duration::ZERO, none, Some(FRESH - ms), Cut),
            (true, Duration::ZERO, none, Some(FRESH), Asked),
        ] {
            let bound = StallBound::within(2 * WINDOW, WINDOW, &StallBudget::new(100 * WINDOW));
            let abort = Arc::default();
            let mut ticket = enter(&bound, &abort);
            let now = Instant::now() + Duration::from_secs(3600);
            blocked_since(&mut ticket, now - since);
            if let Some(receiver) = lock(&bound.0.blocked).get_mut(&ticket.key) {
                receiver.asked = asked.map(|ago| now - ago);
                receiver.answered = answered.map(|ago| now - ago);
            }
            let cut = bound.0.relieve(hard, now, LINK_FULL);
            assert_eq!(cut, abort.0.get().is_some());
            let found = match lock(&bound.0.blocked).get(&ticket.key) {
                None => Cut,
                Some(receiver) if receiver.asked == Some(now) => Asked,
                Some(_) => Spared,
            };
            assert_eq!(found, then, "hard: {hard}, blocked for {since:?}, {asked:?} {answered:?}");
        }
    }

    #[test]
    fn both_bounds_are_exact() {
        const LIMIT: usize = 8 * WINDOW;
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let (young, old) = (now + hour, now + hour - GRACE);
        for (of_link, of_process, held, since, asked) in [
            (LIMIT, 100 * LIMIT, LIMIT, old, false),
            (LIMIT, 100 * LIMIT, LIMIT + 1, old, true),
            (LIMIT, 100 * LIMIT, 2 * LIMIT, young, false),
            (LIMIT, 100 * LIMIT, 2 * LIMIT + 1, young, true),
            (100 * LIMIT, LIMIT, LIMIT, old, false),
            (100 * LIMIT, LIMIT, LIMIT + 1, old, true),
            (100 * LIMIT, LIMIT, LIMIT + LIMIT / 4, young, false),
            (100 * LIMIT, LIMIT, LIMIT + LIMIT / 4 + 1, young, true),
        ] {
            let budget = StallBudget::new(of_process);
            assert_eq!(budget.limit(), of_process);
            let bound = StallBound::within(of_link, WINDOW, &budget);
            let mut ticket = bound.enter(&Arc::default(), Waker::noop(), held);
            blocked_since(&mut ticket, since);
            bound.0.check(now + hour, true);
            assert_eq!(is_asked(&ticket), asked, "{held} of {of_link} and {of_process}");
        }
    }

    #[test]
    fn after_a_search_in_vain_only_an_urgent_one_follows_at_once() {
        let budget = StallBudget::new(8 * WINDOW);
        let bound = StallBound::within(100 * WINDOW, WINDOW, &budget);
        let mut ticket = bound.enter(&Arc::default(), Waker::noop(), 9 * WINDOW);
        let now = Instant::now() + Duration::from_secs(3600);
        blocked_since(&mut ticket, now);
        budget.check(now, true);
        assert!(!is_asked(&ticket), "it is young");
        blocked_since(&mut ticket, now - GRACE);
        let almost = now + SCAN_PAUSE - Duration::from_millis(1);
        budget.check(almost, false);
        assert!(!is_asked(&ticket));
        budget.check(almost, true);
        assert!(is_asked(&ticket));
        // This search found nothing either.
        blocked_since(&mut ticket, now - GRACE);
        budget.check(almost + SCAN_PAUSE, false);
        assert!(is_asked(&ticket));
        // The search before each PING is an urgent one.
        blocked_since(&mut ticket, Instant::now().checked_sub(GRACE).unwrap());
        bound.sweep();
        assert!(is_asked(&ticket));
        drop(ticket);
        drop(bound);
        assert!(lock(&budget.links).is_empty(), "a link that is gone is not searched");
    }

    #[test]
    fn an_abort_before_the_wait_is_seen() {
        let abort = Abort::default();
        assert_eq!(abort.triggered().now_or_never(), None);
        abort.trigger(Outcome::Shutdown);
        abort.trigger(Outcome::Stalled);
        assert_eq!(abort.triggered().now_or_never(), Some((Outcome::Shutdown, "")));
    }
}

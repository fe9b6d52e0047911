//! Limits on the bytes held for receivers that do not read: one per link, and one for the process.
//!
//! A receiver that stops reading keeps at most one stream window of bytes here. That is legitimate (`kubectl logs -f |
//! less`) and harmless while few do it. So no connection is cut until the sum exceeds a limit; then the one without
//! progress for longest goes first. At the limit of the process it is one of the link that holds most, so that no node
//! can use up the share of others.
//!
//! A socket that is read slowly becomes writable again only when a third of its buffer is free. So before a connection
//! is cut, its own task is asked what the kernel has sent meanwhile.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::SetOnce;
use tunnel_runtime::memory::stall_budget;

use super::traffic::{Wait, Waiting};
use crate::outcome::Outcome;

/// A receiver that made progress within this time is slow, not stalled. On loopback, where segments have 64 KiB, a
/// reader of 10 KB/s opens its window every seven seconds.
const GRACE: Duration = Duration::from_secs(15);
/// Maximum time for a task to report the state of its socket.
const ANSWER: Duration = Duration::from_millis(100);
/// Time for which that answer is valid.
const FRESH: Duration = Duration::from_secs(1);
/// Pause between two searches for the link that holds most, if the last one found nothing to cut.
const SCAN_PAUSE: Duration = Duration::from_millis(20);

const LINK_FULL: &str = "the receiver did not read, and its link held more unread bytes than its limit";
const PROCESS_FULL: &str = "the receiver did not read; unread bytes of all links exceeded the memory limit, \
    and its link held most of them";

/// Ends a tunnelled connection from outside its task.
#[derive(Debug, Default)]
pub struct Abort(SetOnce<(Outcome, &'static str)>);

impl Abort {
    /// Ends the connection with `outcome`; only the first call counts.
    pub fn trigger(&self, outcome: Outcome) {
        self.trigger_for(outcome, "");
    }

    /// Like [`Abort::trigger`], with a reason.
    pub fn trigger_for(&self, outcome: Outcome, reason: &'static str) {
        let _ = self.0.set((outcome, reason));
    }

    /// Waits for [`Abort::trigger`]. Returns the outcome, and the reason if that is not obvious.
    pub async fn triggered(&self) -> (Outcome, &'static str) {
        *self.0.wait().await
    }
}

/// Limit of the process. Links take part while receivers are blocked.
#[derive(Debug)]
pub struct StallBudget {
    limit: usize,
    held: AtomicUsize,
    ids: AtomicU64,
    links: Mutex<BTreeMap<u64, Weak<Link>>>,
    scan: Mutex<Option<Instant>>,
}

impl StallBudget {
    /// Allows `bytes` to be held, a quarter more within the grace period, and another quarter until a task has
    /// answered.
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: bytes,
            held: AtomicUsize::new(0),
            ids: AtomicU64::new(0),
            links: Mutex::default(),
            scan: Mutex::default(),
        })
    }

    /// Returns the budget of this process, derived from the memory that it may use.
    pub fn of_process() -> &'static Arc<Self> {
        static BUDGET: LazyLock<Arc<StallBudget>> = LazyLock::new(|| StallBudget::new(stall_budget()));
        &BUDGET
    }

    /// Returns the limit, in bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the bytes held for blocked receivers now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn need(&self) -> Need {
        let above = self.held().saturating_sub(self.limit);
        if above > self.limit / 2 {
            Need::Extreme
        } else if above > self.limit / 4 {
            Need::Hard
        } else {
            Need::Soft
        }
    }

    /// Cuts connections until the limit is met. After a search that found nothing to cut, only an `urgent` one, or one
    /// at extreme need, follows without a pause.
    fn check(&self, now: Instant, urgent: bool) {
        while self.held() > self.limit {
            let Some(mut scan) = self.scan.try_lock() else { return };
            let need = self.need();
            if !urgent && need != Need::Extreme && scan.is_some_and(|next| now < next) {
                return;
            }
            let fullest = self.links.lock().values().filter_map(Weak::upgrade).max_by_key(|link| link.held());
            if !fullest.is_some_and(|link| link.relieve(need, now, PROCESS_FULL)) {
                *scan = Some(now + SCAN_PAUSE);
                return;
            }
        }
    }
}

/// Urgency of cutting a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// Cut only receivers blocked for longer than the grace period.
    Soft,
    /// Cut receivers within the grace period too.
    Hard,
    /// Cut without asking first: there is no time for it.
    Extreme,
}

/// The blocked receivers of one link.
#[derive(Debug)]
pub struct StallBound(Arc<Link>);

#[derive(Debug)]
struct Link {
    id: u64,
    limit: usize,
    ids: AtomicU64,
    /// Sum over `blocked`, for the search for the fullest link.
    held: AtomicUsize,
    blocked: Mutex<BTreeMap<Key, Receiver>>,
    budget: Arc<StallBudget>,
}

/// Time of the last known progress, and a unique number.
type Key = (Instant, u64);

#[derive(Debug)]
struct Receiver {
    abort: Arc<Abort>,
    waker: Waker,
    held: usize,
    /// Time when its task was asked for progress, until it answers.
    asked: Option<Instant>,
    answered: Option<Instant>,
}

impl StallBound {
    /// Allows `bytes` to be held, twice that within the grace period, and always one `window`.
    pub fn new(bytes: usize, window: usize) -> Self {
        Self::within(bytes, window, StallBudget::of_process())
    }

    /// Like [`StallBound::new`], as a part of `budget`.
    pub fn within(bytes: usize, window: usize, budget: &Arc<StallBudget>) -> Self {
        let link = Arc::new(Link {
            id: budget.ids.fetch_add(1, Ordering::Relaxed),
            limit: bytes.max(window),
            ids: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            blocked: Mutex::default(),
            budget: budget.clone(),
        });
        budget.links.lock().insert(link.id, Arc::downgrade(&link));
        Self(link)
    }

    /// Counts a receiver as blocked until the ticket is dropped. `waiting` shows it as waiting meanwhile; `waker`
    /// wakes the task that updates the ticket.
    pub fn enter<'a>(
        &'a self,
        abort: &Arc<Abort>,
        waiting: &'a Waiting,
        waker: &Waker,
        held: usize,
    ) -> StallTicket<'a> {
        let link = &*self.0;
        let now = Instant::now();
        let key = (now, link.ids.fetch_add(1, Ordering::Relaxed));
        let receiver =
            Receiver { abort: abort.clone(), waker: waker.clone(), held, asked: None, answered: None };
        let mut blocked = link.blocked.lock();
        blocked.insert(key, receiver);
        link.add(held);
        drop(blocked);
        link.check(now, false);
        StallTicket { link, key, wait: waiting.begin(held) }
    }

    /// Cuts connections whose grace period has ended; called before each PING.
    pub fn sweep(&self) {
        self.0.check(Instant::now(), true);
    }

    /// Returns the number of blocked receivers.
    pub fn blocked(&self) -> usize {
        self.0.blocked.lock().len()
    }

    /// Returns the bytes held for them.
    pub fn held(&self) -> usize {
        self.0.held()
    }
}

impl Drop for StallBound {
    fn drop(&mut self) {
        self.0.budget.links.lock().remove(&self.0.id);
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
        while self.held() > self.limit {
            let need = if self.held() > 2 * self.limit { Need::Hard } else { Need::Soft };
            if !self.relieve(need, now, LINK_FULL) {
                break;
            }
        }
        self.budget.check(now, urgent);
    }

    /// Cuts the receiver without progress for longest, or first asks its task about progress and returns false.
    fn relieve(&self, need: Need, now: Instant, reason: &'static str) -> bool {
        let mut blocked = self.blocked.lock();
        let Some(mut oldest) = blocked.first_entry() else { return false };
        if need == Need::Soft && now.saturating_duration_since(oldest.key().0) < GRACE {
            return false;
        }
        let within =
            |at: Option<Instant>, time| at.is_some_and(|at| now.saturating_duration_since(at) < time);
        let receiver = oldest.get_mut();
        if need != Need::Extreme && !within(receiver.answered, FRESH) {
            if within(receiver.asked, ANSWER) {
                return false;
            }
            // Without an answer, only a hard need justifies cutting.
            if receiver.asked.is_none() || need == Need::Soft {
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
    wait: Wait<'a>,
}

impl StallTicket<'_> {
    /// Reports how much is held now. `idle` is called if this task was asked, and returns for how long the socket has
    /// sent nothing.
    pub fn update(&mut self, waker: &Waker, held: usize, idle: impl FnOnce() -> Option<Duration>) {
        let link = self.link;
        self.wait.holds(held);
        let mut blocked = link.blocked.lock();
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
        if let Some(receiver) = self.link.blocked.lock().remove(&self.key) {
            self.link.subtract(receiver.held);
        }
    }
}

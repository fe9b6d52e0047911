//! A bound on the bytes that one link holds for receivers which do not read.
//!
//! A receiver that stops reading keeps at most one stream window of bytes here. That is legitimate
//! (`kubectl logs -f | less`) and harmless while few do it. So no connection is cut until the sum passes the link's
//! bound, and then the one that has made no progress for longest goes first.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::SetOnce;

use crate::outcome::Outcome;

/// A receiver that made progress this recently is slow, not stalled.
const GRACE: Duration = Duration::from_secs(2);

/// Ends a carried connection from outside its task.
#[derive(Debug, Default)]
pub struct Abort(SetOnce<Outcome>);

impl Abort {
    /// Ends the connection with `outcome`; only the first call counts.
    pub fn trigger(&self, outcome: Outcome) {
        let _ = self.0.set(outcome);
    }

    /// Waits for [`Abort::trigger`].
    pub async fn triggered(&self) -> Outcome {
        *self.0.wait().await
    }
}

/// The receivers of one link that are blocked now.
#[derive(Debug)]
pub struct StallBound {
    /// How many may be blocked for longer than [`GRACE`] at a time.
    limit: usize,
    ids: AtomicU64,
    blocked: Mutex<BTreeMap<(Instant, u64), Arc<Abort>>>,
}

impl StallBound {
    /// Allows `bytes` to be held, where each blocked receiver holds up to `window` bytes.
    pub fn new(bytes: usize, window: usize) -> Self {
        Self { limit: (bytes / window.max(1)).max(1), ids: AtomicU64::new(0), blocked: Mutex::default() }
    }

    /// Counts a receiver as blocked until the ticket is dropped.
    pub fn enter(&self, abort: &Arc<Abort>) -> StallTicket<'_> {
        let key = (Instant::now(), self.ids.fetch_add(1, Ordering::Relaxed));
        let mut blocked = self.blocked.lock().unwrap_or_else(PoisonError::into_inner);
        blocked.insert(key, abort.clone());
        if blocked.len() > self.limit {
            evict(&mut blocked, self.limit, key.0);
        }
        StallTicket { bound: self, key }
    }

    /// Cuts connections whose grace ended since the last [`StallBound::enter`]; called before each PING.
    pub fn sweep(&self) {
        let mut blocked = self.blocked.lock().unwrap_or_else(PoisonError::into_inner);
        if blocked.len() > self.limit {
            evict(&mut blocked, self.limit, Instant::now());
        }
    }

    /// How many receivers are blocked now.
    pub fn blocked(&self) -> usize {
        self.blocked.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Cuts the longest blocked until `limit` are left; those within the grace only above twice the limit.
fn evict(blocked: &mut BTreeMap<(Instant, u64), Arc<Abort>>, limit: usize, now: Instant) {
    while blocked.len() > limit {
        let Some(oldest) = blocked.first_entry() else { return };
        let in_grace = now.saturating_duration_since(oldest.key().0) < GRACE;
        if in_grace && oldest.get().0.get().is_none() && blocked.len() <= limit.saturating_mul(2) {
            return;
        }
        if let Some((_, abort)) = blocked.pop_first() {
            abort.trigger(Outcome::Stalled);
        }
    }
}

/// A blocked receiver. Dropped when the receiver reads again or is gone.
#[derive(Debug)]
pub struct StallTicket<'a> {
    bound: &'a StallBound,
    key: (Instant, u64),
}

impl Drop for StallTicket<'_> {
    fn drop(&mut self) {
        self.bound.blocked.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn young_stalls_are_spared_until_there_are_far_too_many() {
        let bound = StallBound::new(2 << 20, 1 << 20);
        let aborts: Vec<_> = (0..5).map(|_| Arc::new(Abort::default())).collect();
        let tickets: Vec<_> = aborts.iter().take(4).map(|abort| bound.enter(abort)).collect();
        assert!(aborts.iter().all(|abort| abort.0.get().is_none()));
        let fifth = bound.enter(&aborts[4]);
        assert_eq!(aborts[0].0.get(), Some(&Outcome::Stalled), "the longest blocked goes first");
        assert!(aborts[1].0.get().is_none());
        drop((tickets, fifth));
        assert_eq!(bound.blocked(), 0);
    }

    #[test]
    fn old_stalls_beyond_the_limit_are_cut_oldest_first() {
        let mut blocked = BTreeMap::new();
        let start = Instant::now();
        let aborts: Vec<_> = (0..4).map(|_| Arc::new(Abort::default())).collect();
        for (i, abort) in (0u64..).zip(&aborts) {
            blocked.insert((start + Duration::from_millis(i), i), abort.clone());
        }
        evict(&mut blocked, 3, start + GRACE + Duration::from_secs(1));
        assert_eq!(blocked.len(), 3);
        assert_eq!(aborts[0].0.get(), Some(&Outcome::Stalled));
        assert!(aborts[1..].iter().all(|abort| abort.0.get().is_none()));
    }

    #[tokio::test]
    async fn an_abort_before_the_wait_is_seen() {
        let abort = Abort::default();
        abort.trigger(Outcome::Shutdown);
        abort.trigger(Outcome::Stalled);
        assert_eq!(abort.triggered().await, Outcome::Shutdown);
    }
}

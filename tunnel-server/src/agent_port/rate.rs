//! Limits how many handshakes a source may begin in a time, while no agent has attached from there: each costs a signature.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Handshakes at once: all agents behind one NAT come back when this server starts.
const BURST: u32 = 1024;
/// Time until one more is allowed.
const REFILL: Duration = Duration::from_millis(20);
/// Bounds the memory. Above that the sources with the fewest recent handshakes are forgotten.
const MAX_SOURCES: usize = 1 << 14;

/// A token bucket for each source, kept as the time at which it is full again.
#[derive(Debug, Default)]
pub(super) struct HandshakeRate {
    full_at: HashMap<IpAddr, Instant>,
}

impl HandshakeRate {
    /// Returns true if the source may begin another handshake, and counts it.
    pub(super) fn take(&mut self, source: IpAddr, now: Instant) -> bool {
        if self.full_at.len() >= MAX_SOURCES && !self.full_at.contains_key(&source) {
            self.forget(now);
        }
        let full_at = self.full_at.entry(source).or_insert(now);
        let next = (*full_at).max(now) + REFILL;
        let allowed = next.saturating_duration_since(now) <= REFILL * BURST;
        if allowed {
            *full_at = next;
        }
        allowed
    }

    /// Forgets sources whose buckets are full, and if these are few, the fuller half of all.
    fn forget(&mut self, now: Instant) {
        self.full_at.retain(|_, full_at| *full_at > now);
        if self.full_at.len() > MAX_SOURCES / 2 {
            let mut times: Vec<_> = self.full_at.values().copied().collect();
            let (_, median, _) = times.select_nth_unstable(MAX_SOURCES / 2);
            let median = *median;
            self.full_at.retain(|_, full_at| *full_at > median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_gets_a_burst_and_then_one_after_the_other() {
        let (mut rate, start) = (HandshakeRate::default(), Instant::now());
        let (source, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let mut taken = |source, now, times: u32| (0..times).filter(|_| rate.take(source, now)).count();
        assert_eq!(taken(source, start, 5000), BURST as usize);
        assert_eq!(taken(source, start + REFILL * 3, 100), 3);
        assert_eq!(taken(other, start, 1), 1);
        assert_eq!(taken(source, start + REFILL * BURST * 3, 5000), BURST as usize);
    }

    #[test]
    fn memory_is_bounded_and_the_busiest_source_is_not_forgotten() {
        let (mut rate, now) = (HandshakeRate::default(), Instant::now());
        let busy = [192, 0, 2, 1].into();
        while rate.take(busy, now) {}
        for number in 0..100_000u32 {
            assert!(rate.take(number.to_be_bytes().into(), now));
        }
        assert!(rate.full_at.len() <= MAX_SOURCES && !rate.take(busy, now));
    }
}

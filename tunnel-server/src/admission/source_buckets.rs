//! Limits what a source may do in a time: handshakes of unauthenticated clients, failed enrolments.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::source_key;

/// A token bucket for each source, kept as the time at which it is full again. A source without an entry has a full one.
#[derive(Debug)]
pub(crate) struct SourceBuckets {
    /// Size of a full bucket.
    burst: u32,
    /// Time until there is one more.
    refill: Duration,
    /// Bounds the memory that unauthenticated clients can occupy. Above that the sources with the fullest buckets are forgotten.
    most: usize,
    full_at: HashMap<IpAddr, Instant>,
}

impl SourceBuckets {
    pub(crate) fn new(burst: u32, refill: Duration, most: usize) -> Self {
        Self { burst, refill, most, full_at: HashMap::new() }
    }

    /// For failures, so that who guesses learns nothing and cannot fill the log. Agents behind one NAT share an address:
    /// what succeeds is not counted.
    pub(crate) fn of_failures() -> Self {
        Self::new(10, Duration::from_secs(6), 4096)
    }

    /// For warnings that anybody can cause.
    pub(crate) fn of_warnings() -> Self {
        Self::new(100, Duration::from_secs(1), 4096)
    }

    /// Takes one, if the bucket of this address is not empty.
    pub(crate) fn take(&mut self, address: IpAddr, now: Instant) -> bool {
        let source = source_key(address);
        if self.full_at.len() >= self.most && !self.full_at.contains_key(&source) {
            self.forget(now);
        }
        let full_at = self.full_at.entry(source).or_insert(now);
        let next = (*full_at).max(now) + self.refill;
        let allowed = next.saturating_duration_since(now) <= self.refill * self.burst;
        if allowed {
            *full_at = next;
        }
        allowed
    }

    /// Forgets sources whose buckets are full, and if these are few, the fuller half of all.
    fn forget(&mut self, now: Instant) {
        self.full_at.retain(|_, full_at| *full_at > now);
        if self.full_at.len() > self.most / 2 {
            let mut times: Vec<_> = self.full_at.values().copied().collect();
            let (_, median, _) = times.select_nth_unstable(self.most / 2);
            let median = *median;
            self.full_at.retain(|_, full_at| *full_at > median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_source_gets_a_burst_and_then_one_after_the_other() {
        let refill = Duration::from_millis(20);
        let (mut buckets, start) = (SourceBuckets::new(1024, refill, 1 << 14), Instant::now());
        let mut taken = |source, now, times: u32| (0..times).filter(|_| buckets.take(source, now)).count();
        let (source, other) = (address("192.0.2.1"), address("192.0.2.2"));
        assert_eq!(taken(source, start, 5000), 1024);
        assert_eq!(taken(source, start + refill * 3, 100), 3);
        assert_eq!(taken(other, start, 1), 1);
        assert_eq!(taken(source, start + refill * 1024 * 3, 5000), 1024);
    }

    #[test]
    fn failures_are_allowed_in_a_burst_and_then_one_by_one() {
        let (mut failures, start) = (SourceBuckets::of_failures(), Instant::now());
        let (bad, refill) = (address("10.0.0.1"), failures.refill);
        assert_eq!((0..100).filter(|_| failures.take(bad, start)).count(), 10);
        assert!(!failures.take(address("::ffff:10.0.0.1"), start));
        assert!(failures.take(address("10.0.0.2"), start));
        assert!(failures.take(bad, start + refill));
        assert!(!failures.take(bad, start + refill));
    }

    #[test]
    fn a_client_that_is_refused_again_and_again_fills_no_log() {
        let mut registry = prometheus_client::registry::Registry::default();
        let metrics = crate::metrics::Metrics::new(&mut registry);
        let warned = |source| (0..10_000).filter(|_| metrics.warns_of(address(source))).count();
        assert!(warned("192.0.2.1") <= 130, "a hundred, and one a second");
        assert!(metrics.warns_of(address("192.0.2.2")));
    }

    #[test]
    fn an_ipv6_network_is_one_source_and_memory_is_bounded() {
        let (mut failures, now) = (SourceBuckets::of_failures(), Instant::now());
        let mut host = 0;
        while failures.take(address(&format!("2001:db8::{host:x}")), now) {
            host += 1;
        }
        assert!(failures.take(address("2001:db8:0:1::"), now));
        for number in 0..100_000u32 {
            assert!(failures.take(number.to_be_bytes().into(), now));
            assert!(failures.full_at.len() <= failures.most);
        }
        assert!(!failures.take(address("2001:db8::1"), now), "the busiest source is not forgotten");
    }

    proptest! {
        /// However many sources there are, no more are remembered than may be; and of few sources none gets more than its
        /// burst and what has come since, and each gets that.
        #[test]
        fn no_source_gets_more_than_its_bucket_holds(
            burst in 1u32..6,
            steps in prop::collection::vec((0u8..6, 0u8..20, 0u64..3_000), 1..200),
        ) {
            let refill = Duration::from_secs(1);
            let (mut few, mut many) = (SourceBuckets::new(burst, refill, 64), SourceBuckets::new(burst, refill, 8));
            // Content of each source's bucket, in milliseconds of refilling.
            let full = u64::from(burst) * 1000;
            let (mut now, mut held) = (Instant::now(), [full; 20]);
            for (action, source, millis) in steps {
                let address = IpAddr::from([192, 0, 2, source]);
                let held_by = &mut held[usize::from(source)];
                match action {
                    0 => {
                        now += Duration::from_millis(millis);
                        held = held.map(|held| full.min(held + millis));
                    }
                    _ => {
                        many.take(address, now);
                        prop_assert!(many.full_at.len() <= 8);
                        prop_assert_eq!(few.take(address, now), *held_by >= 1000, "{} holds {}", source, held_by);
                        *held_by -= if *held_by >= 1000 { 1000 } else { 0 };
                    }
                }
            }
        }
    }
}

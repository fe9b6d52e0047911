use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::admission::source_key;

/// Failures that an address may make at once.
const BURST: u32 = 10;
/// How long it takes until one more is allowed.
const REFILL: Duration = Duration::from_secs(6);
/// Bounds the memory that strangers can make us use.
const MAX_ADDRESSES: usize = 4096;

/// Counts failed enrolments by source address, so that one who guesses tokens learns nothing and cannot fill the log.
///
/// Only failures count, and only failures are held back: agents behind one NAT share an address with each other and
/// with strangers, so a good token or certificate is served whatever else comes from there.
#[derive(Debug, Default)]
pub(super) struct FailureLimit {
    /// When the address will have no failure to its name any more; an address that is not here has none.
    clear_at: HashMap<IpAddr, Instant>,
}

impl FailureLimit {
    /// Whether the address may fail once more and be told why.
    pub(super) fn allows(&self, address: IpAddr, now: Instant) -> bool {
        let debt = self
            .clear_at
            .get(&source_key(address))
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        debt <= REFILL * (BURST - 1)
    }

    /// Notes a failure of the address.
    pub(super) fn failed(&mut self, address: IpAddr, now: Instant) {
        let address = source_key(address);
        if self.clear_at.len() >= MAX_ADDRESSES && !self.clear_at.contains_key(&address) {
            self.clear_at.retain(|_, at| *at > now);
            // Still full: the one with the least to its name goes.
            if self.clear_at.len() >= MAX_ADDRESSES
                && let Some(least) =
                    self.clear_at.iter().min_by_key(|(_, at)| **at).map(|(address, _)| *address)
            {
                self.clear_at.remove(&least);
            }
        }
        let at = self.clear_at.entry(address).or_insert(now);
        *at = (*at).max(now) + REFILL;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_one_by_one() {
        let (mut limit, start) = (FailureLimit::default(), Instant::now());
        let (bad, good): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        for _ in 0..BURST {
            assert!(limit.allows(bad, start));
            limit.failed(bad, start);
        }
        assert!(!limit.allows(bad, start));
        assert!(!limit.allows("::ffff:10.0.0.1".parse().unwrap(), start));
        assert!(limit.allows(good, start));
        assert!(limit.allows(bad, start + REFILL));
        limit.failed(bad, start + REFILL);
        assert!(!limit.allows(bad, start + REFILL));
        assert!(limit.allows(bad, start + REFILL * BURST));
    }

    #[test]
    fn a_v6_network_counts_as_one_and_memory_is_bounded() {
        let (mut limit, start) = (FailureLimit::default(), Instant::now());
        for host in 0..BURST {
            limit.failed(format!("2001:db8::{host:x}").parse().unwrap(), start);
        }
        assert!(!limit.allows("2001:db8::ffff".parse().unwrap(), start));
        assert!(limit.allows("2001:db8:0:1::".parse().unwrap(), start));
        for host in 0..20_000u32 {
            limit.failed(IpAddr::from(host.to_be_bytes()), start);
        }
        assert_eq!(limit.clear_at.len(), MAX_ADDRESSES);
        assert!(!limit.allows("2001:db8::1".parse().unwrap(), start), "the worst one is not forgotten");
    }
}

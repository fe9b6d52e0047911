//! Limits failed enrolments, and failed guesses of tokens, per source address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::source_key;

/// Failures allowed in a row.
const BURST: u32 = 10;
/// Time until one more is allowed.
const REFILL: Duration = Duration::from_secs(6);
/// Bounds the memory that unauthenticated clients can occupy.
const MAX_ADDRESSES: usize = 4096;

/// Counts failures by source address, so that an attacker who guesses tokens learns nothing and cannot fill the log.
///
/// Only failures are counted: agents and callers behind one NAT share their address with unauthenticated clients.
#[derive(Debug, Default)]
pub(crate) struct FailureLimit {
    /// Time at which all failures of the address expire; an address without an entry has none.
    clear_at: HashMap<IpAddr, Instant>,
}

impl FailureLimit {
    /// True if the address may fail once more and get the reason.
    pub(crate) fn allows(&self, address: IpAddr, now: Instant) -> bool {
        let debt = self
            .clear_at
            .get(&source_key(address))
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        debt <= REFILL * (BURST - 1)
    }

    pub(crate) fn failed(&mut self, address: IpAddr, now: Instant) {
        let address = source_key(address);
        if self.clear_at.len() >= MAX_ADDRESSES && !self.clear_at.contains_key(&address) {
            self.clear_at.retain(|_, at| *at > now);
            // Still full: drop the address with the fewest failures.
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

    /// Takes back a failure that was none.
    pub(crate) fn forgive(&mut self, address: IpAddr) {
        if let Some(at) = self.clear_at.get_mut(&source_key(address)) {
            *at = at.checked_sub(REFILL).unwrap_or(*at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_allowed_in_a_burst_and_then_one_by_one() {
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
        limit.forgive(bad);
        assert!(limit.allows(bad, start + REFILL));
    }

    #[test]
    fn an_ipv6_network_counts_as_one_address_and_memory_is_bounded() {
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
        assert!(
            !limit.allows("2001:db8::1".parse().unwrap(), start),
            "the address with the most failures is kept"
        );
    }
}

//! Limits on connections of unauthenticated clients, so that they cannot starve the others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts connections, in total and per source.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    total: u32,
    per_source: u32,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    sources: HashMap<IpAddr, u32>,
}

impl Admission {
    /// Admits `total` connections at a time, and `per_source` from one source.
    pub(crate) fn new(total: u32, per_source: u32) -> Self {
        Self { total, per_source, counts: Arc::default() }
    }

    /// Admits a connection from `source`; None if there are too many.
    pub(crate) fn admit(&self, source: IpAddr) -> Option<Admitted> {
        let source = source_key(source);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let from_source = counts.sources.get(&source).copied().unwrap_or(0);
        if counts.total >= self.total || from_source >= self.per_source {
            return None;
        }
        counts.total += 1;
        counts.sources.insert(source, from_source + 1);
        Some(Admitted { counts: self.counts.clone(), source })
    }
}

/// What counts as one source: an IPv4 address, or a /64, from which an IPv6 host chooses its addresses freely.
pub(crate) fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & (u128::MAX << 64))),
        v4 => v4,
    }
}

/// An admitted connection; dropping it ends the connection's count.
#[derive(Debug)]
pub(crate) struct Admitted {
    counts: Arc<Mutex<Counts>>,
    source: IpAddr,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.total -= 1;
        if let Some(count) = counts.sources.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                counts.sources.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_cannot_take_every_place() {
        let admission = Admission::new(100, 10);
        let (greedy, modest) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let held: Vec<_> = std::iter::from_fn(|| admission.admit(greedy)).collect();
        assert_eq!(held.len(), 10);
        assert!(admission.admit(modest).is_some());
        drop(held);
        assert!(admission.admit(greedy).is_some());
        assert_eq!(admission.counts.lock().unwrap().total, 0);
        assert!(admission.counts.lock().unwrap().sources.is_empty());
    }
}

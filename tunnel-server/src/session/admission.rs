//! How many connections may be in a handshake: strangers reach the agent port, and must not starve the agents.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Handshakes at once, from everywhere.
const TOTAL: u32 = 4096;
/// Handshakes at once from one address; a site's agents share one behind their NAT.
const PER_SOURCE: u32 = 256;

/// Counts the handshakes under way.
#[derive(Clone, Debug, Default)]
pub(super) struct Admission(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    sources: HashMap<IpAddr, u32>,
}

impl Admission {
    /// A place for a handshake from `source`; `None` when there are too many.
    pub(super) fn admit(&self, source: IpAddr) -> Option<Admitted> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from_source = counts.sources.get(&source).copied().unwrap_or(0);
        if counts.total >= TOTAL || from_source >= PER_SOURCE {
            return None;
        }
        counts.total += 1;
        counts.sources.insert(source, from_source + 1);
        Some(Admitted { counts: self.0.clone(), source })
    }
}

/// A handshake under way; dropping it makes room.
#[derive(Debug)]
pub(super) struct Admitted {
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
        let admission = Admission::default();
        let (greedy, modest) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let held: Vec<_> = std::iter::from_fn(|| admission.admit(greedy)).collect();
        assert_eq!(held.len(), PER_SOURCE as usize);
        assert!(admission.admit(modest).is_some());
        drop(held);
        assert!(admission.admit(greedy).is_some());
        assert_eq!(admission.0.lock().unwrap().total, 0);
        assert!(admission.0.lock().unwrap().sources.is_empty());
    }
}

//! Faults that may still be felt: what fails without one is a failure of Postern.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::plan::Fault;

/// A fault, and when the fleet was seen to work again afterwards.
type Entry = (Fault, Option<Instant>);

#[derive(Clone, Debug, Default)]
pub(super) struct Felt(Arc<Mutex<Vec<Entry>>>);

impl Felt {
    pub(super) fn begins(&self, fault: Fault) {
        self.lock().push((fault, None));
    }

    /// Notes that every edge is reached by every way.
    pub(super) fn recovered(&self) {
        let now = Instant::now();
        self.lock().iter_mut().for_each(|(_, until)| *until = until.or(Some(now)));
    }

    /// Reports whether a fault explains the failure of a connection to this edge through this server that was begun at
    /// `from` and has just failed.
    pub(super) fn explains(&self, edge: usize, server: usize, from: Instant) -> bool {
        let felt = |until: &Option<Instant>| until.is_none_or(|until| until >= from);
        self.lock().iter().any(|(fault, until)| felt(until) && fault.touches(edge, server))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_explains_what_it_touches_until_all_works_again() {
        let (felt, start) = (Felt::default(), Instant::now());
        assert!(!felt.explains(1, 0, start), "nothing has happened");
        felt.begins(Fault::AgentKilled(1));
        assert!(felt.explains(1, 2, start) && !felt.explains(2, 2, start));
        felt.recovered();
        assert!(felt.explains(1, 2, start), "it began during the fault");
        assert!(!felt.explains(1, 2, Instant::now()));
        felt.begins(Fault::ServerKilled(2));
        assert!(felt.explains(0, 2, start) && felt.explains(1, 0, start));
        assert!(!felt.explains(0, 1, start), "edge 0 has a session with every server");
    }
}

//! The time for which servers and a redirector have refused each other's certificates.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The first and the last refusal since a server was last linked. Other failures in between do not count: a server that
/// is unreachable refuses nothing.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<Option<(Instant, Instant)>>);

impl Refusals {
    pub(super) fn add(&self, at: Instant) {
        self.0.lock().get_or_insert((at, at)).1 = at;
    }

    pub(super) fn clear(&self) {
        *self.0.lock() = None;
    }

    /// Time from the first refusal to the last.
    pub fn lasts(&self) -> Option<Duration> {
        self.0.lock().map(|(first, last)| last - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_count_and_a_link_forgets_them() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.lasts(), None);
        refusals.add(now);
        refusals.add(now + Duration::from_secs(61));
        assert_eq!(refusals.lasts(), Some(Duration::from_secs(61)));
        refusals.clear();
        assert_eq!(refusals.lasts(), None);
    }
}

//! Requests on a link that were left unanswered.

use std::sync::atomic::{AtomicU64, Ordering};

/// No link receives this many bytes.
const NONE: u64 = u64::MAX;

/// The last request that was left unanswered. Anything that the link receives later, even the answer to a PING, shows
/// that the other end works.
#[derive(Debug)]
pub(super) struct Unanswered(AtomicU64);

impl Default for Unanswered {
    fn default() -> Self {
        Self(AtomicU64::new(NONE))
    }
}

impl Unanswered {
    /// `received` is the number of bytes that the link has received so far.
    pub(super) fn add(&self, received: u64) {
        self.0.store(received, Ordering::Relaxed);
    }

    pub(super) fn lasts(&self, received: u64) -> bool {
        self.0.load(Ordering::Relaxed) == received
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ask_is_unanswered_until_something_arrives() {
        let unanswered = Unanswered::default();
        assert!(!unanswered.lasts(0), "nothing was asked");
        unanswered.add(700);
        assert!(unanswered.lasts(700));
        assert!(!unanswered.lasts(701));
        unanswered.add(701);
        assert!(unanswered.lasts(701));
    }
}

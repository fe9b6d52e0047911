//! The sessions with one server that have not ended.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Their epochs.
pub(super) type Epochs = Arc<Mutex<BTreeSet<u64>>>;

/// The epoch of a session until it has ended.
pub(super) struct Unended {
    all: Epochs,
    epoch: u64,
}

impl Unended {
    pub(super) fn new(all: &Epochs, epoch: u64) -> Self {
        all.lock().insert(epoch);
        Self { all: all.clone(), epoch }
    }

    /// The epochs of the other sessions.
    pub(super) fn earlier(&self) -> Vec<u64> {
        self.all.lock().iter().copied().filter(|epoch| *epoch != self.epoch).collect()
    }
}

impl Drop for Unended {
    fn drop(&mut self) {
        self.all.lock().remove(&self.epoch);
    }
}

//! What a connection was admitted by, to judge it again while it is open.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Result of judging an open connection again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Holds,
    Withdrawn(String),
    /// The API server says no. It also says so while a webhook that it asks fails, so this counts the second time.
    Refused(String),
    /// The question cannot be answered now.
    Unknown(String),
    /// The same, since the API server does not answer.
    Unanswered(String),
}

/// A right that was asked for when a connection was opened.
#[tonic::async_trait]
pub(crate) trait Permit: Send + Sync {
    /// The caller for whom the API server may have to be asked; `None` if it is not asked.
    fn asker(&self) -> Option<[u8; 32]> {
        None
    }

    /// Asks the code that admitted the connection again.
    async fn judge(&self) -> Judgement;
}

/// A permit, and what is known of it.
pub(crate) struct Admitted {
    pub(crate) permit: Arc<dyn Permit>,
    /// When it was last known to hold.
    known: Mutex<Instant>,
    refused: AtomicBool,
    withdrawn: OnceLock<String>,
}

impl Admitted {
    pub(crate) fn new(permit: Arc<dyn Permit>) -> Self {
        Self {
            permit,
            known: Mutex::new(Instant::now()),
            refused: AtomicBool::new(false),
            withdrawn: OnceLock::new(),
        }
    }

    /// Returns the time for which the right could not be judged.
    pub(crate) fn unknown_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.known.lock())
    }

    pub(crate) fn holds(&self, now: Instant) {
        *self.known.lock() = now;
        self.refused.store(false, Ordering::Relaxed);
    }

    /// Returns true if it has been refused once more since it was known to hold.
    pub(crate) fn refused_again(&self) -> bool {
        self.refused.swap(true, Ordering::Relaxed)
    }

    /// Notes why the connection is ended; only the first reason counts.
    pub(super) fn withdraw(&self, reason: String) {
        let _ = self.withdrawn.set(reason);
    }

    pub(crate) fn withdrawn(&self) -> Option<&str> {
        self.withdrawn.get().map(String::as_str)
    }
}

impl fmt::Debug for Admitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admitted").field("withdrawn", &self.withdrawn).finish_non_exhaustive()
    }
}

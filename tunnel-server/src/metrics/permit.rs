//! The permit of a connection, to judge it again while it is open.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Result of judging an open connection again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Holds,
    Withdrawn(String),
    /// The same, but perhaps for a moment only: the API server also says no while a webhook that it asks fails, and an
    /// inventory may be replaced in two steps. So this counts when it is said again.
    Refused(String),
    /// The question cannot be answered now.
    Unanswered(String),
}

/// Time after which a refusal that is repeated counts: longer than the API server's no is remembered.
const AGAIN: Duration = Duration::from_secs(6);
/// Time for which a connection goes on although its right cannot be judged: longer than an upgrade of the API server.
pub(crate) const UNANSWERED: Duration = Duration::from_secs(15 * 60);

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
pub(crate) struct HeldPermit {
    pub(crate) permit: Arc<dyn Permit>,
    known: Mutex<Known>,
    withdrawn: OnceLock<String>,
}

struct Known {
    /// When it was last known to hold.
    held: Instant,
    /// When it was first refused since.
    refused: Option<Instant>,
}

impl HeldPermit {
    pub(crate) fn new(permit: Arc<dyn Permit>) -> Self {
        let known = Mutex::new(Known { held: Instant::now(), refused: None });
        Self { permit, known, withdrawn: OnceLock::new() }
    }

    /// Returns why the connection has to end, if it has to.
    pub(crate) fn weigh(&self, judgement: Judgement, now: Instant) -> Option<String> {
        let mut known = self.known.lock();
        match judgement {
            Judgement::Holds => {
                *known = Known { held: now, refused: None };
                None
            }
            Judgement::Withdrawn(reason) => Some(reason),
            Judgement::Refused(reason) => {
                let first = *known.refused.get_or_insert(now);
                (now.saturating_duration_since(first) >= AGAIN).then_some(reason)
            }
            Judgement::Unanswered(reason) => {
                let minutes = UNANSWERED.as_secs() / 60;
                (now.saturating_duration_since(known.held) >= UNANSWERED)
                    .then(|| format!("its right could not be judged for {minutes} min: {reason}"))
            }
        }
    }

    /// Notes why the connection is ended; only the first reason counts.
    pub(super) fn withdraw(&self, reason: String) {
        let _ = self.withdrawn.set(reason);
    }

    pub(crate) fn withdrawn(&self) -> Option<&str> {
        self.withdrawn.get().map(String::as_str)
    }
}

impl fmt::Debug for HeldPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldPermit").field("withdrawn", &self.withdrawn).finish_non_exhaustive()
    }
}

//! Whether a redirector may have its link, at every moment.

use std::time::{Duration, SystemTime};

use tunnel_core::identity::NodeName;

use crate::pki::{Refusal, Standing};

/// How long what may be over in a moment is waited for.
const PASSING: Duration = Duration::from_secs(5);

/// The certificate that a redirector shows.
pub(super) struct Redirector {
    pub(super) node: NodeName,
    pub(super) issued: SystemTime,
    pub(super) standing: Standing,
}

impl Redirector {
    /// # Errors
    /// Why it is refused.
    pub(super) fn judge(&self) -> Result<(), Refusal> {
        self.standing.judge(&self.node, self.issued)
    }

    /// Waits until it is refused.
    pub(super) async fn refused(&self) -> Refusal {
        let mut changes = self.standing.clone();
        loop {
            let Err(first) = self.judge() else {
                changes.changed().await;
                continue;
            };
            if !first.may_pass() {
                return first;
            }
            tokio::time::sleep(PASSING).await;
            if let Err(still) = self.judge() {
                return still;
            }
        }
    }
}

//! Checks continuously that a redirector, or an agent at its outbound link, may keep it.

use std::time::{Duration, SystemTime};

use tunnel_pki::Holder;
use tunnel_runtime::NodeName;

use crate::pki::{Refusal, Standing};

/// Wait after a refusal that may pass in a moment.
const PASSING: Duration = Duration::from_secs(5);

/// A certificate, and the state by which it is judged.
pub(super) struct Judged {
    pub(super) holder: Holder,
    pub(super) node: NodeName,
    pub(super) issued: SystemTime,
    pub(super) standing: Standing,
}

impl Judged {
    /// # Errors
    /// The reason of the refusal.
    pub(super) fn judge(&self) -> Result<(), Refusal> {
        self.standing.judge((self.holder, &self.node), self.issued)
    }

    /// Waits until the certificate is refused.
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

//! Enrols again through the API server when a renewal can no longer help.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tunnel_runtime::backoff::jittered;

use crate::enrol::csr::CsrEnrolment;
use crate::enrol::renew::IdentityKeeper;

/// Maximum interval of checks that the enrolment is still needed.
const RECHECK: Duration = Duration::from_secs(1);
/// Maximum random delay when a server asks for another enrolment: it asks this agent alone.
const ASKED_SPREAD: Duration = Duration::from_secs(2);

/// Refusals between the servers and this agent. The greater value is the stronger reason to enrol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// Time from the first refusal to the last.
    For(Duration),
    /// A server that this agent has verified asks for another enrolment.
    EnrollAgain,
}

/// Enrols again once the certificate has expired, the servers and this agent have refused each other's certificate for
/// long enough, or a server asks for it. Runs until stopped.
pub async fn recover(
    enrolment: Arc<CsrEnrolment>,
    keeper: Arc<IdentityKeeper>,
    refused: impl Fn() -> Option<Refused>,
) {
    let pace = enrolment.pace;
    // Returns the reason and the maximum random wait.
    let needed = || {
        if keeper.current().validity().is_over(SystemTime::now()) {
            return Some(("the certificate has expired", pace.spread));
        }
        match refused() {
            Some(Refused::EnrollAgain) => Some((
                "requested by a server: the Node was created again or readmitted",
                pace.spread.min(ASKED_SPREAD),
            )),
            Some(Refused::For(time)) if time >= pace.patience => Some((
                "no server accepts the certificate or is verified by the trusted roots: the CA may have been replaced",
                pace.spread,
            )),
            _ => None,
        }
    };
    loop {
        tokio::time::sleep((pace.patience / 10).min(Duration::from_secs(5))).await;
        let Some((_, spread)) = needed() else { continue };
        tokio::time::sleep(jittered(spread, 1.0)).await;
        // Renewals use the same pending key.
        let pending_key = keeper.hold_pending_key().await;
        let Some((reason, spread)) = needed() else { continue };
        tracing::warn!(node = %enrolment.node, reason, "enrolling again");
        let not_needed = async {
            while needed().is_some() {
                tokio::time::sleep((pace.patience / 10).min(RECHECK)).await;
            }
        };
        let obtained = tokio::select! {
            obtained = enrolment.obtain_again(spread) => obtained,
            () = not_needed => {
                tracing::info!(node = %enrolment.node, reason, "enrolment no longer needed");
                continue;
            }
        };
        // Not part of the select, because files and memory must change together.
        match obtained {
            Ok(identity) => keeper.replace(identity).await,
            Err(error) => tracing::error!(%error, "failed to enrol again"),
        }
        drop(pending_key);
        tokio::time::sleep(pace.again).await;
    }
}

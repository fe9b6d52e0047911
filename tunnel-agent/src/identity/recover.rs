//! Enrolling again through the API server when renewing at a server can no longer help.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tunnel_core::backoff::jittered;

use super::csr::CsrEnrolment;
use super::renew::IdentityKeeper;

/// How often to re-check that enrolment is needed.
const RECHECK: Duration = Duration::from_secs(1);

/// Enrols again once the certificate has expired, or the servers and this agent have refused each other's certificate
/// for long enough. `refused_for`: how long they have. Runs until stopped.
pub async fn recover(
    enrolment: Arc<CsrEnrolment>,
    keeper: Arc<IdentityKeeper>,
    refused_for: impl Fn() -> Option<Duration>,
) {
    let pace = enrolment.pace;
    let needed = || {
        if keeper.current().validity().is_over(SystemTime::now()) {
            return Some("the certificate has expired");
        }
        refused_for().is_some_and(|time| time >= pace.patience).then_some(
            "no server takes the certificate or is verified by the roots: the CA may have been replaced",
        )
    };
    loop {
        tokio::time::sleep((pace.patience / 10).min(Duration::from_secs(5))).await;
        if needed().is_none() {
            continue;
        }
        tokio::time::sleep(jittered(pace.spread, 1.0)).await;
        // Renewals use the same pending key.
        let pending_key = keeper.hold_pending_key().await;
        let Some(reason) = needed() else { continue };
        tracing::warn!(node = %enrolment.node, reason, "enrolling again");
        let not_needed = async {
            while needed().is_some() {
                tokio::time::sleep((pace.patience / 10).min(RECHECK)).await;
            }
        };
        let obtained = tokio::select! {
            obtained = enrolment.obtain(pace.spread) => obtained,
            () = not_needed => {
                tracing::info!(node = %enrolment.node, reason, "no need to enrol again any more");
                continue;
            }
        };
        // Not part of the select: files and memory must change together.
        match obtained {
            Ok(identity) => keeper.replace(identity).await,
            Err(error) => tracing::error!(%error, "cannot enrol again"),
        }
        drop(pending_key);
        tokio::time::sleep(pace.again).await;
    }
}

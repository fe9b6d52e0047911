//! Enrolling again through the API server when renewing at a server can no longer help.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tunnel_core::backoff::jittered;

use super::csr::CsrEnrolment;
use super::renew::IdentityKeeper;

/// How often to re-check that enrolment is needed.
const RECHECK: Duration = Duration::from_secs(1);
/// The longest random wait when a server asks this one agent to enrol.
const PROMPT: Duration = Duration::from_secs(2);

/// Enrols again once the certificate has expired, or the servers and this agent have refused each other's certificate
/// for long enough. `refused_for`: how long they have, [`Duration::MAX`] when a server asks for it. Runs until stopped.
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
        match refused_for() {
            Some(Duration::MAX) => Some("a server asks for it: the Node was created again, or is readmitted"),
            Some(time) if time >= pace.patience => Some(
                "no server takes the certificate or is verified by the roots: the CA may have been replaced",
            ),
            _ => None,
        }
    };
    loop {
        tokio::time::sleep((pace.patience / 10).min(Duration::from_secs(5))).await;
        if needed().is_none() {
            continue;
        }
        let asked = refused_for() == Some(Duration::MAX);
        let spread = if asked { pace.spread.min(PROMPT) } else { pace.spread };
        tokio::time::sleep(jittered(spread, 1.0)).await;
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
            obtained = enrolment.obtain(spread) => obtained,
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

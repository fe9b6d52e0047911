//! Judges another server while a link with it lasts, and learns the revocations that it knows.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_pki::{IdentityError, TrustBundle};

use super::peer::Peer;
use crate::pki::{Refusal, Revocation, RevocationStore, Standing};

/// How often a server's certificate is verified while its link lasts.
const VERIFY: Duration = Duration::from_secs(300);
/// How far the clock of a server that revokes may be ahead.
const AHEAD: Duration = Duration::from_secs(86_400);

/// What servers are judged by, and where their revocations are kept.
pub struct Trust {
    /// The roots in force.
    pub roots: watch::Receiver<Arc<TrustBundle>>,
    /// Which servers are revoked.
    pub standing: Standing,
    pub revocations: RevocationStore,
    /// Time for connections to finish on a link whose server is not trusted any more.
    pub drain_timeout: Duration,
}

/// Why there may be no link with another server.
#[derive(Debug, thiserror::Error)]
pub(super) enum Distrust {
    #[error(transparent)]
    Revoked(#[from] Refusal),
    #[error("the other server's certificate is over: {0}")]
    Certificate(IdentityError),
}

/// Ends once the other server is revoked, or the roots in force have not verified it for the time of a drain. It is dialled
/// again before: it may have another certificate.
pub(super) async fn not_trusted(trust: &Trust, peer: &Peer, chain: &[CertificateDer<'_>]) -> Distrust {
    let (mut standing, mut roots) = (trust.standing.clone(), trust.roots.clone());
    let mut ends = None;
    loop {
        if let Err(refusal) = standing.judge_server(&peer.server_id) {
            return refusal.into();
        }
        let verified = roots.borrow_and_update().verify_server(chain);
        let next = match verified {
            Ok(()) => {
                ends = None;
                Instant::now() + VERIFY
            }
            Err(error) => {
                let now = Instant::now();
                let end = *ends.get_or_insert(now + trust.drain_timeout);
                if end <= now {
                    return Distrust::Certificate(error);
                }
                peer.draining.cancel();
                end
            }
        };
        tokio::select! {
            () = standing.changed() => {}
            Ok(()) = roots.changed() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Keeps the newer ones of the revocations that another server has told.
pub(super) async fn learn(trust: &Trust, server_id: &str, told: Vec<String>) {
    let latest = Timestamp::now().checked_add(AHEAD).unwrap_or(Timestamp::MAX);
    let (mut records, mut skipped) = (Vec::new(), 0_u64);
    for text in &told {
        match serde_json::from_str::<Revocation>(text) {
            // Nothing could ever follow it.
            Ok(record) if record.revoked > latest || record.readmitted > Some(latest) => skipped += 1,
            Ok(record) => records.push(record),
            Err(_) => skipped += 1,
        }
    }
    if skipped > 0 {
        tracing::warn!(
            server_id,
            skipped,
            "peer sent revocations that are malformed or of the future, ignoring these"
        );
    }
    if records.is_empty() {
        return;
    }
    let store = trust.revocations.clone();
    // The task fails only if the runtime is being shut down.
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || store.merge(&records)).await {
        tracing::error!(server_id, %error, "failed to store the revocations of a peer");
    }
}

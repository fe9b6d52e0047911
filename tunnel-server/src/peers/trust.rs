//! Judges another server while a link with it lasts, and learns the revocations that it knows.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_pki::{BACKDATE, IdentityError, TrustBundle};
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::clock::Clock;

use super::peer::Peer;
use crate::pki::{Refusal, Revocation, RevocationStore, Revocations, Standing, Subject};

/// How often a server's certificate is verified while its link lasts.
const VERIFY: Duration = Duration::from_secs(300);
/// How far the clock of a server that revokes may be ahead.
const AHEAD: Duration = BACKDATE;
/// Pause before records are stored again that could not be.
const AGAIN: Duration = Duration::from_secs(10);

/// The rules by which servers are judged, and the place of their revocations.
pub struct Trust {
    pub clock: Clock,
    /// The roots in force.
    pub roots: watch::Receiver<Arc<TrustBundle>>,
    /// Which servers are revoked.
    pub standing: Standing,
    pub revocations: RevocationStore,
    /// True if other servers may readmit nodes here: in a cluster, an object says that which no server writes unasked.
    pub readmissions: bool,
    /// Time for connections to finish on a link whose server is not trusted any more.
    pub drain_timeout: Duration,
}

/// Why there may be no link with another server.
#[derive(Debug, thiserror::Error)]
pub(super) enum Distrust {
    #[error(transparent)]
    Revoked(#[from] Refusal),
    #[error("the other server's certificate is no longer trusted or valid: {0}")]
    Certificate(IdentityError),
}

/// Ends once the other server is revoked, or the roots in force have not verified it for the time of a drain. It is dialled
/// again before: it may have another certificate.
pub(super) async fn not_trusted(trust: &Trust, peer: &Peer, chain: &[CertificateDer<'_>]) -> Distrust {
    let (mut standing, mut roots) = (trust.standing.clone(), trust.roots.clone());
    // A clock that jumps ends no link: as for agents, the time at its start counts, and what has passed since.
    let (began, since) = (trust.clock.now(), Instant::now());
    let mut ends = None;
    loop {
        if let Err(refusal) = standing.judge_server(&peer.server_id) {
            return refusal.into();
        }
        let verified = roots.borrow_and_update().verify_server(chain, began + since.elapsed());
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

/// Revocations of a peer that could not be stored, such as while the disk is full. The peer tells them again only with its next
/// link.
#[derive(Default)]
pub(super) struct Unstored {
    records: BTreeMap<Subject, Revocation>,
    /// Time of the next attempt to store them all.
    again: Option<Instant>,
}

impl Unstored {
    /// Waits until they are to be stored again.
    pub(super) async fn due(&self) {
        match self.again {
            Some(again) => sleep_until(again).await,
            None => pending().await,
        }
    }

    /// Stores them again.
    pub(super) async fn retry(&mut self, store: &RevocationStore, server_id: &str) {
        self.again = None;
        let records = std::mem::take(&mut self.records).into_values().collect();
        self.store(store, server_id, records).await;
    }

    async fn store(&mut self, store: &RevocationStore, server_id: &str, records: Vec<Revocation>) {
        if !stored(store, server_id, &records).await {
            self.records.extend(records.into_iter().map(|record| (record.subject.clone(), record)));
            self.again.get_or_insert_with(|| Instant::now() + AGAIN);
        }
    }
}

/// Keeps the newer ones of the revocations that another server has told.
pub(super) async fn learn(trust: &Trust, peer: &Peer, told: Vec<String>, unstored: &mut Unstored) {
    // A time that no timestamp can have takes no readmission.
    let now = Timestamp::try_from(trust.clock.now()).unwrap_or(Timestamp::MIN);
    let known = trust.standing.revocations().borrow().clone();
    let (mut records, mut skipped) = (Vec::new(), 0_u64);
    for text in &told {
        let told = serde_json::from_str::<Revocation>(text).map_err(|_| Skipped);
        match told.and_then(|record| accepted(record, &known, now, trust.readmissions)) {
            Ok(record) => records.extend(record),
            Err(Skipped) => skipped += 1,
        }
    }
    let server_id = peer.server_id.as_str();
    if skipped > 0 {
        tracing::warn!(
            server_id,
            skipped,
            "peer sent revocations that are malformed, or readmissions of the future, ignoring these"
        );
    }
    for record in records.iter().filter(|record| record.follows(known.records.get(&record.subject))) {
        let (subject, revoked, readmitted) = (&record.subject, record.revoked, record.readmitted);
        tracing::warn!(server_id, %subject, %revoked, ?readmitted, "learnt a revocation from a peer");
    }
    if !records.is_empty() {
        unstored.store(&trust.revocations, server_id, records).await;
    }
}

/// Returns false if some could not be stored.
async fn stored(store: &RevocationStore, server_id: &str, records: &[Revocation]) -> bool {
    let (store, records) = (store.clone(), records.to_vec());
    // The task fails only if the runtime is being shut down.
    let Ok(Err(error)) = blocking(move || store.merge(&records)).await else {
        return true;
    };
    tracing::error!(server_id, %error, "failed to store the revocations of a peer");
    false
}

/// A record is malformed, or of the future.
#[derive(Debug, PartialEq, Eq)]
struct Skipped;

/// Returns what is kept of a told record. Nothing is, if it is a readmission that is not another server's to say, or of
/// somebody whose own record cannot be read.
fn accepted(
    mut record: Revocation,
    known: &Revocations,
    now: Timestamp,
    readmissions: bool,
) -> Result<Option<Revocation>, Skipped> {
    let latest = now.checked_add(AHEAD).unwrap_or(Timestamp::MAX);
    if let Some(readmitted) = record.readmitted {
        let taken = readmissions
            && matches!(record.subject, Subject::Node(_))
            && !known.damaged.contains(&record.subject);
        // Certificates are dated after it, and none is dated that far ahead.
        return if readmitted > latest { Err(Skipped) } else { Ok(taken.then_some(record)) };
    }
    if record.revoked > latest {
        // By a clock that is ahead: nothing could follow it until then.
        let is_revoked = known.records.get(&record.subject).is_some_and(|known| known.readmitted.is_none());
        record.revoked = now;
        return Ok((!is_revoked).then_some(record));
    }
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_stored_is_stored_later_with_what_came_meanwhile() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        // As on a full disk nothing can be created in it.
        std::fs::write(&state, "").unwrap();
        let (store, mut unstored, began) =
            (RevocationStore::new(&state), Unstored::default(), Instant::now());
        let revoked = ["edge-1", "edge-2"].map(|node| {
            Revocation::revoke(None, Subject::Node(node.parse().unwrap()), Timestamp::UNIX_EPOCH)
        });
        for record in &revoked {
            tokio::time::advance(AGAIN / 4).await;
            unstored.store(&store, "server-b", vec![record.clone()]).await;
        }
        unstored.due().await;
        assert!(began.elapsed() < AGAIN * 3 / 2, "what comes meanwhile delays no attempt");
        unstored.retry(&store, "server-b").await;
        assert_eq!(unstored.records.len(), 2);
        std::fs::remove_file(&state).unwrap();
        unstored.due().await;
        unstored.retry(&store, "server-b").await;
        assert!(unstored.records.is_empty() && unstored.again.is_none());
        assert!(store.load().unwrap().0.records.values().eq(&revoked));
    }

    #[test]
    fn others_revoke_and_readmit_only_where_that_is_theirs_to_say() {
        let (now, hour) = (Timestamp::now(), Duration::from_secs(3600));
        let node = |name: &str| Subject::Node(name.parse().unwrap());
        let revoked = Revocation::revoke(None, node("edge-1"), now);
        let readmitted = revoked.readmit(now).unwrap();
        let of = |records: &[&Revocation], damaged: &[Subject]| Revocations {
            records: records.iter().map(|record| (record.subject.clone(), (*record).clone())).collect(),
            damaged: damaged.iter().cloned().collect(),
        };
        let none = Revocations::default();
        for known in [&none, &of(&[&readmitted], &[]), &of(&[], &[node("edge-1")])] {
            assert_eq!(accepted(revoked.clone(), known, now, false), Ok(Some(revoked.clone())));
        }
        assert_eq!(accepted(readmitted.clone(), &of(&[&revoked], &[]), now, false), Ok(None));
        assert_eq!(accepted(readmitted.clone(), &of(&[], &[node("edge-1")]), now, true), Ok(None));
        assert_eq!(accepted(readmitted.clone(), &of(&[&revoked], &[]), now, true), Ok(Some(readmitted)));
        let server = Subject::of_server("cloud-1-0123abcd").unwrap();
        let back = Revocation::revoke(None, server, now).readmit(now).unwrap();
        assert_eq!(accepted(back, &none, now, true), Ok(None), "no server readmits one");
        // Clocks that are ahead.
        let future = Revocation::revoke(None, node("edge-1"), now + 8 * hour);
        let here = Revocation { revoked: now, ..future.clone() };
        assert_eq!(accepted(future.clone(), &none, now, true), Ok(Some(here)));
        assert_eq!(accepted(future.clone(), &of(&[&revoked], &[]), now, true), Ok(None), "it is revoked");
        assert_eq!(accepted(future.readmit(now).unwrap(), &none, now, true), Err(Skipped));
    }
}

//! Revoked agents, redirectors and servers: one small file each, written by the command line or copied from the cluster or from another
//! server, and followed by the running server.
//!
//! A record is never removed. After a readmission it has the time after which a certificate must be issued, so that a
//! copy of an older one stays out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::files;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::reloaded::FileWatch;

use super::error::PkiError;
use super::records::Records;
use super::subject::Subject;

const DIRECTORY: &str = "revoked";
/// Interval at which the files are also read: not every file system has events.
const POLL: Duration = Duration::from_secs(10);
/// Maximum difference of the servers' clocks: a certificate that counts as issued within this time after the
/// readmission may be an older one. New ones are dated after it.
const SKEW: Duration = Duration::from_secs(60);

/// Record of an identity that was revoked at least once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    #[serde(rename = "node")]
    pub subject: Subject,
    /// Time of the last revocation. Enrolment tokens created before are void.
    pub revoked: Timestamp,
    /// None while it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readmitted: Option<Timestamp>,
}

impl Revocation {
    /// Time of issue that a certificate must exceed.
    pub fn issued_after(&self) -> SystemTime {
        SystemTime::from(self.readmitted.unwrap_or(self.revoked)) + SKEW
    }

    /// Sort key by time of writing; of two with the same time, the revocation is later.
    fn order(&self) -> (Timestamp, bool) {
        (self.readmitted.unwrap_or(self.revoked), self.readmitted.is_none())
    }

    /// Reports whether it is newer than the known one.
    pub(crate) fn follows(&self, known: Option<&Self>) -> bool {
        known.is_none_or(|known| known.order() < self.order())
    }

    /// Returns the record that follows `before`, which may have been written by a clock that is ahead.
    pub fn revoke(before: Option<&Self>, subject: impl Into<Subject>, now: Timestamp) -> Self {
        Self { subject: subject.into(), revoked: after(before, now), readmitted: None }
    }

    /// Returns the readmitted record; None if it is not revoked.
    pub fn readmit(&self, now: Timestamp) -> Option<Self> {
        let readmitted = Some(after(Some(self), now));
        self.readmitted.is_none().then(|| Self { readmitted, ..self.clone() })
    }
}

fn after(before: Option<&Revocation>, now: Timestamp) -> Timestamp {
    let next = before.and_then(|before| before.order().0.checked_add(Duration::from_secs(1)).ok());
    next.map_or(now, |next| now.max(next))
}

/// All records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations {
    pub records: BTreeMap<Subject, Revocation>,
    /// Those whose file is unusable, or was not read yet: they count as revoked.
    pub damaged: BTreeSet<Subject>,
}

/// The records of a state directory.
#[derive(Clone, Debug)]
pub struct RevocationStore(Records);

impl RevocationStore {
    pub fn new(state_dir: &Path) -> Self {
        Self(Records::new(state_dir, DIRECTORY))
    }

    /// A subject is a valid file name: a node's name has at most 253 characters of [a-z0-9.-], and is never "." or "..".
    fn read(&self, subject: &Subject) -> Result<Option<Revocation>, PkiError> {
        let (named, arguments) = (subject.named(), subject.arguments());
        let fix = format!(
            "{named} counts as revoked; write the file anew with `tunnel-server agent revoke {arguments}`, and then \
             `agent readmit {arguments}` if it may return"
        );
        let name = subject.to_string();
        let Some(record) = self.0.read::<Revocation>(&name, &fix)? else { return Ok(None) };
        if record.subject != *subject {
            let reason = format_args!("it is about {}", record.subject.named());
            return Err(PkiError::file(&self.0.path(&name), &reason, fix));
        }
        Ok(Some(record))
    }

    fn write(&self, record: &Revocation) -> Result<(), PkiError> {
        self.0.write(&record.subject.to_string(), record)
    }

    /// Returns the records, and an error for each file that is unusable or could not be read.
    ///
    /// # Errors
    /// If the directory cannot be read; if it does not exist there are no records.
    pub fn load(&self) -> Result<(Revocations, Vec<(Subject, PkiError)>), PkiError> {
        let (mut known, mut errors) = (Revocations::default(), Vec::new());
        for name in self.0.names()? {
            let Ok(subject) = name.parse::<Subject>() else { continue };
            match self.read(&subject) {
                Ok(record) => known.records.extend(record.map(|record| (subject, record))),
                Err(error) => {
                    errors.push((subject.clone(), error));
                    known.damaged.insert(subject);
                }
            }
        }
        Ok((known, errors))
    }

    /// Revokes the identity, also if it is revoked already. A damaged file is replaced.
    pub fn revoke(&self, subject: &Subject, now: Timestamp) -> Result<Revocation, PkiError> {
        let _lock = self.0.lock()?;
        let before = self.read(subject).ok().flatten();
        let record = Revocation::revoke(before.as_ref(), subject.clone(), now);
        self.write(&record)?;
        Ok(record)
    }

    /// Ends the revocation for certificates issued from now on.
    pub fn readmit(&self, subject: &Subject, now: Timestamp) -> Result<Revocation, PkiError> {
        let _lock = self.0.lock()?;
        let before = self.read(subject)?;
        let record = before
            .and_then(|before| before.readmit(now))
            .ok_or_else(|| PkiError::NotRevoked(subject.named()))?;
        self.write(&record)?;
        Ok(record)
    }

    /// Takes over the records that are newer than those here. Removes nothing: a deleted object must not let a copied
    /// identity in again.
    ///
    /// # Errors
    /// Some could not be written; the others were.
    pub fn merge(&self, records: &[Revocation]) -> Result<(), PkiError> {
        let _lock = self.0.lock()?;
        let mut merged = Ok(());
        for record in records {
            let present = match self.read(&record.subject) {
                // It may be newer.
                Err(error) if error.is_io() => Err(error),
                present => Ok(present.ok().flatten()),
            };
            merged = merged.and(present.and_then(|present| match record.follows(present.as_ref()) {
                true => self.write(record),
                false => Ok(()),
            }));
        }
        merged
    }

    /// Reads the records at the start. Returns the channel that [`RevocationStore::follow`] keeps up to date.
    ///
    /// # Errors
    /// If the directory cannot be read or created. No agent may be admitted without knowing the revocations.
    pub fn open(&self) -> Result<watch::Sender<Arc<Revocations>>, PkiError> {
        files::create_private_directory(&self.0.directory())?;
        // `follow` reads again, and logs those that cannot be read.
        let (known, _) = self.load()?;
        Ok(watch::Sender::new(Arc::new(known)))
    }

    /// Publishes the records whenever they change, until `stop`. Known ones that cannot be read stay.
    pub async fn follow(self, publish: watch::Sender<Arc<Revocations>>, stop: CancellationToken) {
        let mut watch = FileWatch::new("revocations");
        let mut logged = LogOnce::default();
        loop {
            let store = self.clone();
            let read = tokio::task::spawn_blocking(move || {
                let directory = store.0.directory();
                // Before reading, so that a later change is an event. Any file of the directory will do.
                watch.follow([directory.join("_").as_path()]);
                // `load` treats a missing directory as empty; here it existed before.
                let read = fs::metadata(&directory).map_err(|error| PkiError::io(&directory, error));
                (read.and_then(|_| store.load()), watch)
            });
            // Otherwise the runtime is being shut down.
            let Ok((read, now)) = read.await else { return };
            watch = now;
            match read {
                Ok((mut known, errors)) => {
                    known.keep_unread(&publish.borrow(), &errors);
                    let text =
                        errors.iter().map(|(_, error)| error.to_string()).collect::<Vec<_>>().join("; ");
                    if text.is_empty() {
                        logged.clear();
                    } else if logged.is_new(&text) {
                        tracing::error!(error = text, "failed to read a revocation, it stays in effect");
                    }
                    publish.send_if_modified(|current| {
                        let changed = **current != known;
                        if changed {
                            tracing::info!(
                                revoked = known.revoked().count(),
                                damaged = known.damaged.len(),
                                "revocations changed"
                            );
                            *current = Arc::new(known);
                        }
                        changed
                    });
                }
                Err(error) => {
                    if logged.is_new(&error) {
                        tracing::error!(%error, "failed to read the revocations, keeping the known ones");
                    }
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = watch.event() => {
                    stop.run_until_cancelled(watch.settle()).await;
                }
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }
}

impl Revocations {
    /// Those that are revoked now.
    pub fn revoked(&self) -> impl Iterator<Item = &Revocation> {
        self.records.values().filter(|record| record.readmitted.is_none())
    }

    /// Takes the records of files that could not be read from `before`.
    fn keep_unread(&mut self, before: &Self, errors: &[(Subject, PkiError)]) {
        for (subject, _) in errors.iter().filter(|(_, error)| error.is_io()) {
            if let Some(record) = before.records.get(subject) {
                self.damaged.remove(subject);
                self.records.insert(subject.clone(), record.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn node(name: &str) -> Subject {
        Subject::Node(name.parse().unwrap())
    }

    fn store() -> (tempfile::TempDir, RevocationStore, Timestamp) {
        let directory = tempfile::tempdir().unwrap();
        let store = RevocationStore::new(directory.path());
        (directory, store, "2026-01-01T00:00:00Z".parse().unwrap())
    }

    fn later(now: Timestamp, seconds: i64) -> Timestamp {
        now + jiff::SignedDuration::from_secs(seconds)
    }

    #[test]
    fn records_last_and_only_grow() {
        let (_directory, store, now) = store();
        assert!(matches!(store.readmit(&node("edge-1"), now), Err(PkiError::NotRevoked(_))));
        store.revoke(&node("edge-1"), now).unwrap();
        let path = store.0.path("edge-1");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        // In the same second, and by a clock that is behind.
        let readmitted = store.readmit(&node("edge-1"), later(now, -3600)).unwrap();
        assert!(readmitted.readmitted.unwrap() > now);
        assert!(store.readmit(&node("edge-1"), now).is_err(), "it is not revoked any more");
        let again = store.revoke(&node("edge-1"), now).unwrap();
        assert!(again.revoked > readmitted.readmitted.unwrap());
        assert_eq!(store.load().unwrap().0.records[&node("edge-1")], again);
    }

    #[test]
    fn a_damaged_file_keeps_its_node_out_and_is_reported_with_the_fix() {
        let (_directory, store, now) = store();
        store.revoke(&node("edge-1"), now).unwrap();
        for text in ["", "{\"node\":", "{\"node\":\"edge-2\",\"revoked\":\"2026-01-01T00:00:00Z\"}", "\u{0}"]
        {
            fs::write(store.0.path("edge-1"), text).unwrap();
            let (known, errors) = store.load().unwrap();
            assert!(known.damaged.contains(&node("edge-1")) && known.records.is_empty(), "{text:?}");
            let error = errors[0].1.to_string();
            let path = store.0.path("edge-1");
            assert!(
                error.contains(path.to_str().unwrap()) && error.contains("agent revoke edge-1"),
                "{error}"
            );
            assert!(store.readmit(&node("edge-1"), now).is_err());
        }
        store.revoke(&node("edge-1"), now).unwrap();
        assert_eq!(store.load().unwrap().0.revoked().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_read_for_now_changes_nothing() {
        let (_directory, store, now) = store();
        let revoked = store.revoke(&node("edge-1"), now).unwrap();
        let readmitted = store.readmit(&node("edge-1"), later(now, 10)).unwrap();
        let before = store.load().unwrap().0;
        // Reading a directory fails with EISDIR.
        let path = store.0.path("edge-1");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let (mut known, errors) = store.load().unwrap();
        assert!(known.damaged.contains(&node("edge-1")), "at the start it may be a revocation");
        known.keep_unread(&before, &errors);
        assert_eq!(known.records[&node("edge-1")], readmitted);
        assert!(known.damaged.is_empty() && store.merge(&[revoked]).is_err());
    }

    #[test]
    fn a_directory_that_cannot_be_read_is_not_an_empty_one() {
        let (_directory, store, now) = store();
        assert_eq!(store.load().unwrap().0, Revocations::default(), "there is none yet");
        fs::write(store.0.directory(), "").unwrap();
        assert!(store.load().is_err() && store.open().is_err());
        fs::remove_file(store.0.directory()).unwrap();
        store.revoke(&node("edge-1"), now).unwrap();
        assert_eq!(**store.open().unwrap().borrow(), store.load().unwrap().0);
    }

    #[test]
    fn merging_takes_the_newer_record_and_removes_none() {
        let (_directory, store, now) = store();
        let revoked = store.revoke(&node("edge-1"), now).unwrap();
        let readmitted = revoked.readmit(later(now, 10)).unwrap();
        store.merge(&[]).unwrap();
        assert_eq!(store.load().unwrap().0.records[&node("edge-1")], revoked);
        store.merge(std::slice::from_ref(&readmitted)).unwrap();
        store.merge(std::slice::from_ref(&revoked)).unwrap();
        assert_eq!(store.load().unwrap().0.records[&node("edge-1")], readmitted);
        // Of two with the same time, the revocation wins.
        let same = Revocation::revoke(None, node("edge-1"), readmitted.readmitted.unwrap());
        store.merge(&[readmitted, same.clone()]).unwrap();
        assert_eq!(store.load().unwrap().0.records[&node("edge-1")], same);
    }

    #[tokio::test]
    async fn a_running_server_follows_and_never_forgets() {
        let (directory, store, now) = store();
        let known = store.open().unwrap();
        let (mut seen, stop) = (known.subscribe(), CancellationToken::new());
        let task = tokio::spawn(store.clone().follow(known, stop.clone()));
        let mut until = async |what: &str, wanted: fn(&Revocations) -> bool| {
            let wait =
                tokio::time::timeout(Duration::from_secs(60), seen.wait_for(|seen| wanted(seen))).await;
            // The channel is closed when the task has ended.
            assert!(matches!(wait, Ok(Ok(_))), "{what}");
        };
        store.revoke(&node("edge-1"), now).unwrap();
        until("revoked", |seen| seen.revoked().count() == 1).await;
        fs::write(store.0.path("edge-1"), "x").unwrap();
        until("damaged", |seen| seen.damaged.len() == 1).await;
        store.revoke(&node("edge-1"), now).unwrap();
        store.readmit(&node("edge-1"), now).unwrap();
        until("readmitted", |seen| seen.revoked().count() == 0 && seen.records.len() == 1).await;
        store.revoke(&node("edge-2"), now).unwrap();
        until("another", |seen| seen.revoked().count() == 1).await;
        // The directory vanishes and returns with one more file.
        let (here, away) = (store.0.directory(), directory.path().join("away"));
        fs::rename(&here, &away).unwrap();
        fs::write(away.join("edge-3"), "x").unwrap();
        fs::rename(&away, &here).unwrap();
        until("it is back", |seen| seen.revoked().count() == 1 && seen.damaged.len() == 1).await;
        stop.cancel();
        task.await.unwrap();
    }
}

//! The revoked nodes and servers, in a ConfigMap that no node can write: one entry each. Every server follows it and keeps a
//! copy in its state directory; the copy decides, also while the API server is unavailable.
//!
//! A deleted ConfigMap or entry readmits nobody: it would let a copied identity in again.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Patch;
use serde_json::json;
use tokio::time::Instant;
use tunnel_kube::{Attempts, Followed, merge, named};
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::text::printable;

use crate::kube::context::KubeContext;
use crate::kube::error::ClusterError;
use crate::kube::object::ClusterObject;
use crate::kube::reconcile::{self, Reconcile, inputs};
use crate::pki::{PkiError, Revocation, RevocationStore, Subject};

/// The ConfigMap, as used by the command line.
pub type RevocationMap = ClusterObject<ConfigMap>;

impl RevocationMap {
    /// Returns the records, and an error for each unusable entry.
    pub async fn list(&self) -> Result<(Vec<Revocation>, Vec<ClusterError>), ClusterError> {
        let (good, bad) = entries(self.get().await?.as_ref());
        let bad = bad.into_iter().map(|(node, reason)| self.unusable(&node, reason)).collect();
        Ok((good, bad))
    }

    /// Copies the records to `store`. Unusable entries are reported by [`follow`].
    pub async fn copy_to(&self, store: &RevocationStore) -> Result<(), ClusterError> {
        let (records, _) = to_copy(self.get().await?.as_ref());
        Ok(store.merge(&records)?)
    }

    fn unusable(&self, subject: &Subject, reason: String) -> ClusterError {
        let object = format!("{}, key {subject}", self.named());
        let (named, arguments) = (subject.named(), subject.arguments());
        let fix = format!(
            "{named} counts as revoked: `tunnel-server agent revoke {arguments}` writes the entry anew"
        );
        ClusterError::Malformed { object, reason, fix }
    }

    /// See [`RevocationStore::revoke`].
    pub async fn revoke(&self, subject: &Subject, now: Timestamp) -> Result<Revocation, ClusterError> {
        let present = self.get().await?;
        let before = entries(present.as_ref()).0.into_iter().find(|record| record.subject == *subject);
        let record = Revocation::revoke(before.as_ref(), subject.clone(), now);
        self.write(present, &record).await?;
        Ok(record)
    }

    /// See [`RevocationStore::readmit`].
    pub async fn readmit(&self, subject: &Subject, now: Timestamp) -> Result<Revocation, ClusterError> {
        let present = self.get().await?;
        let (good, bad) = entries(present.as_ref());
        if let Some((_, reason)) = bad.into_iter().find(|(name, _)| name == subject) {
            return Err(self.unusable(subject, reason));
        }
        let before = good.into_iter().find(|record| record.subject == *subject);
        let record = before
            .and_then(|before| before.readmit(now))
            .ok_or_else(|| PkiError::NotRevoked(subject.named()))?;
        self.write(present, &record).await?;
        Ok(record)
    }

    /// Writes a record, if the ConfigMap has not changed since it was read.
    async fn write(&self, present: Option<ConfigMap>, record: &Revocation) -> Result<(), ClusterError> {
        let text = serde_json::to_string(record)
            .map_err(|error| self.unusable(&record.subject, error.to_string()))?;
        let data = BTreeMap::from([(record.subject.to_string(), text)]);
        match present {
            Some(present) => {
                let version = present.metadata.resource_version;
                let patch = json!({"metadata": {"resourceVersion": version}, "data": data});
                let patch = Patch::Merge(patch);
                self.request("changing", self.api.patch(&self.name, &merge(), &patch)).await?;
                Ok(())
            }
            None => {
                let made = ConfigMap { metadata: self.metadata(), data: Some(data), ..ConfigMap::default() };
                self.create_once(&made).await
            }
        }
    }
}

type Unusable = Vec<(Subject, String)>;

/// Returns the records and the unusable entries. Keys that name no node or server are ignored.
fn entries(configmap: Option<&ConfigMap>) -> (Vec<Revocation>, Unusable) {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let data = configmap.and_then(|configmap| configmap.data.as_ref());
    for (key, text) in data.into_iter().flatten() {
        let Ok(subject) = key.parse::<Subject>() else { continue };
        match serde_json::from_str::<Revocation>(text) {
            Ok(record) if record.subject == subject => good.push(record),
            Ok(record) => bad.push((subject, format!("it is about {}", record.subject.named()))),
            Err(error) => bad.push((subject, printable(&error.to_string(), 200))),
        }
    }
    (good, bad)
}

/// Returns the records for the copy. An unusable entry counts as a revocation, unless the copy knows its former state.
fn to_copy(configmap: Option<&ConfigMap>) -> (Vec<Revocation>, Unusable) {
    let (mut records, bad) = entries(configmap);
    let unusable = bad.iter().map(|(subject, _)| subject.clone());
    records.extend(unusable.map(|subject| Revocation::revoke(None, subject, Timestamp::UNIX_EPOCH)));
    (records, bad)
}

/// Copies the ConfigMap's records to the state directory until the context's `stop`.
pub async fn follow(context: KubeContext, store: RevocationStore) {
    let map = RevocationMap::new(context.client, &context.namespace, &context.names.revocations);
    let changes = context.health.follow(map.api.clone(), named(&map.name), "configmaps/revocations");
    let changes = inputs(changes, |target: &mut Copy, event| target.followed.apply(event));
    let copy = Copy { map, store, followed: Followed::default() };
    let attempts = Attempts::new("copying the revocations of the cluster");
    reconcile::run(copy, changes, Duration::ZERO, attempts, context.stop).await;
}

struct Copy {
    map: RevocationMap,
    store: RevocationStore,
    followed: Followed<ConfigMap>,
}

impl Reconcile for Copy {
    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
        if !self.followed.known {
            return Ok(None);
        }
        let (records, bad) = to_copy(self.followed.only());
        let store = self.store.clone();
        // The task fails only if the runtime is being shut down.
        let Ok(merged) = blocking(move || store.merge(&records)).await else {
            return Ok(None);
        };
        merged?;
        if bad.is_empty() {
            attempts.succeeded();
        } else {
            let bad =
                bad.into_iter().map(|(subject, reason)| self.map.unusable(&subject, reason).to_string());
            attempts.report(&bad.collect::<Vec<_>>().join("; "));
        }
        Ok(None)
    }
}

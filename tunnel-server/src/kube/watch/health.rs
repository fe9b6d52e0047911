//! How the watches are doing, for metrics, `status` and `doctor`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabel {
    resource: &'static str,
}

/// How one watch is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchHealth {
    /// What is watched, such as `nodes`.
    pub resource: String,
    /// Whether everything is known and changes are told.
    pub synced: bool,
    /// Kept when it is over.
    pub last_error: Option<String>,
    /// Since when it is synced, or is not.
    pub since: Timestamp,
}

/// How each watch is doing; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    watches: Mutex<BTreeMap<&'static str, WatchHealth>>,
    synced: Family<ResourceLabel, Gauge>,
    errors: Family<ResourceLabel, Counter>,
}

impl Health {
    /// Metrics go into `registry`, which has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        let health = Self::default();
        registry.register(
            "kube_watch_synced",
            "1 while all objects are known and their changes are told, 0 while the API server is silent",
            health.0.synced.clone(),
        );
        registry.register("kube_errors", "Failed lists and watches, by resource", health.0.errors.clone());
        health
    }

    /// One entry for each resource that is followed, in the order of their names.
    pub fn report(&self) -> Vec<WatchHealth> {
        self.watches().values().cloned().collect()
    }

    /// A watch that has not begun yet.
    pub(super) fn add(&self, resource: &'static str) {
        let (last_error, since) = (None, Timestamp::now());
        let entry = WatchHealth { resource: resource.to_owned(), synced: false, last_error, since };
        self.watches().insert(resource, entry);
        self.0.synced.get_or_create(&ResourceLabel { resource }).set(0);
        // The series starts at zero, so that rates work from the first event on.
        let _ = self.0.errors.get_or_create(&ResourceLabel { resource });
    }

    /// Nobody follows it any more.
    pub(super) fn ended(&self, resource: &'static str) {
        self.watches().remove(resource);
        self.0.synced.remove(&ResourceLabel { resource });
    }

    pub(super) fn works(&self, resource: &'static str) {
        self.set(resource, true, None);
    }

    pub(super) fn lost(&self, resource: &'static str, reason: &str) {
        self.set(resource, false, Some(reason));
    }

    /// Counts a failure.
    pub(super) fn failed(&self, resource: &'static str) {
        self.0.errors.get_or_create(&ResourceLabel { resource }).inc();
    }

    fn set(&self, resource: &'static str, synced: bool, error: Option<&str>) {
        self.0.synced.get_or_create(&ResourceLabel { resource }).set(i64::from(synced));
        let mut watches = self.watches();
        let Some(entry) = watches.get_mut(resource) else { return };
        if entry.synced != synced {
            entry.synced = synced;
            entry.since = Timestamp::now();
        }
        if let Some(error) = error {
            entry.last_error = Some(error.to_owned());
        }
    }

    fn watches(&self) -> MutexGuard<'_, BTreeMap<&'static str, WatchHealth>> {
        self.0.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

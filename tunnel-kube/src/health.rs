//! Health of the server's watches, for metrics and `status`.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use jiff::Timestamp;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Resource};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::follow::{FollowSettings, Signal, follow};

/// A label's name and value.
type Label = [(&'static str, &'static str); 1];

/// Health of one watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchHealth {
    /// The watched resource, such as `nodes`.
    pub resource: String,
    /// True while all objects are known and their changes arrive.
    pub synced: bool,
    /// Kept after recovery.
    pub last_error: Option<String>,
    /// Time of the last change of `synced`.
    pub since: Timestamp,
}

/// Health of all watches. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    watches: Mutex<BTreeMap<&'static str, WatchHealth>>,
    synced: Family<Label, Gauge>,
    errors: Family<Label, Counter>,
}

impl Health {
    /// Registers the metrics in `registry`, which has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        let health = Self::default();
        registry.register(
            "kube_watch_synced",
            "1 while all objects are known and their changes arrive, 0 while the API server is silent",
            health.0.synced.clone(),
        );
        registry.register("kube_errors", "Failed lists and watches, by resource", health.0.errors.clone());
        health
    }

    /// One entry for each followed resource, ordered by name.
    pub fn report(&self) -> Vec<WatchHealth> {
        self.0.watches.lock().values().cloned().collect()
    }

    /// Follows objects as [`follow`] does with [`FollowSettings::SERVER`]. Counts errors under the name `resource`.
    /// Logs one line when the API server is lost and one when it is back.
    pub fn follow<K>(
        &self,
        api: Api<K>,
        config: Config,
        resource: &'static str,
    ) -> impl Stream<Item = Event<K>> + Send + use<K>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut entry = Entry::new(self.clone(), resource);
        follow(api, config, FollowSettings::SERVER, move |signal| entry.take(signal))
    }
}

/// One watch's entry, removed on drop.
struct Entry {
    health: Health,
    resource: &'static str,
    lost: Option<Instant>,
}

impl Entry {
    fn new(health: Health, resource: &'static str) -> Self {
        let (last_error, since) = (None, Timestamp::now());
        let watch = WatchHealth { resource: resource.to_owned(), synced: false, last_error, since };
        health.0.watches.lock().insert(resource, watch);
        let entry = Self { health, resource, lost: None };
        entry.health.0.synced.get_or_create(&entry.label()).set(0);
        // The series starts at zero, so that rates work from the first event on.
        let _ = entry.health.0.errors.get_or_create(&entry.label());
        entry
    }

    fn label(&self) -> Label {
        [("resource", self.resource)]
    }

    fn take(&mut self, signal: Signal<'_>) {
        match signal {
            Signal::Slow { reason } => self.lost(reason),
            Signal::Failed { reason, .. } => {
                self.health.0.errors.get_or_create(&self.label()).inc();
                self.lost(reason);
            }
            Signal::Works => {
                self.set(true, None);
                if let Some(since) = self.lost.take() {
                    let after = Duration::from_millis(since.elapsed().as_millis() as u64);
                    let after = tunnel_runtime::config::duration_text(after);
                    tracing::info!(resource = self.resource, after, "API server available again");
                }
            }
        }
    }

    fn lost(&mut self, reason: &str) {
        self.set(false, Some(reason));
        if self.lost.is_none() {
            self.lost = Some(Instant::now());
            tracing::warn!(
                resource = self.resource,
                error = reason,
                "API server unavailable, keeping the last known state"
            );
        }
    }

    fn set(&self, synced: bool, error: Option<&str>) {
        self.health.0.synced.get_or_create(&self.label()).set(i64::from(synced));
        let mut watches = self.health.0.watches.lock();
        let Some(watch) = watches.get_mut(self.resource) else { return };
        if watch.synced != synced {
            watch.synced = synced;
            watch.since = Timestamp::now();
        }
        if let Some(error) = error {
            watch.last_error = Some(error.to_owned());
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.health.0.watches.lock().remove(self.resource);
        self.health.0.synced.remove(&self.label());
    }
}

//! A copy of the cluster's state in the state directory, for starts while the API server is unavailable.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::Router;
use tunnel_routing::inventory::Inventory;
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::gauges::registered;
use tunnel_runtime::state_file::StateFile;

use crate::runtime::settings::Settings;

/// Version of the file's format. Files of another version are not used.
const VERSION: u32 = 1;
/// Changes within this time are written together.
const PERIOD: Duration = Duration::from_secs(30);

/// Time since which the state in effect may be outdated: seconds since 1970, 0 while current. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Age(Gauge<u64, AtomicU64>);

impl Age {
    /// Registers the gauge in `registry`, which has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Unix time of the saved nodes that are in use because the API server has not answered since the start; 0 \
                    while the nodes are the API server's";
        Self(registered(registry, "inventory_saved_timestamp_seconds", help))
    }

    /// Age of the state in seconds; None while it is current.
    pub fn seconds(&self) -> Option<u64> {
        Some(self.0.get()).filter(|at| *at > 0).map(|at| seconds(SystemTime::now()).saturating_sub(at))
    }

    /// Sets the time, in seconds since 1970.
    pub(super) fn set(&self, at: u64) {
        self.0.set(at.max(1));
    }

    pub(super) fn set_current(&self) {
        self.0.set(0);
    }
}

/// The nodes, ports and ranges of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    version: u32,
    /// Time at which the state was current, in seconds since 1970.
    pub at: u64,
    pub nodes: Inventory,
    /// The ranges of Service addresses.
    pub services: Vec<IpNet>,
    pub settings: Settings,
}

/// The file `cluster.json`; clones share it.
#[derive(Clone, Debug)]
pub struct ClusterCache(Arc<StateFile<Content>>);

impl ClusterCache {
    pub fn new(state_dir: &Path) -> Self {
        Self(StateFile::new(state_dir.join("cluster.json")))
    }

    /// Loads the file. Returns None if there is none that can be used; the reason is logged.
    pub async fn load(&self) -> Option<Content> {
        let file = self.0.clone();
        let content = blocking(move || file.load()).await.ok().flatten()?;
        if content.version != VERSION {
            let (path, version) = (self.0.path().display(), content.version);
            tracing::warn!(%path, version, "ignoring a state file of an unknown version");
            return None;
        }
        Some(content)
    }

    /// Writes the state in effect after each change until `stop`. `nodes` are those of the API server. `settings` returns the
    /// settings to save.
    pub async fn keep(
        self,
        changed: watch::Receiver<u64>,
        nodes: watch::Receiver<Arc<Inventory>>,
        settings: impl Fn() -> Arc<Settings> + Clone + Send + Sync + 'static,
        router: Arc<Router>,
        health: Health,
        stop: CancellationToken,
    ) {
        let content = move || {
            Some(Content {
                version: VERSION,
                at: seconds(current_at(&health)),
                nodes: Inventory::clone(&nodes.borrow()),
                services: router.services(),
                settings: Settings::clone(&settings()),
            })
        };
        self.0.keep(changed, content, PERIOD, stop).await;
    }
}

/// Returns the time at which the nodes were current: now, or when their watch was lost.
fn current_at(health: &Health) -> SystemTime {
    let watches = health.report();
    let lost = watches.iter().find(|watch| watch.resource == "nodes" && !watch.synced);
    lost.map_or_else(SystemTime::now, |watch| watch.since.into())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

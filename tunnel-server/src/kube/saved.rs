//! The nodes and ports of the cluster in the state directory, for a start while the API server is away.
//!
//! What is read from there is used for the routes and for the agents' ports only: nothing is written to the cluster by it, and
//! no agent is refused.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_core::identity::files::{PRIVATE_FILE, write_atomically};
use tunnel_core::lifecycle::ReadyGuard;
use tunnel_core::log_once::LogOnce;
use tunnel_core::text::printable;
use tunnel_kube::Health;

use crate::inventory::Inventory;
use crate::route::{Router, read_bounded, update, update_services};
use crate::settings::Settings;

const NAME: &str = "cluster.json";
/// Of what the file holds. One of another version is not used.
const VERSION: u32 = 1;
/// Larger files are not read. 100,000 nodes are some 20 MiB.
const MAX_BYTES: u64 = 256 << 20;
/// How long the API server may take before the file is used.
const GRACE: Duration = Duration::from_secs(3);
/// How often changes are written.
const PERIOD: Duration = Duration::from_secs(30);
/// The file is written this often at least, so that after a crash its age is nearly right.
const REFRESH: Duration = Duration::from_secs(600);

/// Since when what is in effect may have changed: seconds since 1970, 0 while it is current. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Age(Gauge<u64, AtomicU64>);

impl Age {
    /// Goes into `registry`, which has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        let age = Self::default();
        let help = "When the nodes in effect were current, if they are those of the state directory because the API server \
                    has not answered since the start; 0 otherwise";
        registry.register("inventory_saved_timestamp_seconds", help, age.0.clone());
        age
    }

    /// None: it is current.
    pub fn seconds(&self) -> Option<u64> {
        Some(self.0.get()).filter(|at| *at > 0).map(|at| seconds(SystemTime::now()).saturating_sub(at))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    version: u32,
    /// When it was current, in seconds since 1970.
    at: u64,
    nodes: Inventory,
    /// The ranges of Service addresses.
    services: Vec<IpNet>,
    settings: Settings,
}

impl Content {
    /// At another time, perhaps.
    fn is_as(&self, other: &Self) -> bool {
        (&self.nodes, &self.services, &self.settings) == (&other.nodes, &other.services, &other.settings)
    }
}

/// What the cluster last said, for a restart.
pub struct Saved {
    path: PathBuf,
    router: Arc<Router>,
    age: Age,
    /// Whether the API server has said which nodes there are. Held while the router gets them.
    current: AsyncMutex<bool>,
    /// Whether it has said which ranges of Service addresses there are. Held while the router gets them.
    ranges: AsyncMutex<bool>,
    /// Done once any nodes are known.
    ready: Mutex<Option<ReadyGuard>>,
    /// Of the file, while the ConfigMap is not known.
    settings: Mutex<Arc<Settings>>,
}

impl Saved {
    pub fn new(state_dir: &Path, router: Arc<Router>, age: Age, ready: ReadyGuard) -> Self {
        Self {
            path: state_dir.join(NAME),
            router,
            age,
            current: AsyncMutex::default(),
            ranges: AsyncMutex::default(),
            ready: Mutex::new(Some(ready)),
            settings: Mutex::default(),
        }
    }

    /// Gives the router the nodes that the API server has.
    pub async fn use_current(&self, nodes: Inventory) {
        let mut current = self.current.lock().await;
        update(self.router.clone(), nodes).await;
        if !std::mem::replace(&mut *current, true)
            && let Some(old_s) = self.age.seconds()
        {
            tracing::info!(old_s, "the nodes are those of the API server again");
        }
        self.age.0.set(0);
        self.ready();
    }

    /// Gives the router the ranges of Service addresses that the API server has.
    pub async fn use_ranges(&self, ranges: Vec<IpNet>) {
        let mut known = self.ranges.lock().await;
        update_services(self.router.clone(), ranges).await;
        *known = true;
    }

    /// The nodes in effect, else those of the file. Against these an API server that has none is not believed.
    pub async fn last_known(&self) -> Inventory {
        let known = self.router.snapshot().inventory().clone();
        if !known.is_empty() {
            return known;
        }
        let path = self.path.clone();
        // Why it cannot be read is for whoever uses it to say.
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        read.ok().and_then(Result::ok).flatten().map(|content| content.nodes).unwrap_or_default()
    }

    /// Uses the file if the API server does not say in time which nodes there are. `settings` gets the ports unless they are
    /// known, as `known` says.
    pub async fn use_file(
        self: Arc<Self>,
        known: watch::Receiver<Arc<Settings>>,
        settings: watch::Sender<Arc<Settings>>,
        stop: CancellationToken,
    ) {
        if stop.run_until_cancelled(tokio::time::sleep(GRACE)).await.is_none() || *self.current.lock().await {
            return;
        }
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        let content = match read.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(Some(content)) if !content.nodes.is_empty() => content,
            Ok(_) => return,
            Err(reason) => {
                let (file, reason) = (self.path.display(), printable(&reason, 200));
                tracing::warn!(%file, "the last known nodes cannot be used, and there are none until the API server answers: {reason}");
                return;
            }
        };
        let current = self.current.lock().await;
        if *current {
            return;
        }
        let ports = Arc::new(content.settings);
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = ports.clone();
        settings.send_if_modified(|now| {
            // The channel is closed when this server stops.
            let unknown = !known.has_changed().unwrap_or(true);
            if unknown {
                *now = ports;
            }
            unknown
        });
        let (nodes, at) = (content.nodes.len(), content.at);
        {
            // The API server may have said which ranges there are, and not which nodes.
            let ranges = self.ranges.lock().await;
            if !*ranges {
                update_services(self.router.clone(), content.services).await;
            }
        }
        update(self.router.clone(), content.nodes).await;
        self.age.0.set(at.max(1));
        self.ready();
        let old_s = self.age.seconds();
        tracing::warn!(
            nodes,
            old_s,
            "the API server does not say which nodes there are: those last known are in effect"
        );
    }

    fn ready(&self) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Writes what the API server says to the file, until stopped. Before it has said something the file stays as it is.
    pub async fn keep(
        self: Arc<Self>,
        mut nodes: watch::Receiver<Arc<Inventory>>,
        settings: watch::Receiver<Arc<Settings>>,
        health: Health,
        stop: CancellationToken,
    ) {
        if !matches!(stop.run_until_cancelled(nodes.changed()).await, Some(Ok(()))) {
            return;
        }
        let mut failures = LogOnce::default();
        let mut written: Option<(Content, Instant)> = None;
        let mut tick = tokio::time::interval(PERIOD);
        loop {
            // What changes while the file is written is in the next one, also when that is the last.
            let last = tokio::select! {
                _ = tick.tick() => false,
                () = stop.cancelled() => true,
            };
            let (saved, nodes, at) = (self.clone(), nodes.borrow().clone(), current_at(&health));
            let settings = settings.has_changed().unwrap_or(false).then(|| settings.borrow().clone());
            let before = written.take();
            let work = move || saved.write(&nodes, settings, at, before);
            match tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
            {
                Ok(content) => {
                    failures.clear();
                    written = Some(content);
                }
                Err(error) if failures.is_new(error.kind()) => {
                    let file = self.path.display();
                    tracing::warn!(%file, %error, "after a restart without the API server these nodes are not known");
                }
                Err(_) => {}
            }
            if last {
                return;
            }
        }
    }

    /// Unless the file has it already.
    fn write(
        &self,
        nodes: &Inventory,
        settings: Option<Arc<Settings>>,
        at: SystemTime,
        before: Option<(Content, Instant)>,
    ) -> io::Result<(Content, Instant)> {
        let settings =
            settings.unwrap_or_else(|| self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let content = Content {
            version: VERSION,
            at: seconds(at),
            nodes: nodes.clone(),
            services: self.router.services(),
            settings: (*settings).clone(),
        };
        if let Some((before, when)) = before
            && when.elapsed() < REFRESH
            && before.is_as(&content)
        {
            return Ok((before, when));
        }
        write_atomically(&self.path, &serde_json::to_vec(&content)?, PRIVATE_FILE)?;
        Ok((content, Instant::now()))
    }
}

/// None: there is no file.
fn read(path: &Path) -> Result<Option<Content>, String> {
    let text = match read_bounded(path, MAX_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("version {version} is not {VERSION}"));
    }
    serde_json::from_slice(&text).map(Some).map_err(|error| error.to_string())
}

/// When what is known was current: now, or when the watch of the nodes was lost.
fn current_at(health: &Health) -> SystemTime {
    let watches = health.report();
    let lost = watches.iter().find(|watch| watch.resource == "nodes" && !watch.synced);
    lost.map_or_else(SystemTime::now, |watch| watch.since.into())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

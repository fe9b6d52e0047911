//! The inventory file: read at the start, read again whenever it changes, the last good content kept.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tunnel_core::lifecycle::Shutdown;

use super::{Inventory, InventoryError, MAX_BYTES, Selector, parse};

/// A writer that does not rename needs a moment between its first and its last event.
const QUIET: Duration = Duration::from_millis(100);
/// Nobody's events put a reload off for longer.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// The file is also looked at this often: network file systems have no events, and watches are a limited resource.
const POLL: Duration = Duration::from_secs(10);

type Digest = [u8; 32];

/// What `status` shows of the source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The file's path, or `API server`.
    pub source: String,
    pub edge: usize,
    pub cloud: usize,
    /// Why the file's present content is not in effect.
    pub last_error: Option<String>,
}

/// A watched inventory file.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    selector: Selector,
    status: ArcSwap<SourceStatus>,
    /// Of the content in effect.
    digest: Mutex<Option<Digest>>,
    reloads: Family<[(&'static str, &'static str); 1], Counter>,
    nodes: Family<[(&'static str, &'static str); 1], Gauge>,
    in_effect: Gauge,
}

/// Tells whether a file may have changed without reading it.
#[derive(Debug, PartialEq, Eq)]
struct Fingerprint {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl FileSource {
    /// Reads the file for the first time. Metrics go into `registry`, which has the prefix `postern`.
    ///
    /// # Errors
    /// When it cannot be read or is wrong: there is no last good content yet.
    pub fn open(
        path: PathBuf,
        selector: Selector,
        registry: &mut Registry,
    ) -> Result<(Arc<Self>, Inventory), InventoryError> {
        let source = Self {
            status: ArcSwap::from_pointee(SourceStatus {
                source: path.display().to_string(),
                ..SourceStatus::default()
            }),
            path,
            selector,
            digest: Mutex::new(None),
            reloads: Family::default(),
            nodes: Family::default(),
            in_effect: Gauge::default(),
        };
        for outcome in ["loaded", "refused", "unreadable"] {
            drop(source.reloads.get_or_create(&[("outcome", outcome)]));
        }
        registry.register(
            "inventory_reloads",
            "Readings of the inventory, by outcome",
            source.reloads.clone(),
        );
        registry.register("inventory_nodes", "Nodes in the inventory, by role", source.nodes.clone());
        let help = "1 while the inventory file's present content is in effect, 0 while an older one is";
        registry.register("inventory_in_effect", help, source.in_effect.clone());
        let text = read(&source.path).map_err(|error| InventoryError::whole(error.to_string()))?;
        let inventory = parse(&text, &source.selector)?;
        source.loaded(digest(&text), Some(&inventory));
        Ok((Arc::new(source), inventory))
    }

    pub fn status(&self) -> Arc<SourceStatus> {
        self.status.load_full()
    }

    /// Reads the file again whenever it changes, until the drain, and hands on content that differs from what was
    /// last in effect.
    pub async fn run(self: Arc<Self>, apply: impl Fn(Inventory), shutdown: Shutdown) {
        // One place is enough: an event only says "look again".
        let (wake, mut events) = mpsc::channel(1);
        let mut watch = Watch::new(wake);
        let mut seen: Option<Option<Fingerprint>> = None;
        loop {
            // Before the reading, so that a change after it is an event; after each, since a symlink may lead elsewhere.
            watch.follow(&self.path);
            let fingerprint = fingerprint(&self.path);
            if seen.as_ref() != Some(&fingerprint) {
                seen = Some(fingerprint);
                if let Some(inventory) = self.reload().await {
                    apply(inventory);
                }
            }
            tokio::select! {
                () = shutdown.draining() => return,
                Some(()) = events.recv() => {
                    settle(&mut events).await;
                    // The same size within one tick of the clock looks the same: after an event the content decides.
                    seen = None;
                }
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    /// None when the content is the one in effect, or cannot be used.
    async fn reload(self: &Arc<Self>) -> Option<Inventory> {
        let source = Arc::clone(self);
        // A large file takes seconds to read, during which the runtime has other work.
        let read = tokio::task::spawn_blocking(move || {
            let text = read(&source.path).map_err(|error| ("unreadable", error.to_string()))?;
            let digest = digest(&text);
            if *source.lock() == Some(digest) {
                return Ok((digest, None));
            }
            let inventory = parse(&text, &source.selector).map_err(|error| ("refused", error.to_string()))?;
            Ok((digest, Some(inventory)))
        });
        match read.await {
            Ok(Ok((digest, inventory))) => {
                self.loaded(digest, inventory.as_ref());
                inventory
            }
            Ok(Err((outcome, reason))) => {
                self.failed(outcome, reason);
                None
            }
            Err(panicked) => {
                self.failed("refused", format!("the reader failed: {panicked}"));
                None
            }
        }
    }

    /// None for the content that was in effect already.
    fn loaded(&self, digest: Digest, inventory: Option<&Inventory>) {
        let before = self.status.load_full();
        let mut now = SourceStatus { last_error: None, ..(*before).clone() };
        if let Some(inventory) = inventory {
            (now.edge, now.cloud) = inventory.counts();
            self.reloads.get_or_create(&[("outcome", "loaded")]).inc();
            self.nodes.get_or_create(&[("role", "edge")]).set(now.edge as i64);
            self.nodes.get_or_create(&[("role", "cloud")]).set(now.cloud as i64);
        }
        if inventory.is_some() || before.last_error.is_some() {
            tracing::info!(file = %self.path.display(), edge = now.edge, cloud = now.cloud, "inventory in effect");
        }
        self.in_effect.set(1);
        self.status.store(Arc::new(now));
        *self.lock() = Some(digest);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Digest>> {
        self.digest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, outcome: &'static str, reason: String) {
        self.reloads.get_or_create(&[("outcome", outcome)]).inc();
        self.in_effect.set(0);
        let before = self.status.load_full();
        // Once per mistake, not once per look.
        if before.last_error.as_ref() != Some(&reason) {
            tracing::error!(file = %self.path.display(), "inventory not taken, the last good one stays: {reason}");
            self.status.store(Arc::new(SourceStatus { last_error: Some(reason), ..(*before).clone() }));
        }
    }
}

/// Waits until the writer seems to be done.
async fn settle(events: &mut mpsc::Receiver<()>) {
    let quiet = async { while let Ok(Some(())) = tokio::time::timeout(QUIET, events.recv()).await {} };
    // Either way it is time to read.
    let _ = tokio::time::timeout(LONGEST_WAIT, quiet).await;
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    file.take(MAX_BYTES as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn digest(text: &str) -> Digest {
    Sha256::digest(text).into()
}

fn fingerprint(path: &Path) -> Option<Fingerprint> {
    let metadata = std::fs::metadata(path).ok()?;
    Some(Fingerprint {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// Watches the directories whose entries decide what the path means: a rename into place and a ConfigMap's swap of
/// its `..data` link are events of a directory, not of the file.
struct Watch {
    watcher: Option<RecommendedWatcher>,
    directories: BTreeSet<PathBuf>,
}

impl Watch {
    fn new(wake: mpsc::Sender<()>) -> Self {
        let handler = move |event: notify::Result<notify::Event>| {
            // Reading the file is an access too, and must not lead to another reading.
            let read_only = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(kind)
                if !matches!(kind, notify::event::AccessKind::Close(notify::event::AccessMode::Write))));
            if !read_only {
                // Full means that a look is due anyway.
                let _ = wake.try_send(());
            }
        };
        let watcher = notify::recommended_watcher(handler)
            .inspect_err(
                |error| tracing::warn!(%error, "no file events; the inventory is looked at every 10 s"),
            )
            .ok();
        Self { watcher, directories: BTreeSet::new() }
    }

    /// Errors are not fatal: the poll remains.
    fn follow(&mut self, path: &Path) {
        let Some(watcher) = &mut self.watcher else { return };
        let wanted = directories(path);
        for gone in self.directories.difference(&wanted) {
            if let Err(error) = watcher.unwatch(gone) {
                tracing::debug!(directory = %gone.display(), %error, "unwatching");
            }
        }
        self.directories = wanted
            .into_iter()
            .filter(|directory| {
                self.directories.contains(directory)
                    || watcher
                        .watch(directory, RecursiveMode::NonRecursive)
                        .inspect_err(
                            |error| tracing::debug!(directory = %directory.display(), %error, "watching"),
                        )
                        .is_ok()
            })
            .collect();
    }
}

/// The directory of the path, of what it links to, and so on.
fn directories(path: &Path) -> BTreeSet<PathBuf> {
    /// As many links as Linux itself follows (path_resolution(7)).
    const MAX_LINKS: usize = 40;
    let mut directories = BTreeSet::new();
    let mut current = path.to_owned();
    for _ in 0..MAX_LINKS {
        let parent =
            current.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        directories.insert(parent.to_owned());
        // Kubernetes: nodes.yaml -> ..data/nodes.yaml, and ..data -> ..2024_01_01. The link that is swapped may be the
        // parent, so that is followed too.
        if let Ok(target) = std::fs::read_link(parent) {
            let above = parent.parent().unwrap_or(Path::new("/"));
            directories.insert(above.to_owned());
            directories.insert(above.join(target));
        }
        match std::fs::read_link(&current) {
            Ok(target) => current = parent.join(target),
            Err(_) => break,
        }
    }
    directories
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    use tokio::sync::watch;
    use tokio::time::timeout;

    const DEADLINE: Duration = Duration::from_secs(30);

    fn nodes(names: &[&str]) -> String {
        let mut text = "kind: List\nitems:\n".to_owned();
        for name in names {
            text += &format!(
                "- metadata: {{name: {name}, labels: {{node-role.kubernetes.io/edge: ''}}}}\n  status: {{addresses: \
                 [{{type: InternalIP, address: 10.0.0.1}}]}}\n"
            );
        }
        text
    }

    struct Running {
        source: Arc<FileSource>,
        seen: watch::Receiver<Vec<String>>,
        shutdown: Shutdown,
        task: tokio::task::JoinHandle<()>,
        registry: Registry,
    }

    impl Running {
        fn start(path: &Path) -> Self {
            let mut registry = Registry::default();
            let (source, first) =
                FileSource::open(path.to_owned(), Selector::default(), &mut registry).unwrap();
            let names =
                |inventory: Inventory| inventory.nodes.iter().map(|node| node.name.to_string()).collect();
            let (publish, seen) = watch::channel::<Vec<String>>(names(first));
            let shutdown = Shutdown::new();
            let apply = move |inventory| drop(publish.send_replace(names(inventory)));
            let task = tokio::spawn(Arc::clone(&source).run(apply, shutdown.clone()));
            Self { source, seen, shutdown, task, registry }
        }

        async fn sees(&mut self, names: &[&str]) {
            let arrived = self.seen.wait_for(|seen| seen == names);
            timeout(DEADLINE, arrived).await.unwrap_or_else(|_| panic!("never saw {names:?}")).unwrap();
        }

        async fn fails_with(&self, part: &str) {
            let failing = async {
                while !self.source.status().last_error.as_deref().is_some_and(|error| error.contains(part)) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(DEADLINE, failing).await.unwrap_or_else(|_| panic!("{:?}", self.source.status()));
        }

        fn metrics(&self) -> String {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
            text
        }

        async fn stop(self) {
            self.shutdown.begin();
            timeout(DEADLINE, self.task).await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn follows_writes_and_renames_and_keeps_the_last_good_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodes.yaml");
        fs::write(&path, nodes(&["edge-1"])).unwrap();
        let mut running = Running::start(&path);
        running.sees(&["edge-1"]).await;

        fs::write(&path, nodes(&["edge-1", "edge-2"])).unwrap();
        running.sees(&["edge-1", "edge-2"]).await;

        let new = directory.path().join("new");
        fs::write(&new, nodes(&["edge-3"])).unwrap();
        fs::rename(&new, &path).unwrap();
        running.sees(&["edge-3"]).await;

        fs::write(&path, "kind: List\nitems:\n- metadata: {name: Edge_4}\n").unwrap();
        running.fails_with("line 3: items[0].metadata.name: ").await;
        assert_eq!(running.source.status().edge, 1, "the last good one stays");
        assert!(running.metrics().contains("inventory_in_effect 0\n"));

        fs::remove_file(&path).unwrap();
        running.fails_with("No such file").await;
        assert_eq!(*running.seen.borrow(), ["edge-3"]);

        fs::write(&path, nodes(&["edge-5"])).unwrap();
        running.sees(&["edge-5"]).await;
        assert_eq!(running.source.status().last_error, None);
        let metrics = running.metrics();
        assert!(metrics.contains("inventory_in_effect 1\n"), "{metrics}");
        assert!(metrics.contains("inventory_nodes{role=\"edge\"} 1\n"), "{metrics}");
        running.stop().await;
    }

    #[tokio::test]
    async fn follows_a_config_maps_swap() {
        let volume = tempfile::tempdir().unwrap();
        let at = |name: &str| volume.path().join(name);
        fs::create_dir(at("..1")).unwrap();
        fs::write(at("..1/nodes.yaml"), nodes(&["edge-1"])).unwrap();
        symlink("..1", at("..data")).unwrap();
        symlink("..data/nodes.yaml", at("nodes.yaml")).unwrap();
        // The flag may name the mount through a link of its own.
        let elsewhere = tempfile::tempdir().unwrap();
        let path = elsewhere.path().join("inventory");
        symlink(at("nodes.yaml"), &path).unwrap();
        let mut running = Running::start(&path);
        running.sees(&["edge-1"]).await;

        for round in 2..5 {
            let (old, new) = (format!("..{}", round - 1), format!("..{round}"));
            let name = format!("edge-{round}");
            fs::create_dir(at(&new)).unwrap();
            fs::write(at(&new).join("nodes.yaml"), nodes(&[&name])).unwrap();
            symlink(&new, at("..data_tmp")).unwrap();
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
            fs::remove_dir_all(at(&old)).unwrap();
            running.sees(&[&name]).await;
        }
        running.stop().await;
    }

    #[test]
    fn the_first_reading_must_succeed() {
        let directory = tempfile::tempdir().unwrap();
        let open = |path: PathBuf| {
            FileSource::open(path, Selector::default(), &mut Registry::default()).unwrap_err().to_string()
        };
        assert_eq!(open(directory.path().join("none")), "No such file or directory (os error 2)");
        assert_eq!(open(directory.path().to_owned()), "it is not a regular file");
        let path = directory.path().join("binary");
        fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert_eq!(open(path), "stream did not contain valid UTF-8");
    }
}

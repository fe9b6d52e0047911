//! The inventory file: read at the start and whenever it changes; the last good content stays in effect.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use nix::fcntl::OFlag;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tunnel_core::lifecycle::Shutdown;

use super::file_watch::FileWatch;
use super::{Inventory, InventoryError, MAX_BYTES, Selector, parse};

/// The file is also checked this often: network file systems have no events, and watches are a limited resource.
const POLL: Duration = Duration::from_secs(10);

/// The outcome of a reading that did not get the file's text.
const UNREADABLE: &str = "unreadable";

type Digest = [u8; 32];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The file's path, or `API server`.
    pub source: String,
    pub edge: usize,
    pub cloud: usize,
    /// Why the file's present content is not in effect. In a cluster: what the server cannot follow now, which need not be
    /// the nodes, and why.
    pub last_error: Option<String>,
    /// In a cluster: the API server has not answered since the start, and the nodes are those of the state directory, which
    /// were current so many seconds ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_s: Option<u64>,
}

#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    selector: Selector,
    /// Whether a file without nodes takes effect.
    allow_empty: bool,
    status: ArcSwap<SourceStatus>,
    /// The content in effect.
    digest: Mutex<Option<Digest>>,
    reloads: Family<[(&'static str, &'static str); 1], Counter>,
    nodes: Family<[(&'static str, &'static str); 1], Gauge>,
    in_effect: Gauge,
}

/// Differs after most changes of a file, without reading it.
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
    /// It cannot be read or is invalid: there is no last good content yet.
    pub fn open(
        path: PathBuf,
        selector: Selector,
        allow_empty: bool,
        registry: &mut Registry,
    ) -> Result<(Arc<Self>, Inventory), InventoryError> {
        let source = Self {
            status: ArcSwap::from_pointee(SourceStatus {
                source: path.display().to_string(),
                ..SourceStatus::default()
            }),
            path,
            selector,
            allow_empty,
            digest: Mutex::new(None),
            reloads: Family::default(),
            nodes: Family::default(),
            in_effect: Gauge::default(),
        };
        for outcome in ["loaded", "refused", UNREADABLE] {
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
        let inventory = source.parse(&text)?;
        source.loaded(digest(&text), Some(&inventory));
        Ok((Arc::new(source), inventory))
    }

    pub fn status(&self) -> Arc<SourceStatus> {
        self.status.load_full()
    }

    /// Reads the file again whenever it changes, until the drain, and passes content that differs from that in effect to
    /// `apply`.
    pub async fn run<F: Future<Output = ()>>(
        self: Arc<Self>,
        apply: impl Fn(Inventory) -> F,
        shutdown: Shutdown,
    ) {
        let mut watch = FileWatch::new("inventory");
        let mut seen: Option<Option<Fingerprint>> = None;
        loop {
            // Before the reading, so that a later change is an event; each time, since symlinks may point elsewhere now.
            watch.follow(&self.path);
            let fingerprint = fingerprint(&self.path);
            if seen.as_ref() != Some(&fingerprint) {
                let exists = fingerprint.is_some();
                seen = Some(fingerprint);
                match self.reload().await {
                    Ok(Some(inventory)) => apply(inventory).await,
                    // What fails may be the reading and not the file, as when there are too many open files.
                    Err(UNREADABLE) if exists => seen = None,
                    Ok(None) | Err(_) => {}
                }
            }
            tokio::select! {
                () = shutdown.draining() => return,
                Some(()) = watch.event() => {
                    watch.settle().await;
                    // A change of the same size within one tick of the clock has the same fingerprint: read it anyway.
                    seen = None;
                }
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    /// None when the content is the one in effect.
    ///
    /// # Errors
    /// The outcome of a reading whose content cannot be used.
    async fn reload(self: &Arc<Self>) -> Result<Option<Inventory>, &'static str> {
        let source = Arc::clone(self);
        // A large file takes seconds to read, which would block the runtime.
        let read = tokio::task::spawn_blocking(move || {
            let text = read(&source.path).map_err(|error| (UNREADABLE, error.to_string()))?;
            let digest = digest(&text);
            if *source.lock() == Some(digest) {
                return Ok((digest, None));
            }
            let inventory = source.parse(&text).map_err(|error| ("refused", error.to_string()))?;
            Ok((digest, Some(inventory)))
        });
        let (outcome, reason) = match read.await {
            Ok(Ok((digest, inventory))) => {
                self.loaded(digest, inventory.as_ref());
                return Ok(inventory);
            }
            Ok(Err(failed)) => failed,
            Err(panicked) => ("refused", format!("the reader failed: {panicked}")),
        };
        self.failed(outcome, reason);
        Err(outcome)
    }

    /// A file without nodes is more likely its writer's mistake than a cluster that vanished at once.
    fn parse(&self, text: &str) -> Result<Inventory, InventoryError> {
        let inventory = parse(text, &self.selector)?;
        if inventory.is_empty() && !self.allow_empty {
            return Err(InventoryError::whole(
                "it lists no node; if that is meant, start with --allow-empty-inventory",
            ));
        }
        Ok(inventory)
    }

    /// `inventory` is None for content that was in effect already.
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
        // Once per mistake, not once per reading.
        if before.last_error.as_ref() != Some(&reason) {
            tracing::error!(file = %self.path.display(), "the inventory is not usable, the last good one stays in effect: {reason}");
            self.status.store(Arc::new(SourceStatus { last_error: Some(reason), ..(*before).clone() }));
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    let regular = |metadata: &fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is not a regular file")),
    };
    regular(&fs::metadata(path)?)?;
    // Opening must not block on what was put there meanwhile, as it does on a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    regular(&file.metadata()?)?;
    let mut text = String::new();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

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
                FileSource::open(path.to_owned(), Selector::default(), false, &mut registry).unwrap();
            let names = |inventory: Inventory| inventory.iter().map(|node| node.name.to_string()).collect();
            let (publish, seen) = watch::channel::<Vec<String>>(names(first));
            let shutdown = Shutdown::new();
            let apply = move |inventory| {
                publish.send_replace(names(inventory));
                std::future::ready(())
            };
            let task = tokio::spawn(Arc::clone(&source).run(apply, shutdown.clone()));
            Self { source, seen, shutdown, task, registry }
        }

        async fn sees(&mut self, names: &[&str]) {
            let arrived = self.seen.wait_for(|seen| seen == names);
            timeout(DEADLINE, arrived)
                .await
                .unwrap_or_else(|_| panic!("{names:?} never took effect"))
                .unwrap();
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
    async fn what_is_not_a_list_of_nodes_is_refused_at_once_and_a_good_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodes.yaml");
        let put_back = |names: &[&str]| {
            let new = directory.path().join("new");
            fs::write(&new, nodes(names)).unwrap();
            fs::rename(&new, &path).unwrap();
        };
        put_back(&["edge-1"]);
        let mut running = Running::start(&path);
        running.sees(&["edge-1"]).await;
        let replaced: [(&str, &dyn Fn()); 5] = [
            ("it is not a regular file", &|| mkfifo(&path, Mode::S_IRWXU).unwrap()),
            ("it is not a regular file", &|| drop(UnixListener::bind(&path).unwrap())),
            ("it is not a regular file", &|| symlink("/dev/zero", &path).unwrap()),
            ("it lists no node", &|| fs::write(&path, "kind: List\nitems: []\n").unwrap()),
            ("items: missing or null", &|| fs::write(&path, "kind: List\n").unwrap()),
        ];
        for (round, (error, replace)) in replaced.into_iter().enumerate() {
            fs::remove_file(&path).unwrap();
            replace();
            running.fails_with(error).await;
            assert_eq!(running.source.status().edge, 1, "the last good one stays");
            let name = format!("edge-{}", round + 2);
            put_back(&[&name]);
            running.sees(&[&name]).await;
        }
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        running.fails_with("it is not a regular file").await;
        running.stop().await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_read_is_read_again_although_it_has_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nodes.yaml");
        fs::write(&path, nodes(&["edge-1"])).unwrap();
        let running = Running::start(&path);
        // Before the task has begun to watch: there is no event.
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let third = async {
            while !running.metrics().contains("inventory_reloads_total{outcome=\"unreadable\"} 3\n") {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        timeout(POLL * 10, third).await.unwrap_or_else(|_| panic!("{}", running.metrics()));
        running.stop().await;
    }

    #[tokio::test]
    async fn follows_the_swap_of_a_config_map() {
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
    fn an_unreadable_file_fails_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let open = |path: PathBuf| {
            let opened = FileSource::open(path, Selector::default(), false, &mut Registry::default());
            opened.unwrap_err().to_string()
        };
        let fifo = directory.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        assert_eq!(open(fifo), "it is not a regular file");
        let empty = directory.path().join("empty");
        fs::write(&empty, "kind: List\nitems: []\n").unwrap();
        let error = "it lists no node; if that is meant, start with --allow-empty-inventory";
        assert_eq!(open(empty.clone()), error);
        let opened = FileSource::open(empty, Selector::default(), true, &mut Registry::default());
        assert_eq!(opened.unwrap().1, Inventory::default());
        assert_eq!(open(directory.path().join("none")), "No such file or directory (os error 2)");
        assert_eq!(open(directory.path().to_owned()), "it is not a regular file");
        let path = directory.path().join("binary");
        fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert_eq!(open(path), "stream did not contain valid UTF-8");
    }
}

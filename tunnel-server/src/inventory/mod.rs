//! Reads the inventory file.

use std::path::Path;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use tunnel_routing::inventory::{Inventory, MAX_BYTES, Selector, parse};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::gauges::registered;
use tunnel_runtime::reloaded::{FileMetrics, NamedFile, ReloadedFile};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The file's path, or `API server`.
    pub source: String,
    pub edge: usize,
    pub cloud: usize,
    /// Reason why the file's present content is not in effect. In a cluster: the resources that cannot be followed at
    /// present, not necessarily the nodes, and the reason.
    pub last_error: Option<String>,
    /// Set in a cluster if the API server has not answered since the start: age in seconds of the nodes in effect,
    /// which are those of the state directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_s: Option<u64>,
}

/// Metric of the number of nodes in effect.
#[derive(Clone, Debug, Default)]
pub struct NodeCount(Family<[(&'static str, &'static str); 1], Gauge>);

impl NodeCount {
    /// Registers the metric in `registry`, which has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        Self(registered(registry, "inventory_nodes", "Nodes in the inventory, by role"))
    }

    pub fn set(&self, inventory: &Inventory) {
        let (edge, cloud) = inventory.counts();
        for (role, count) in [("edge", edge), ("cloud", cloud)] {
            self.0.get_or_create(&[("role", role)]).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}

/// Reads the inventory file for the first time. An empty list of nodes takes effect only with `allow_empty`: it is more
/// likely a mistake of its writer than a cluster that vanished at once.
///
/// # Errors
/// If it cannot be read or is invalid: there is no last good content yet.
pub(crate) fn open(
    path: &Path,
    selector: Selector,
    allow_empty: bool,
    metrics: &FileMetrics,
) -> Result<(ReloadedFile<Inventory>, Inventory), ConfigError> {
    let file = NamedFile::new("--inventory", path).at_most(MAX_BYTES as u64);
    let parse = move |text: &str| {
        let inventory = parse(text, &selector).map_err(|error| error.to_string())?;
        if inventory.is_empty() && !allow_empty {
            let reason = "it lists no node; if that is meant, start with --allow-empty-inventory";
            return Err(reason.to_owned());
        }
        Ok(inventory)
    };
    ReloadedFile::open_one("inventory", file, parse, metrics)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::time::Duration;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use tokio::sync::watch;
    use tokio::time::timeout;
    use tokio_util::sync::CancellationToken;

    use tunnel_runtime::reloaded::Problem;

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
        problem: Problem,
        seen: watch::Receiver<Vec<String>>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
        registry: Registry,
    }

    impl Running {
        fn start(path: &Path) -> Self {
            let mut registry = Registry::default();
            let metrics = FileMetrics::register(&mut registry);
            let (file, first) = open(path, Selector::default(), false, &metrics).unwrap();
            let names = |inventory: Inventory| inventory.iter().map(|node| node.name.to_string()).collect();
            let (publish, seen) = watch::channel::<Vec<String>>(names(first));
            let (problem, stop) = (file.problem(), CancellationToken::new());
            let apply = move |inventory| {
                publish.send_replace(names(inventory));
                std::future::ready(Ok(()))
            };
            let task = tokio::spawn(file.run(apply, stop.clone()));
            Self { problem, seen, stop, task, registry }
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
                while !self.problem.get().is_some_and(|problem| problem.reason.contains(part)) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(DEADLINE, failing).await.unwrap_or_else(|_| panic!("{:?}", self.problem));
        }

        fn metrics(&self) -> String {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
            text
        }

        async fn stop(self) {
            self.stop.cancel();
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
        assert_eq!(*running.seen.borrow(), ["edge-3"], "the last good one stays");
        assert!(running.metrics().contains("file_in_effect{file=\"inventory\"} 0\n"));

        fs::remove_file(&path).unwrap();
        running.fails_with("No such file").await;
        assert_eq!(*running.seen.borrow(), ["edge-3"]);

        fs::write(&path, nodes(&["edge-5"])).unwrap();
        running.sees(&["edge-5"]).await;
        let in_effect = async {
            while running.problem.get().is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, in_effect).await.unwrap_or_else(|_| panic!("{:?}", running.problem));
        let metrics = running.metrics();
        assert!(metrics.contains("file_in_effect{file=\"inventory\"} 1\n"), "{metrics}");
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
            assert_eq!(running.seen.borrow().len(), 1, "the last good one stays");
            let name = format!("edge-{}", round + 2);
            put_back(&[&name]);
            running.sees(&[&name]).await;
        }
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        running.fails_with("it is not a regular file").await;
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
        // The flag may name the mount through another link.
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
        let reason = |path: PathBuf| {
            open(&path, Selector::default(), false, &FileMetrics::default()).map(drop).unwrap_err().reason
        };
        let fifo = directory.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        assert_eq!(reason(fifo), "it is not a regular file");
        let empty = directory.path().join("empty");
        fs::write(&empty, "kind: List\nitems: []\n").unwrap();
        let error = "it lists no node; if that is meant, start with --allow-empty-inventory";
        assert_eq!(reason(empty.clone()), error);
        let opened = open(&empty, Selector::default(), true, &FileMetrics::default());
        assert_eq!(opened.unwrap().1, Inventory::default());
        assert_eq!(reason(directory.path().join("none")), "No such file or directory (os error 2)");
        assert_eq!(reason(directory.path().to_owned()), "it is not a regular file");
        let path = directory.path().join("binary");
        fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert_eq!(reason(path), "stream did not contain valid UTF-8");
    }
}

//! Applies the state reported by the API server: nodes, Service address ranges and ports. At a start, the state saved
//! in the state directory is in effect until the API server answers.
//!
//! The saved state is used for the routes and the agents' ports only: nothing is written to the cluster because of it,
//! and no agent is refused.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::inventory::Inventory;
use tunnel_routing::{Router, update, update_services};
use tunnel_runtime::lifecycle::ReadyGuard;

use super::cache::{Age, ClusterCache, Content};
use super::read::nodes::DEBOUNCE;
use crate::inventory::NodeCount;
use crate::pki::KnownNodes;
use crate::runtime::settings::Settings;

/// Time for the API server to answer before the state directory is used.
const GRACE: Duration = Duration::from_secs(3);
/// Maximum time that a start waits for the ports of the ConfigMap. They matter less than the nodes: a server that may
/// not read them still serves all other ports.
const PORTS_WAIT: Duration = Duration::from_secs(10);
/// Interval at which the cache's timestamp is stored without any change, so that it is nearly right after a crash.
const REFRESH: Duration = Duration::from_secs(600);

/// State reported by the API server; each part is unknown before its first change.
#[derive(Clone)]
pub struct Said {
    pub nodes: watch::Receiver<Arc<Inventory>>,
    pub ranges: watch::Receiver<Vec<IpNet>>,
    pub ports: watch::Receiver<Arc<Settings>>,
}

pub struct Apply {
    pub said: Said,
    pub router: Arc<Router>,
    /// Receives the ports.
    pub settings: watch::Sender<Arc<Settings>>,
    /// Receives the nodes of the API server.
    pub known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub count: NodeCount,
    pub cache: ClusterCache,
    pub age: Age,
    /// Health of the node watch.
    pub health: Health,
    /// Released once nodes are known.
    pub nodes_known: Option<ReadyGuard>,
    /// Released once the ports are known, or the wait for them is over.
    pub ports_known: Option<ReadyGuard>,
}

/// Waits until the nodes and ports that the API server has reported by now are in effect.
pub(super) async fn applied(
    said: Said,
    mut known: watch::Receiver<Option<Arc<KnownNodes>>>,
    mut settings: watch::Receiver<Arc<Settings>>,
) {
    // Changes of the last moment are not published yet.
    sleep(DEBOUNCE).await;
    let Said { nodes, ports, .. } = said;
    // An error means that the channel is closed: this server is stopping.
    if nodes.has_changed().is_ok_and(|reported| reported) {
        let same = |used: &Arc<KnownNodes>| Arc::ptr_eq(used, &nodes.borrow());
        let _ = known.wait_for(|known| known.as_ref().is_some_and(same)).await;
    }
    if ports.has_changed().is_ok_and(|reported| reported) {
        let _ = settings.wait_for(|used| Arc::ptr_eq(used, &ports.borrow())).await;
    }
}

impl Apply {
    /// Runs until `stop`, and keeps the cache up to date.
    pub async fn run(mut self, stop: CancellationToken) {
        let (changed, changes) = watch::channel(0);
        let (nodes, settings, health) =
            (self.said.nodes.clone(), self.settings.subscribe(), self.health.clone());
        let unread = settings.borrow().clone();
        let saved = self.cache.load().await;
        let of_last_start = saved.as_ref().map(|content| Arc::new(content.settings.clone()));
        let kept = of_last_start.clone();
        // Until the ConfigMap is read, the file keeps those that it has.
        let settings = move || {
            let used = settings.borrow().clone();
            kept.clone().filter(|_| Arc::ptr_eq(&used, &unread)).unwrap_or(used)
        };
        let keep =
            self.cache.clone().keep(changes, nodes, settings, self.router.clone(), health, stop.clone());
        tokio::join!(keep, stop.run_until_cancelled(self.follow(changed, saved, of_last_start)));
    }

    /// Increments `changed` with each change that has to be saved in the cache.
    async fn follow(
        &mut self,
        changed: watch::Sender<u64>,
        mut saved: Option<Content>,
        of_last_start: Option<Arc<Settings>>,
    ) {
        let (mut grace, mut patience) = (pin!(sleep(GRACE)), pin!(sleep(PORTS_WAIT)));
        let (mut grace_over, mut ranges_known, mut current) = (false, false, false);
        loop {
            tokio::select! {
                Ok(()) = self.said.nodes.changed() => {
                    self.use_nodes().await;
                    (grace_over, current, saved) = (true, true, None);
                }
                Ok(()) = self.said.ranges.changed() => {
                    let ranges = self.said.ranges.borrow_and_update().clone();
                    update_services(self.router.clone(), ranges).await;
                    ranges_known = true;
                }
                Ok(()) = self.said.ports.changed() => {
                    let ports = self.said.ports.borrow_and_update().clone();
                    self.use_ports(ports);
                }
                () = &mut grace, if !grace_over => {
                    self.use_saved(saved.take(), ranges_known).await;
                    grace_over = true;
                }
                () = &mut patience, if self.ports_known.is_some() => {
                    let (seconds, saved) = (PORTS_WAIT.as_secs(), of_last_start.is_some());
                    tracing::warn!(seconds, saved, "ConfigMap not read in time, serving with the ports of the last run if there are any");
                    if let Some(ports) = &of_last_start {
                        self.use_ports(ports.clone());
                    }
                    self.ports_known.take();
                }
                () = sleep(REFRESH), if current => {}
                else => return,
            }
            // The cache stays as it is until the API server has reported the nodes.
            if current {
                changed.send_modify(|changes| *changes += 1);
            }
        }
    }

    async fn use_nodes(&mut self) {
        let nodes = self.said.nodes.borrow_and_update().clone();
        self.count.set(&nodes);
        update(self.router.clone(), Inventory::clone(&nodes)).await;
        self.known_nodes.send_replace(Some(nodes));
        if let Some(age_s) = self.age.seconds() {
            tracing::info!(age_s, "API server available again, using its nodes");
        }
        self.age.set_current();
        self.nodes_known.take();
    }

    fn use_ports(&mut self, ports: Arc<Settings>) {
        self.router.set_ports(&ports.tunnelled, &ports.loopback);
        self.settings.send_replace(ports);
        self.ports_known.take();
    }

    async fn use_saved(&mut self, saved: Option<Content>, ranges_known: bool) {
        let Some(content) = saved.filter(|content| !content.nodes.is_empty()) else {
            return;
        };
        // An error means that the channel is closed: this server is stopping.
        let unknown = |changed: Result<bool, _>| changed.is_ok_and(|changed| !changed);
        if !unknown(self.said.nodes.has_changed()) {
            return;
        }
        if self.ports_known.is_some() && unknown(self.said.ports.has_changed()) {
            self.use_ports(Arc::new(content.settings));
        }
        // The API server may have reported the ranges and not yet the nodes.
        if !ranges_known && unknown(self.said.ranges.has_changed()) {
            update_services(self.router.clone(), content.services).await;
        }
        let nodes = content.nodes.len();
        update(self.router.clone(), content.nodes).await;
        self.age.set(content.at);
        self.nodes_known.take();
        let age_s = self.age.seconds();
        tracing::warn!(nodes, age_s, "API server unavailable, using the nodes of the state directory");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use prometheus_client::registry::Registry;
    use tunnel_routing::RouterConfig;
    use tunnel_routing::inventory::InventoryNode;
    use tunnel_runtime::lifecycle::Readiness;

    use super::*;

    fn router() -> Arc<Router> {
        let config = RouterConfig::new(
            "198.18.0.0/15".parse().unwrap(),
            "fd9e:706f:7374:6572::/64".parse().unwrap(),
            [10250],
        );
        Arc::new(Router::new(config, &mut Registry::default()))
    }

    /// The inputs and outputs of an [`Apply`].
    struct Parts {
        nodes: watch::Sender<Arc<Inventory>>,
        ports: watch::Sender<Arc<Settings>>,
        _ranges: watch::Sender<Vec<IpNet>>,
        said: Said,
        known: watch::Receiver<Option<Arc<KnownNodes>>>,
        settings: watch::Receiver<Arc<Settings>>,
        router: Arc<Router>,
        age: Age,
        readiness: Readiness,
        stop: CancellationToken,
    }

    fn start(state_dir: &Path) -> Parts {
        let (router, age, readiness) = (router(), Age::default(), Readiness::default());
        let (nodes, nodes_said) = watch::channel(Arc::default());
        let (_ranges, ranges) = watch::channel(Vec::new());
        let (ports, ports_said) = watch::channel(Arc::default());
        let stop = CancellationToken::new();
        let (known_nodes, settings) = (watch::Sender::default(), watch::Sender::default());
        let said = Said { nodes: nodes_said, ranges, ports: ports_said };
        let (known, used) = (known_nodes.subscribe(), settings.subscribe());
        let apply = Apply {
            said: said.clone(),
            router: router.clone(),
            settings,
            known_nodes,
            count: NodeCount::default(),
            cache: ClusterCache::new(state_dir),
            age: age.clone(),
            health: Health::default(),
            nodes_known: None,
            ports_known: Some(readiness.pending("ports")),
        };
        tokio::spawn(apply.run(stop.clone()));
        Parts { nodes, ports, _ranges, said, known, settings: used, router, age, readiness, stop }
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_waits_for_the_ports_but_not_for_ever() {
        for told in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let parts = start(directory.path());
            sleep(PORTS_WAIT / 2).await;
            assert!(!parts.readiness.is_ready());
            if told {
                let ports = Settings { tunnelled: [9100].into(), ..Settings::default() };
                parts.ports.send_replace(Arc::new(ports));
            }
            sleep(if told { PORTS_WAIT / 4 } else { PORTS_WAIT }).await;
            assert!(parts.readiness.is_ready());
            assert!(parts.router.tunnels(10250));
            assert_eq!(parts.router.tunnels(9100), told);
            parts.stop.cancel();
        }
    }

    /// Its list may be forbidden, or late.
    #[tokio::test(start_paused = true)]
    async fn ports_of_a_config_map_that_cannot_be_read_stay() {
        let directory = tempfile::tempdir().unwrap();
        let node =
            Arc::new([InventoryNode::new("edge-1".parse().unwrap())].into_iter().collect::<Inventory>());
        for told in [true, false, false] {
            let parts = start(directory.path());
            parts.nodes.send_replace(node.clone());
            if told {
                let ports = Settings { tunnelled: [9100].into(), ..Settings::default() };
                parts.ports.send_replace(Arc::new(ports));
            }
            // The cache file is written meanwhile.
            sleep(PORTS_WAIT + GRACE).await;
            assert!(parts.readiness.is_ready() && parts.router.tunnels(9100));
            parts.stop.cancel();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_api_server_reports_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let parts = start(directory.path());
        let settled = || applied(parts.said.clone(), parts.known.clone(), parts.settings.clone());
        settled().await;
        for name in ["edge-1", "edge-2"] {
            let node = InventoryNode::new(name.parse().unwrap());
            parts.nodes.send_replace(Arc::new([node].into_iter().collect()));
            settled().await;
            assert!(parts.router.snapshot().inventory().get(name).is_some(), "{name}");
        }
        let ports = Settings { tunnelled: [9100].into(), ..Settings::default() };
        parts.ports.send_replace(Arc::new(ports));
        settled().await;
        assert!(parts.router.tunnels(9100));
        parts.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn the_file_is_used_only_where_the_api_server_does_not_answer() {
        let directory = tempfile::tempdir().unwrap();
        let node = |name: &str| {
            Arc::new([InventoryNode::new(name.parse().unwrap())].into_iter().collect::<Inventory>())
        };
        for (answers, expected) in [(true, "edge-1"), (false, "edge-1"), (true, "edge-2")] {
            let parts = start(directory.path());
            if answers {
                parts.nodes.send_replace(node(expected));
            }
            // The cache file is written meanwhile.
            sleep(2 * GRACE).await;
            let inventory = parts.router.snapshot().inventory().clone();
            assert!(inventory.get(expected).is_some() && inventory.len() == 1, "{inventory:?}");
            assert_eq!(parts.age.seconds().is_none(), answers);
            parts.stop.cancel();
        }
    }
}

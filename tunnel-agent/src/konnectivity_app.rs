//! Assembles the agent for konnectivity's servers: [`build`] does everything that can fail at start, [`Bound::run`]
//! serves until stopped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tunnel_core::admin::{Admin, Serving, register_process_metrics, register_tasks, to_json};
use tunnel_core::config::ConfigError;
use tunnel_core::konnectivity::Room;
use tunnel_core::lifecycle::{Readiness, Shutdown};
use tunnel_core::limits::register_limits;
use tunnel_core::logging;

use crate::addresses::NodeAddresses;
use crate::config::Config;
use crate::dial::Dialler;
use crate::konnectivity::{
    KonnectivityConfig, KonnectivityMetrics, LOOKUPS, Set, Shared, client_config, first_number,
};
use crate::metrics::Metrics;
use crate::places::Places;
use crate::policy::Policy;
use crate::status::AgentStatus;

/// Maximum time for resets to reach targets and servers after the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// An agent that answers on the admin address, but has not connected to any server yet.
pub struct Bound {
    set: Arc<Set>,
    /// Starts the drain, or ends everything.
    own: Shutdown,
    drain_timeout: Duration,
    _addresses: NodeAddresses,
    _admin: Option<Serving>,
}

/// Obtains everything that an agent needs.
///
/// # Errors
/// Those that only the operator can fix: files and the admin address.
pub async fn build(
    config: Config,
    servers: KonnectivityConfig,
    log: logging::Handle,
) -> anyhow::Result<Bound> {
    let places = Places::of_process();
    check_files(&servers)?;
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    register_tasks(postern, vec![Handle::current()]);
    register_limits(postern);
    let metrics = Metrics::new(&mut registry);
    let own_metrics = KonnectivityMetrics::register(&mut registry);
    let readiness = Readiness::new();

    let (_servers, known) = watch::channel(Arc::new(vec![servers.server.clone()]));
    let addresses = NodeAddresses::start(config.given.node_ip, known).await;
    let pods = Arc::<ArcSwap<Vec<IpNet>>>::default();
    let policy = Policy::new(config.given.targets.allow.clone(), addresses.shared(), pods)
        .with_admin(config.given.admin_address);
    let own = Shutdown::new();
    let shared = Shared {
        config: servers,
        reach: config.reach.clone(),
        node: config.node_name.clone(),
        addresses: addresses.shared(),
        dialler: Dialler::new(Arc::new(policy), places),
        lookups: Semaphore::new(LOOKUPS),
        numbers: first_number(),
        room: Arc::new(Room::of_process()),
        metrics,
        own_metrics,
        draining: own.draining_token().clone(),
        forced: own.forced_token().clone(),
    };
    let set = Set::new(Arc::new(shared), readiness.clone());
    let flags = config.flags.clone();
    let (started, shown) = (Instant::now(), set.clone());
    let (node, rules) = (config.node_name.clone(), config.given.targets.allow.clone());
    let admin = Admin {
        registry: Arc::new(registry),
        readiness,
        connections: None,
        status: Arc::new(move || {
            let status = AgentStatus::new(&node, started, Vec::new(), None, &rules, &[]);
            to_json(&status.at_konnectivity(shown.status()))
        }),
        flags: flags.into(),
        bench: None,
        pages: &[],
        log,
    };
    let admin = match config.given.admin_address {
        Some(address) => Some(admin.bind("--admin-address", address)?.serve()?),
        None => None,
    };
    Ok(Bound { set, own, drain_timeout: config.given.drain_timeout, _addresses: addresses, _admin: admin })
}

/// Reads the files once, so that an agent does not start without them.
fn check_files(servers: &KonnectivityConfig) -> Result<(), ConfigError> {
    let files = "--konnectivity-ca, --konnectivity-cert and --konnectivity-key";
    client_config(servers).map_err(|reason| ConfigError::without_value(files, reason))?;
    let Some(token) = &servers.token_file else { return Ok(()) };
    match std::fs::metadata(token) {
        Ok(_) => Ok(()),
        Err(error) => {
            let value = token.display().to_string();
            Err(ConfigError::new("--konnectivity-token-file", value, error.to_string()))
        }
    }
}

impl Bound {
    /// Keeps the streams with the servers until `shutdown`, then drains.
    pub async fn run(self, shutdown: Shutdown) {
        let mut running = tokio::spawn(self.set.clone().run());
        shutdown.draining().await;
        self.own.begin();
        let drained = tokio::select! {
            _ = &mut running => "complete",
            () = tokio::time::sleep(self.drain_timeout) => "the drain timeout was up",
            () = shutdown.forced() => "ended immediately",
        };
        self.own.force();
        if !running.is_finished() {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, &mut running).await;
        }
        tracing::info!(drained, "stopped");
    }
}

//! Puts the agent together: [`build`] does everything that can fail at start, [`Bound::run`] serves until stopped.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tunnel_core::admin::{Admin, Serving, register_process_metrics, register_tasks};
use tunnel_core::carry::register_stalled;
use tunnel_core::config::ConfigError;
use tunnel_core::lifecycle::{Readiness, ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::logging;

use crate::addresses::NodeAddresses;
use crate::config::Config;
use crate::identity::{
    CsrEnrolment, EnrollConfig, EnrollError, IdentityKeeper, IdentityMetrics, Pace, Recovery,
    ensure_identity, recover,
};
use crate::kube::{ApiServer, KubeError, node};
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::reach::Reach;
use crate::servers::Servers;
use crate::session::{Attached, EpochSource, LinkMetrics, LinkSet, Shared, install_bundles};
use crate::status::StatusSource;

/// Trust bundles that may wait to be installed.
const BUNDLES: usize = 16;
/// How long the servers may take to read the resets of what the drain has cut.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// An agent that has its identity and answers on the admin address, and has not connected to any server yet.
pub struct Bound {
    config: Config,
    metrics: Metrics,
    link_metrics: LinkMetrics,
    status: Arc<StatusSource>,
    attaching: ReadyGuard,
    /// None: standalone.
    api: Option<Arc<ApiServer>>,
    servers: Arc<Servers>,
    _finding: AbortOnDropHandle<()>,
    identity: Identity,
    addresses: NodeAddresses,
    /// The ranges of this node's pods.
    pods: Arc<ArcSwap<Vec<IpNet>>>,
    reach: Reach,
    epochs: EpochSource,
    _admin: Option<Serving>,
}

/// Obtains everything that an agent needs. May be dropped at any time; takes as long as the enrolment does.
///
/// # Errors
/// What only the operator can fix: files, the admin address, the kubeconfig, or a refused enrolment.
pub async fn build(config: Config, log: logging::Handle) -> anyhow::Result<Bound> {
    raise_open_files();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    register_tasks(postern, vec![Handle::current()]);
    register_stalled(postern);
    let metrics = Metrics::new(&mut registry);
    let identity_metrics = IdentityMetrics::register(&mut registry);
    let link_metrics = LinkMetrics::register(&mut registry);
    let readiness = Readiness::new();
    let (enrolling, attaching) = (readiness.pending("certificate"), readiness.pending("a server"));

    let api = open_api_server(&config).await?;
    let pods = Arc::<ArcSwap<Vec<IpNet>>>::default();
    let status = Arc::new(StatusSource::new(&config, pods.clone()));
    // Before the enrolment, which may take long: an operator wants to see what it waits for.
    let admin = Admin {
        registry: Arc::new(registry),
        readiness: readiness.clone(),
        status: status.clone().into_endpoint(),
        log,
    };
    let admin = match config.admin_address {
        Some(address) => Some(admin.bind("--admin-address", address)?.serve()?),
        None => None,
    };

    let reach = Reach::new(config.proxy.clone(), config.congestion.clone());
    if let Some(proxy) = &config.proxy {
        tracing::info!(%proxy, "servers are reached through an HTTP proxy, but for those in NO_PROXY");
    }
    let servers = Arc::new(Servers::new(&config, api.as_ref()));
    status.set_servers(servers.clone());
    let finding = servers.ready_once_known(readiness.pending("API server"));
    let identity = Identity::obtain(&config, reach.clone(), api.as_ref(), &servers, identity_metrics).await?;
    enrolling.ready();

    let addresses = NodeAddresses::start(config.node_ip, servers.known()).await;
    let epochs = EpochSource::open(config.state_dir.join("epoch"));
    Ok(Bound {
        config,
        metrics,
        link_metrics,
        status,
        attaching,
        api,
        servers,
        _finding: finding,
        identity,
        addresses,
        pods,
        reach,
        epochs,
        _admin: admin,
    })
}

impl Bound {
    /// Keeps sessions with the servers until `shutdown`, then drains.
    pub async fn run(self, shutdown: Shutdown) {
        let (bundles, announced) = mpsc::channel(BUNDLES);
        let policy =
            Policy::new(self.config.allow_targets.clone(), self.addresses.shared(), self.pods.clone());
        let shared = Arc::new(Shared {
            node: self.config.node_name.clone(),
            reach: self.reach.clone(),
            epochs: self.epochs,
            policy: Arc::new(policy),
            addresses: self.addresses.subscribe(),
            bundles,
            attached: Attached::default(),
            max_links: self.config.max_links,
            keepalive: self.config.keepalive,
            metrics: self.metrics,
            draining: shutdown.draining_token().clone(),
            forced: shutdown.forced_token().clone(),
        });
        let Identity { keeper, enrolment } = self.identity;
        let tasks = TaskTracker::new();
        let links = LinkSet::new(shared, keeper.subscribe(), tasks.clone());
        self.status.set_running(links.clone(), keeper.clone());
        self.link_metrics.show(links.clone());
        links.set(&self.servers.known().borrow());

        // These end with this function, not with the drain.
        let mut background = JoinSet::new();
        background.spawn(install_bundles(keeper.clone(), self.reach, announced));
        background.spawn(links.clone().ready_once_attached(self.attaching));
        background.spawn(links.clone().follow(self.servers.known()));
        background.spawn(keeper.clone().follow_servers(self.servers.known()));
        if let Some(enrolment) = enrolment {
            background.spawn(recover(enrolment, keeper, move || links.refused()));
        }
        // Pods count only for the default policy.
        if let Some(api) = self.api.filter(|_| self.config.allow_targets.is_empty()) {
            let (node, state_dir) = (self.config.node_name.clone(), self.config.state_dir.clone());
            background.spawn(node::follow(api, node, self.pods, state_dir));
        }

        shutdown.draining().await;
        drain(&tasks, &shutdown, self.config.drain_timeout).await;
    }
}

async fn drain(tasks: &TaskTracker, shutdown: &Shutdown, timeout: Duration) {
    tasks.close();
    let drained = tokio::select! {
        () = tasks.wait() => "complete",
        () = tokio::time::sleep(timeout) => "the drain timeout was up",
        () = shutdown.forced() => "ended immediately",
    };
    shutdown.force();
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, tasks.wait()).await;
    tracing::info!(drained, "stopped");
}

/// What keeps the certificate valid.
struct Identity {
    keeper: Arc<IdentityKeeper>,
    /// In a cluster.
    enrolment: Option<Arc<CsrEnrolment>>,
}

impl Identity {
    async fn obtain(
        config: &Config,
        reach: Reach,
        api: Option<&Arc<ApiServer>>,
        servers: &Servers,
        metrics: IdentityMetrics,
    ) -> Result<Self, EnrollError> {
        let (node, state_dir) = (config.node_name.clone(), config.state_dir.clone());
        let enroll = EnrollConfig {
            servers: servers.known().borrow().iter().map(ToString::to_string).collect(),
            node: node.clone(),
            state_dir: state_dir.clone(),
            token: config.token.clone(),
            ca_hash: config.ca_hash.clone(),
            reach,
        };
        let enrolment =
            api.map(|api| Arc::new(CsrEnrolment::new(api.clone(), node, state_dir, Pace::default())));
        let (identity, recovery) = match &enrolment {
            Some(enrolment) => (enrolment.ensure_identity().await?, Recovery::ApiServer),
            None => (ensure_identity(&enroll).await?, Recovery::Token),
        };
        let keeper = IdentityKeeper::with_recovery(enroll, identity, metrics, recovery);
        Ok(Self { keeper: Arc::new(keeper), enrolment })
    }
}

/// An unusable kubeconfig is a configuration error.
async fn open_api_server(config: &Config) -> Result<Option<Arc<ApiServer>>, ConfigError> {
    let Some(options) = config.kube.clone() else { return Ok(None) };
    ApiServer::open(options).await.map(Some).map_err(|error| match error {
        KubeError::Kubeconfig { path, reason } => {
            ConfigError::new("--kubeconfig", path.display().to_string(), reason)
        }
        other => ConfigError::without_value("--kubeconfig", other.to_string()),
    })
}

//! Assembles the agent: [`build`] does everything that can fail at start, [`Bound::run`] serves until stopped.

use std::net::SocketAddr;
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
use tunnel_core::carry::{end_quiet, register_stalled};
use tunnel_core::config::ConfigError;
use tunnel_core::identity::Holder;
use tunnel_core::lifecycle::{Drain, Drained, Readiness, ReadyGuard, Shutdown};
use tunnel_core::limits::register_limits;
use tunnel_core::logging;
use tunnel_core::takeover::Copies;
use tunnel_kube::ClientSettings;

use crate::addresses::NodeAddresses;
use crate::config::{Config, WhenReplaced};
use crate::connections::{self, Connection};
use crate::identity::{
    CsrEnrolment, EnrollConfig, EnrollError, IdentityKeeper, IdentityMetrics, Pace, Recovery,
    ensure_identity, install_bundles, recover,
};
use crate::kube::{ApiServer, KubeError, node};
use crate::metrics::Metrics;
use crate::outbound::{self, BoundListeners, Outbound};
use crate::places::Places;
use crate::policy::Policy;
use crate::servers::Servers;
use crate::session::{
    Attached, BenchPolicy, EpochSource, Handover, LinkSet, Resumed, Shared, register_links,
};
use crate::status::StatusSource;
use crate::takeover::{Predecessor, Succession, take_over};

/// Maximum trust bundles waiting to be installed.
const BUNDLES: usize = 16;
/// Maximum time for servers to read the resets of connections that the drain has cut.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Name of the admin port among the listening sockets that a successor gets.
const ADMIN: &str = "admin";

/// An agent that has its identity and answers on the admin address, but has not connected to any server yet.
pub struct Bound {
    config: Config,
    places: Places,
    metrics: Metrics,
    status: Arc<StatusSource>,
    attaching: ReadyGuard,
    /// None when standalone.
    api: Option<Arc<ApiServer>>,
    servers: Arc<Servers>,
    _finding: AbortOnDropHandle<()>,
    identity: Identity,
    addresses: NodeAddresses,
    /// Address ranges of this node's pods.
    pods: Arc<ArcSwap<Vec<IpNet>>>,
    outbound: BoundListeners,
    epochs: EpochSource,
    handover: Handover,
    /// The agent to take over from, and the guard that holds back readiness until then.
    before: Option<(Predecessor, ReadyGuard)>,
    succession: Arc<Succession>,
    _succeeding: AbortOnDropHandle<()>,
    admin: Option<Serving>,
}

/// Obtains everything that an agent needs. May be dropped at any time; takes as long as the enrolment does.
///
/// Another agent may take over meanwhile. `shutdown` then begins if that is configured.
///
/// # Errors
/// Those that only the operator can fix: files, the admin address, the kubeconfig, or a refused enrolment.
pub async fn build(config: Config, log: logging::Handle, shutdown: &Shutdown) -> anyhow::Result<Bound> {
    let places = Places::of_process();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    register_tasks(postern, vec![Handle::current()]);
    register_stalled(postern);
    register_limits(postern);
    let metrics = Metrics::new(&mut registry);
    let identity_metrics = IdentityMetrics::register(&mut registry, Holder::Agent);
    let readiness = Readiness::new();
    let (enrolling, attaching) = (readiness.pending("certificate"), readiness.pending("a server"));

    let api = open_api_server(&config).await?;
    let pods = Arc::<ArcSwap<Vec<IpNet>>>::default();
    let status = Arc::new(StatusSource::new(&config, pods.clone()));
    let links = status.clone();
    register_links(&mut registry, move || links.links());
    // Started before the enrolment, which may take long: an operator wants to see why it waits.
    let admin = Admin {
        registry: Arc::new(registry),
        readiness: readiness.clone(),
        status: status.clone().into_endpoint(),
        connections: Some(connections::endpoint(metrics.live.clone(), config.node_name.clone())),
        flags: config.flags.clone().into(),
        bench: None,
        pages: &[],
        log,
    };
    let mut before = Predecessor::find(&config.given.state_dir).await;
    let (mut copies, mut serving) = (Vec::new(), None);
    if let Some(address) = config.given.admin_address {
        let taken = before.as_mut().and_then(|before| before.listener(ADMIN, |at| at == address));
        let bound = match taken {
            Some(listener) => admin.at(listener)?,
            None => admin.bind("--admin-address", address)?,
        };
        copies.push((ADMIN.to_owned(), bound.address(), bound.copy()?));
        serving = Some(bound.serve()?);
    }
    let replaces = before.is_some();
    let taken = |address: SocketAddr| before.as_mut()?.listener(outbound::NAME, |at| at == address);
    let outbound = outbound::bind(&config.outbound, replaces, taken).await?;
    for (listen, listener) in &outbound {
        if let Some(listener) = listener {
            copies.push((outbound::NAME.to_owned(), listen.address, outbound::copy(listener)?));
        }
    }
    let handover = Handover::default();
    handover.set_successor(replaces);
    let ends = (config.when_replaced == WhenReplaced::Exit).then(|| shutdown.clone());
    let accepting = serving.as_ref().map(Serving::accepting);
    let succession =
        Succession::new(&config.given.state_dir, Copies::new(copies), accepting, handover.clone(), ends);
    let succession = Arc::new(succession);
    let succeeding = AbortOnDropHandle::new(tokio::spawn(succession.clone().run()));
    if before.is_none() {
        succession.open();
    }
    let before = before.map(|before| (before, readiness.pending("taking over")));

    if let Some(proxy) = config.reach.proxy() {
        tracing::info!(%proxy, "servers are reached through an HTTP proxy, but for those in NO_PROXY");
    }
    let servers = Arc::new(Servers::new(&config, api.as_ref()));
    status.set_servers(servers.clone());
    let finding = servers.ready_once_known(readiness.pending("API server"));
    let identity = Identity::obtain(&config, api.as_ref(), &servers, identity_metrics).await?;
    enrolling.ready();

    let addresses = NodeAddresses::start(config.given.node_ip, servers.known()).await;
    let epochs = EpochSource::open(config.given.state_dir.join("epoch"));
    Ok(Bound {
        config,
        places,
        metrics,
        status,
        attaching,
        api,
        servers,
        _finding: finding,
        identity,
        addresses,
        pods,
        outbound,
        epochs,
        handover,
        before,
        succession,
        _succeeding: succeeding,
        admin: serving,
    })
}

impl Bound {
    /// Keeps sessions with the servers until `shutdown`, or until another agent has taken over, then drains.
    pub async fn run(self, shutdown: Shutdown) {
        let (own, resumed) = (Shutdown::new(), Resumed::default());
        let live = self.metrics.live.clone();
        let (bundles, announced) = mpsc::channel(BUNDLES);
        let policy =
            Policy::new(self.config.given.targets.allow.clone(), self.addresses.shared(), self.pods.clone())
                .with_admin(self.config.given.admin_address);
        let shared = Arc::new(Shared {
            node: self.config.node_name.clone(),
            reach: self.config.reach.clone(),
            epochs: self.epochs,
            policy: Arc::new(policy),
            places: self.places,
            addresses: self.addresses.subscribe(),
            bundles,
            attached: Attached::default(),
            handover: self.handover.clone(),
            resumed: resumed.clone(),
            spread: self.config.given.links.max_servers,
            max_links: self.config.given.links.max_links,
            keepalive: self.config.given.links.keepalive,
            bench: BenchPolicy::new(self.config.given.links.bench),
            metrics: self.metrics,
            draining: own.draining_token().clone(),
            forced: own.forced_token().clone(),
        });
        let Identity { keeper, enrolment } = self.identity;
        let tasks = TaskTracker::new();
        let links = LinkSet::new(shared.clone(), keeper.subscribe(), tasks.clone());
        let servers = self.servers.known();
        let outbound = Outbound::new(shared, links.clone(), keeper.subscribe(), servers, tasks.clone());
        self.status.set_running(links.clone(), keeper.clone());
        self.succession.set_running(links.clone(), keeper.clone());
        links.set(&self.servers.known().borrow());

        // These tasks end with this function, not with the drain.
        let mut background = JoinSet::new();
        for (listen, listener) in self.outbound {
            let (outbound, succession) = (outbound.clone(), self.succession.clone());
            let draining = own.draining_token().clone();
            background.spawn(async move {
                // The previous agent accepts until then.
                succession.opened().await;
                let listener = match listener {
                    Some(listener) => listener,
                    None => {
                        let late = draining.run_until_cancelled(outbound::listen_late(&listen)).await;
                        let Some(listener) = late else { return };
                        if let Ok(copy) = outbound::copy(&listener) {
                            succession.add(outbound::NAME, listen.address, copy);
                        }
                        listener
                    }
                };
                outbound.serve(listen, listener).await;
            });
        }
        if let Some((before, pending)) = self.before {
            let (links, handover, succession) =
                (links.clone(), self.handover.clone(), self.succession.clone());
            background.spawn(take_over(before, links, handover, succession, pending));
        }
        background.spawn(async move { match resumed.watch().await {} });
        background.spawn(connections::end_lost(live.clone(), self.addresses.subscribe()));
        let (stop, forced) = (own.clone(), shutdown.clone());
        background.spawn(async move {
            forced.forced().await;
            stop.force();
        });
        background.spawn(install_bundles(keeper.clone(), self.config.reach, announced));
        background.spawn(links.clone().ready_once_attached(self.attaching));
        background.spawn(links.clone().follow(self.servers.known()));
        background.spawn(keeper.clone().follow_servers(self.servers.known()));
        if let Some(enrolment) = enrolment {
            background.spawn(recover(enrolment, keeper, move || links.refused()));
        }
        if let Some(api) = self.api.filter(|_| self.config.given.targets.pods) {
            let (node, state_dir) = (self.config.node_name.clone(), self.config.given.state_dir.clone());
            background.spawn(node::follow(api, node, self.pods, state_dir));
        }

        shutdown.draining().await;
        let timeout = self.config.given.drain_timeout;
        tokio::select! {
            // A successor that is still taking over does not have all sessions yet. Connections for the others would
            // fail.
            _ = tokio::time::timeout(timeout, self.handover.settled()) => {}
            () = shutdown.forced() => {}
        }
        own.begin();
        self.succession.close();
        if self.handover.has_passed() {
            // If the successor dies, the next agent must be able to listen there while this one drains.
            drop(self.admin);
        }
        let ending = async {
            tokio::join!(end_quiet(&live, Connection::carrying), outbound.end_quiet());
        };
        drain(&tasks, &own, timeout, ending).await;
    }
}

async fn drain(
    tasks: &TaskTracker,
    shutdown: &Shutdown,
    timeout: Duration,
    ending: impl Future<Output = ()>,
) {
    let drained = match Drain::of(tasks.clone(), shutdown.clone()).finish(timeout, ending).await {
        Drained::Complete => "complete",
        Drained::TimedOut { .. } => "the drain timeout was up",
        Drained::Forced { .. } => "ended immediately",
    };
    shutdown.force();
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, tasks.wait()).await;
    tracing::info!(drained, "stopped");
}

/// Keeps the certificate valid.
struct Identity {
    keeper: Arc<IdentityKeeper>,
    /// None when standalone.
    enrolment: Option<Arc<CsrEnrolment>>,
}

impl Identity {
    async fn obtain(
        config: &Config,
        api: Option<&Arc<ApiServer>>,
        servers: &Servers,
        metrics: IdentityMetrics,
    ) -> Result<Self, EnrollError> {
        let (node, state_dir) = (config.node_name.clone(), config.given.state_dir.clone());
        let enroll = EnrollConfig {
            servers: servers.known().borrow().iter().map(ToString::to_string).collect(),
            holder: Holder::Agent,
            node: node.clone(),
            state_dir: state_dir.clone(),
            token: config.token.clone(),
            ca_hash: config.ca_hash.clone(),
            reach: config.reach.clone(),
        };
        let enrolment = api.map(|api| {
            Arc::new(CsrEnrolment::new(api.clone(), (Holder::Agent, node), state_dir, Pace::default()))
        });
        let (identity, recovery) = match &enrolment {
            Some(enrolment) => (enrolment.ensure_identity().await?, Recovery::ApiServer),
            None => (ensure_identity(&enroll).await?, Recovery::Token),
        };
        let keeper = IdentityKeeper::with_recovery(enroll, identity, metrics, recovery);
        Ok(Self { keeper: Arc::new(keeper), enrolment })
    }
}

/// Opens the API server if one is configured. An unusable kubeconfig is a configuration error.
async fn open_api_server(config: &Config) -> Result<Option<Arc<ApiServer>>, ConfigError> {
    let Some(options) = config.kube.clone() else { return Ok(None) };
    let opened = ApiServer::open(options.kubeconfig, options.namespace, ClientSettings::AGENT).await;
    opened.map(Some).map_err(|error| match error {
        KubeError::Kubeconfig { path, reason } => {
            ConfigError::new("--kubeconfig", path.display().to_string(), reason)
        }
        other => ConfigError::without_value("--kubeconfig", other.to_string()),
    })
}

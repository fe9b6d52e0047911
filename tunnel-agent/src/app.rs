//! Builds everything, runs until told to stop, and stops in order.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use arc_swap::ArcSwap;
use ipnet::IpNet;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tunnel_core::admin::{Admin, register_process_metrics};
use tunnel_core::config::{ConfigError, HostPort};
use tunnel_core::identity::{ALPN_GRPC, agent_tls};
use tunnel_core::lifecycle::{Readiness, ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::logging;

use crate::addresses::NodeAddresses;
use crate::config::Config;
use crate::enroll::{EnrollConfig, IdentityKeeper, IdentityMetrics, Recovery, ensure_identity};
use crate::kube::csr::{CsrEnrolment, Pace, recover};
use crate::kube::discover::Discovery;
use crate::kube::{ApiServer, KubeError, node};
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::session::{Announced, Attached, EpochSource, Links, Shared, present_chain};
use crate::status::{AgentStatus, CertificateStatus};

/// Trust bundles that may wait to be installed.
const BUNDLES: usize = 16;

/// Runs the agent until `shutdown`.
///
/// # Errors
/// What keeps it from starting: files, the admin address, or an identity that only the operator can mend.
pub async fn run(config: Config, log: logging::Handle, shutdown: Shutdown) -> anyhow::Result<()> {
    raise_open_files();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let metrics = Metrics::new(&mut registry);
    let identity_metrics = IdentityMetrics::register(&mut registry);
    let readiness = Readiness::new();
    let enrolling = readiness.pending("certificate");
    let attaching = readiness.pending("a server");
    let observed = Observed::default();
    let api = match config.kube.clone() {
        Some(options) => Some(ApiServer::open(options).await.map_err(kube_config_error)?),
        None => None,
    };
    let pods = Arc::<ArcSwap<Vec<IpNet>>>::default();

    // Before the enrolment, which may take long: an operator wants to see what it waits for.
    let admin = match config.admin_address {
        Some(address) => {
            let admin = Admin {
                registry: Arc::new(registry),
                readiness: readiness.clone(),
                status: observed.clone().report(&config, pods.clone()),
                log,
            };
            Some(admin.bind("--admin-address", address)?.serve()?)
        }
        None => None,
    };
    let servers = Servers::of(&config, api.as_ref());
    observed.servers(&servers);
    let looking = {
        let (looking, mut known) = (readiness.pending("API server"), servers.known());
        AbortOnDropHandle::new(tokio::spawn(async move {
            if known.wait_for(|servers| !servers.is_empty()).await.is_ok() {
                looking.ready();
            }
        }))
    };
    let enroll = EnrollConfig {
        servers: texts(&servers.known().borrow()),
        node: config.node_name.clone(),
        state_dir: config.state_dir.clone(),
        token: config.token.clone(),
        ca_hash: config.ca_hash.clone(),
    };
    let by_csr = api.clone().map(|api| {
        let (node, state_dir) = (config.node_name.clone(), config.state_dir.clone());
        Arc::new(CsrEnrolment::new(api, node, state_dir, Pace::default()))
    });
    let identity = async {
        match &by_csr {
            Some(by_csr) => by_csr.ensure_identity().await,
            None => ensure_identity(&enroll).await,
        }
    };
    let identity = tokio::select! {
        identity = identity => identity?,
        () = shutdown.draining() => return Ok(()),
    };
    let recovery = if by_csr.is_some() { Recovery::ApiServer } else { Recovery::Token };
    let keeper = Arc::new(IdentityKeeper::with_recovery(enroll, identity, identity_metrics, recovery));
    enrolling.ready();

    let addresses = NodeAddresses::start(config.node_ip, servers.known()).await;
    let epochs = EpochSource::open(config.state_dir.join("epoch")).context("session numbers")?;
    let (bundles, announced) = mpsc::channel(BUNDLES);
    let shared = Arc::new(Shared {
        node: config.node_name.clone(),
        epochs,
        policy: Arc::new(Policy::new(config.allow_targets.clone(), addresses.shared(), pods.clone())),
        addresses: addresses.subscribe(),
        bundles,
        attached: Attached::default(),
        metrics,
        draining: shutdown.draining_token().clone(),
        forced: shutdown.forced_token().clone(),
    });
    let tasks = TaskTracker::new();
    let links = Links::new(shared, keeper.subscribe(), tasks.clone());
    observed.running(links.clone(), keeper.clone());
    links.set(&servers.known().borrow());
    // What ends with this function, not with the drain.
    let mut background = tokio::task::JoinSet::new();
    background.spawn(install_bundles(keeper.clone(), announced));
    background.spawn(ready_once_attached(links.clone(), attaching));
    background.spawn({
        let (links, known) = (links.clone(), servers.known());
        async move { links.follow(known).await }
    });
    background.spawn(renew_at(keeper.clone(), servers.known()));
    if let Some(by_csr) = by_csr {
        background.spawn(recover(by_csr, keeper, links));
    }
    // Pods count only for the default policy.
    if let Some(api) = api.filter(|_| config.allow_targets.is_empty()) {
        background.spawn(node::follow(api, config.node_name.clone(), pods, config.state_dir.clone()));
    }

    shutdown.draining().await;
    tasks.close();
    let drained = tokio::select! {
        () = tasks.wait() => "complete",
        () = tokio::time::sleep(config.drain_timeout) => "the drain timeout was up",
        () = shutdown.forced() => "ended at once",
    };
    shutdown.force();
    // What was cut is told to the servers before the process ends.
    let _ = tokio::time::timeout(Duration::from_secs(3), tasks.wait()).await;
    tracing::info!(drained, "stopped");
    drop((addresses, servers, looking, background, admin));
    Ok(())
}

async fn install_bundles(keeper: Arc<IdentityKeeper>, mut announced: mpsc::Receiver<Announced>) {
    while let Some(announced) = announced.recv().await {
        match install_bundle(&keeper, &announced).await {
            Ok(true) => {
                tracing::info!(server = announced.server, "trusting the roots that the server announced");
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(
                    server = announced.server,
                    error = format!("{error:#}"),
                    "the roots that the server announced are refused; the present ones stay"
                );
            }
        }
    }
}

/// Roots are taken only if the server that announces them could still be verified by them. A session may be older than
/// the server's certificate, so what the server shows at present counts too.
async fn install_bundle(keeper: &IdentityKeeper, announced: &Announced) -> anyhow::Result<bool> {
    if let Ok(installed) = keeper.install_bundle(&announced.bundle, &announced.server_chain).await {
        return Ok(installed);
    }
    let tls = agent_tls(&keeper.current(), ALPN_GRPC)?;
    let chain =
        present_chain(&announced.server, tls).await.context("looking at the server's present certificate")?;
    Ok(keeper.install_bundle(&announced.bundle, &chain).await?)
}

/// Ready when the first server has attached. Later losses show in the status and the metrics: restarting an agent
/// because its servers are away would help nobody.
async fn ready_once_attached(links: Arc<Links>, attaching: ReadyGuard) {
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    while !links.attached() {
        tick.tick().await;
    }
    attaching.ready();
}

/// The certificate is renewed at whatever servers there are.
async fn renew_at(keeper: Arc<IdentityKeeper>, mut servers: watch::Receiver<Arc<Vec<HostPort>>>) {
    loop {
        let known = texts(&servers.borrow_and_update());
        if !known.is_empty() {
            keeper.set_servers(known);
        }
        if servers.changed().await.is_err() {
            return;
        }
    }
}

fn texts(servers: &[HostPort]) -> Vec<String> {
    servers.iter().map(ToString::to_string).collect()
}

/// A kubeconfig that does not do is bad configuration, whoever reads it.
fn kube_config_error(error: KubeError) -> anyhow::Error {
    let error = match error {
        KubeError::Kubeconfig { path, reason } => {
            ConfigError::new("--kubeconfig", path.display().to_string(), reason)
        }
        other => ConfigError::without_value("--kubeconfig", other.to_string()),
    };
    error.into()
}

/// Where the servers are: given, or found.
enum Servers {
    Given(watch::Sender<Arc<Vec<HostPort>>>),
    Found(Arc<Discovery>),
}

impl Servers {
    fn of(config: &Config, api: Option<&Arc<ApiServer>>) -> Self {
        match api {
            Some(api) if config.servers.is_empty() => {
                Self::Found(Arc::new(Discovery::start(api.clone(), &config.state_dir)))
            }
            _ => Self::Given(watch::Sender::new(Arc::new(config.servers.clone()))),
        }
    }

    fn known(&self) -> watch::Receiver<Arc<Vec<HostPort>>> {
        match self {
            Self::Given(servers) => servers.subscribe(),
            Self::Found(discovery) => discovery.servers(),
        }
    }
}

/// What `/status` shows, filled in as the start goes on.
#[derive(Clone, Default)]
struct Observed {
    discovery: Arc<OnceLock<Arc<Discovery>>>,
    running: Arc<OnceLock<Running>>,
}

struct Running {
    links: Arc<Links>,
    keeper: Arc<IdentityKeeper>,
}

impl Observed {
    // Each is set once, by `run`.
    fn servers(&self, servers: &Servers) {
        if let Servers::Found(discovery) = servers {
            let _ = self.discovery.set(discovery.clone());
        }
    }

    fn running(&self, links: Arc<Links>, keeper: Arc<IdentityKeeper>) {
        let _ = self.running.set(Running { links, keeper });
    }

    fn report(self, config: &Config, pods: Arc<ArcSwap<Vec<IpNet>>>) -> Arc<tunnel_core::admin::Status> {
        let (node, rules) = (config.node_name.clone(), config.allow_targets.clone());
        let started = SystemTime::now();
        Arc::new(move || {
            let running = self.running.get();
            let links = running.map(|running| running.links.status());
            let certificate = running.map(|running| CertificateStatus::of(&running.keeper.current()));
            let mut status = AgentStatus::new(
                &node,
                started,
                links.unwrap_or_default(),
                certificate,
                &rules,
                &pods.load(),
            );
            status.api_server_error = self.discovery.get().and_then(|discovery| discovery.trouble());
            serde_json::to_value(status)
                .unwrap_or_else(|error| serde_json::json!({ "error": error.to_string() }))
        })
    }
}

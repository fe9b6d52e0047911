//! Builds everything, runs until told to stop, and stops in order.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tunnel_core::admin::{Admin, register_process_metrics};
use tunnel_core::identity::{ALPN_GRPC, agent_tls};
use tunnel_core::lifecycle::{Readiness, ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::logging;

use crate::addresses::NodeAddresses;
use crate::config::Config;
use crate::enroll::{EnrollConfig, IdentityKeeper, IdentityMetrics, ensure_identity};
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::session::{Announced, Attached, EpochSource, LinkLoop, Shared, present_chain};
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

    // Before the enrolment, which may take long: an operator wants to see what it waits for.
    let admin = match config.admin_address {
        Some(address) => {
            let admin = Admin {
                registry: Arc::new(registry),
                readiness: readiness.clone(),
                status: observed.clone().report(&config),
                log,
            };
            Some(admin.bind("--admin-address", address)?.serve()?)
        }
        None => None,
    };
    let servers: Vec<String> = config.servers.iter().map(ToString::to_string).collect();
    let enroll = EnrollConfig {
        servers: servers.clone(),
        node: config.node_name.clone(),
        state_dir: config.state_dir.clone(),
        token: config.token.clone(),
        ca_hash: config.ca_hash.clone(),
    };
    let identity = tokio::select! {
        identity = ensure_identity(&enroll) => identity?,
        () = shutdown.draining() => return Ok(()),
    };
    let keeper = Arc::new(IdentityKeeper::start(enroll, identity, identity_metrics));
    enrolling.ready();

    let addresses = NodeAddresses::start(config.node_ip, config.servers.clone()).await;
    let epochs = EpochSource::open(config.state_dir.join("epoch")).context("session numbers")?;
    let (bundles, announced) = mpsc::channel(BUNDLES);
    let shared = Arc::new(Shared {
        node: config.node_name.clone(),
        epochs,
        policy: Arc::new(Policy::new(config.allow_targets.clone(), addresses.shared(), Arc::default())),
        addresses: addresses.subscribe(),
        bundles,
        attached: Attached::default(),
        metrics,
        draining: shutdown.draining_token().clone(),
        forced: shutdown.forced_token().clone(),
    });
    let links: Vec<_> = servers.iter().map(|server| LinkLoop::new(shared.clone(), server.clone())).collect();
    observed.set(links.clone(), keeper.clone());
    let tasks = TaskTracker::new();
    for link in &links {
        tasks.spawn(link.clone().run(keeper.subscribe()));
    }
    let installing = AbortOnDropHandle::new(tokio::spawn(install_bundles(keeper.clone(), announced)));
    let ready = AbortOnDropHandle::new(tokio::spawn(ready_once_attached(links, attaching)));
    tasks.close();

    shutdown.draining().await;
    let drained = tokio::select! {
        () = tasks.wait() => "complete",
        () = tokio::time::sleep(config.drain_timeout) => "the drain timeout was up",
        () = shutdown.forced() => "ended at once",
    };
    shutdown.force();
    // What was cut is told to the servers before the process ends.
    let _ = tokio::time::timeout(Duration::from_secs(3), tasks.wait()).await;
    tracing::info!(drained, "stopped");
    drop((addresses, installing, ready, admin));
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
async fn ready_once_attached(links: Vec<Arc<LinkLoop>>, attaching: ReadyGuard) {
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    while !links.iter().any(|link| link.attached()) {
        tick.tick().await;
    }
    attaching.ready();
}

/// What `/status` shows, filled in as the start goes on.
#[derive(Clone, Default)]
struct Observed(Arc<OnceLock<Running>>);

struct Running {
    links: Vec<Arc<LinkLoop>>,
    keeper: Arc<IdentityKeeper>,
}

impl Observed {
    fn set(&self, links: Vec<Arc<LinkLoop>>, keeper: Arc<IdentityKeeper>) {
        // Set once, by `run`.
        let _ = self.0.set(Running { links, keeper });
    }

    fn report(self, config: &Config) -> Arc<tunnel_core::admin::Status> {
        let (node, policy) = (config.node_name.clone(), config.allow_targets.clone());
        let started = SystemTime::now();
        Arc::new(move || {
            let running = self.0.get();
            let links = running.map(|running| running.links.iter().map(|link| link.status()).collect());
            let certificate = running.map(|running| CertificateStatus::of(&running.keeper.current()));
            let status = AgentStatus::new(&node, started, links.unwrap_or_default(), certificate, &policy);
            serde_json::to_value(status)
                .unwrap_or_else(|error| serde_json::json!({ "error": error.to_string() }))
        })
    }
}

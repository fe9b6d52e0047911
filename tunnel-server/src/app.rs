//! The server from start to end: [`build`] -> [`Bound`] -> [`Bound::run`]. The only module that knows all parts.

mod identity;
mod redirector;
mod running;
mod serve;
mod source;

use std::sync::Arc;
use std::time::Instant;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tunnel_link::relay::register_stalled;
use tunnel_pki::Holder;
use tunnel_pki::enrol::IdentityMetrics;
use tunnel_redirect::{Orphans, register_redirect};
use tunnel_routing::{Router, load_claims};
use tunnel_runtime::admin::{Admin, Serving, register_process_metrics, register_tasks};
use tunnel_runtime::lifecycle::{ReadyGuard, Shutdown, raise_open_files};
use tunnel_runtime::limits::{Limits, register_limits};
use tunnel_runtime::logging;
use tunnel_runtime::reloaded::FileMetrics;
use tunnel_runtime::takeover::Copies;

pub use self::running::{Running, Said};
use self::source::Source;
use crate::config::Config;
use crate::listen::{ADMIN, Files, Listeners};
use crate::pki::{Lifetimes, PkiMetrics, ServerFile, agent_addresses};
use crate::runtime::Runtime;
use crate::runtime::role::register_role;
use crate::session::{Threads, Workers, bench};
use crate::status::page::PAGES;
use crate::status::{AGENTS, Reporter, cluster_endpoint, connections_endpoint};
use crate::takeover::Predecessor;

/// A server that has its addresses and its redirect. Only its admin endpoints answer.
pub struct Bound {
    config: Config,
    runtime: Runtime,
    lifetimes: Lifetimes,
    source: Source,
    metrics: Registered,
    sockets: Sockets,
    starting: ReadyGuard,
    admin: Option<Serving>,
    found: Found,
    threads: Threads,
}

/// Metrics that are registered before what counts in them is there.
struct Registered {
    registry: Arc<Registry>,
    pki: PkiMetrics,
    identity: IdentityMetrics,
}

struct Sockets {
    listeners: Listeners,
    files: Files,
    /// The listening sockets, for a successor.
    copies: Arc<Copies>,
    /// The limit of open files.
    open_files: u32,
}

/// Other servers of this host, to take over from.
struct Found {
    running: Option<Predecessor>,
    /// Remains of dead servers.
    orphans: Orphans,
}

/// Opens the source of the nodes, binds every listener and starts the redirect.
///
/// # Errors
/// Reasons that keep the server from starting, each with its fix: files, addresses in use, a redirect that is on but impossible.
pub async fn build(mut config: Config, log: logging::Handle) -> anyhow::Result<Bound> {
    let started = Instant::now();
    let open_files = raise_open_files();
    let limits = Limits::of_process();
    limits.log(open_files);
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let (pki, identity) = match config.redirector {
        Some(_) => (PkiMetrics::default(), IdentityMetrics::register(&mut registry, Holder::Redirector)),
        None => (PkiMetrics::register(&mut registry), IdentityMetrics::default()),
    };
    let (workers, worker_threads) = Workers::start(limits.threads())?;
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    let threads = [&[Handle::current()], workers.runtimes()].concat();
    register_tasks(postern, threads.clone());
    register_stalled(postern);
    register_limits(postern);
    register_role(postern, config.role());
    let router = Arc::new(Router::new(config.router(Source::api_server(&config).await), postern));
    if config.redirect.edge_addresses.is_empty() {
        tracing::warn!(
            fix = "name the networks of edge nodes with --edge-addresses",
            "edge nodes may name any address outside of the cloud nodes' networks"
        );
    }
    let lifetimes = Lifetimes::from_environment()?;
    let file_metrics = FileMetrics::register(postern);
    let files = Files::open(&mut config.listeners, &file_metrics)?;
    load_claims(&router, &config.process.state_dir);
    let source = Source::open(&config, lifetimes, &file_metrics, postern).await?;
    let mut runtime = Runtime::new(router, workers, postern);
    runtime.settling.threads(threads);
    let starting = runtime.readiness.pending("start");

    // Pins name it. A disk that is read-only must not keep a server from starting.
    let _ = std::fs::create_dir_all(&config.process.state_dir);
    let mut running = Predecessor::find(&config.process.state_dir).await;
    // Addresses before the redirect: a foreign server on this host makes this one fail before it touches the kernel.
    let mut listeners = Listeners::bind(&config.listeners, &mut running).await?;
    let orphans = start_redirect(&config, &mut runtime, &mut listeners, &mut running).await?;
    if let Some(redirect) = &runtime.redirect {
        register_redirect(postern, redirect.clone());
    }
    let registry = Arc::new(registry);
    let copies = Arc::new(Copies::new(listeners.copies()?));
    let addresses = listeners.addresses()?;
    let agents = addresses.iter().find(|(name, _)| *name == AGENTS).map(|(_, address)| *address);
    let reporter = Reporter {
        role: config.role(),
        started,
        source: source.status(&runtime.router),
        listeners: addresses,
        runtime: runtime.clone(),
    };
    let admin = listeners.take(ADMIN).pop();
    let admin = admin.map(|listener| serve_admin(listener, registry.clone(), reporter, &config.flags, log));
    let admin = admin.transpose()?;
    if let Some(address) = agents {
        let agent_addresses = agent_addresses(&config.server_names(), address);
        // A disk that is full or read-only must not keep a server that has its CA from starting.
        if let Err(error) = (ServerFile { agent_addresses }).write(&config.process.state_dir) {
            tracing::error!(%error, "failed to write server.json, `token create` cannot print server addresses");
        }
    }
    Ok(Bound {
        config,
        runtime,
        lifetimes,
        source,
        metrics: Registered { registry, pki, identity },
        sockets: Sockets { listeners, files, copies, open_files },
        starting,
        admin,
        found: Found { running, orphans },
        threads: worker_threads,
    })
}

/// Starts the admin endpoints.
fn serve_admin(
    listener: TcpListener,
    registry: Arc<Registry>,
    reporter: Reporter,
    flags: &[String],
    log: logging::Handle,
) -> anyhow::Result<Serving> {
    let runtime = &reporter.runtime;
    let (settling, peers) = (runtime.settling.clone(), runtime.peers.clone());
    let bench = bench::endpoint(runtime.sessions.clone());
    let connections = connections_endpoint(runtime.metrics.clone());
    let readiness = runtime.readiness.clone();
    let (role, status) = (reporter.role, reporter.into_status());
    peers.tell(&status);
    let endpoints = Admin {
        registry,
        readiness,
        connections: Some(connections),
        flags: flags.into(),
        bench: Some(bench),
        cluster: Some(cluster_endpoint(role, peers, status.clone())),
        status,
        pages: PAGES,
        log,
        settling,
    };
    Ok(endpoints.serve(listener.into_std()?)?)
}

/// Starts the redirect if it is on. Returns what dead servers have left.
async fn start_redirect(
    config: &Config,
    runtime: &mut Runtime,
    listeners: &mut Listeners,
    before: &mut Option<Predecessor>,
) -> anyhow::Result<Orphans> {
    let Some(options) = config.redirect_start() else { return Ok(Orphans::default()) };
    let orphans = Orphans::find(&options, before.as_ref().and_then(|before| before.own().pins.as_deref()))?;
    // The predecessor's routes are newer than those of a dead server.
    let given = before.as_ref().map_or(&[][..], |before| before.own().virtual_addresses.as_slice());
    runtime.router.take_over_addresses(given, orphans.virtual_addresses());
    runtime.redirect = Some(listeners.start_redirect(options, before).await?);
    Ok(orphans)
}

impl Bound {
    /// Serves until `shutdown`, or until another server has taken over, then drains and stops.
    ///
    /// # Errors
    /// No usable CA or certificate.
    pub async fn run(self, shutdown: Shutdown) -> anyhow::Result<()> {
        let said = Said::new(self.config.nodes.peers.clone());
        let Some(identity) = self.identity(&said, &shutdown).await? else { return Ok(()) };
        let drain_timeout = self.config.process.drain_timeout;
        // A kubelet would start it again.
        let ends_when_passed = self.config.nodes.inventory.is_some();
        self.serve(said, identity).await.run(shutdown, drain_timeout, ends_when_passed).await
    }
}

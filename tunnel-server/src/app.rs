//! The server from start to end: [`build`] -> [`Bound`] -> [`Bound::run`]. The only module that knows all parts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::admin::{Admin, Serving, register_process_metrics, register_tasks};
use tunnel_core::carry::register_stalled;
use tunnel_core::config::HostPort;
use tunnel_core::lifecycle::{Drain, Readiness, ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::logging;

use crate::admission::{Budget, Shares};
use crate::agent_port::{AgentPort, LinkContext};
use crate::config::{Config, NodeSource};
use crate::door::{self, DoorContext, Http, Https, Redirected};
use crate::kube::Parts;
use crate::listeners::Listeners;
use crate::metrics::Metrics;
use crate::peers::{self, PeerContext, Peers, register_peers};
use crate::pki::{
    EnrollPolicy, EnrollService, KnownNodes, Lifetimes, PkiMetrics, RevocationStore, Revocations,
    ServerCertificate, ServerFile, Standing, agent_addresses, follow_bundle,
};
use crate::redirect::{Feeder, Orphans, Redirect, RedirectMetrics};
use crate::route::{Router, follow, keep_claims, load_claims};
use crate::server_id::server_id;
use crate::session::{Sessions, Workers, register_links};
use crate::settings::Settings;
use crate::source::Source;
use crate::status::Reporter;
use crate::takeover::{Gates, NODES, Predecessor, Succession, TakeOver};

/// How long links and tasks may take to end once nothing is carried any more.
const CLOSING: Duration = Duration::from_secs(3);
/// The admin port's name among the listening sockets.
const ADMIN: &str = "admin";

/// A server that has its addresses and its redirect. Only its admin endpoints answer.
pub struct Bound {
    config: Config,
    server_id: String,
    lifetimes: Lifetimes,
    source: Source,
    router: Arc<Router>,
    sessions: Arc<Sessions>,
    peers: Arc<Peers>,
    metrics: Metrics,
    pki_metrics: PkiMetrics,
    listeners: Listeners,
    redirect: Option<Arc<Redirect>>,
    workers: Workers,
    open_files: u32,
    readiness: Readiness,
    starting: ReadyGuard,
    admin: Option<Serving>,
    gates: Gates,
    /// The server to take over from.
    before: Option<Predecessor>,
    /// What dead servers have left.
    orphans: Orphans,
    /// The listening sockets, for a successor.
    copies: Vec<(String, SocketAddr, OwnedFd)>,
}

/// Opens the source of the nodes, binds every listener and starts the redirect.
///
/// # Errors
/// What keeps the server from starting, each with its fix: files, addresses in use, a redirect that is on but impossible.
pub async fn build(config: Config, log: logging::Handle) -> anyhow::Result<Bound> {
    let started = Instant::now();
    let open_files = raise_open_files();
    let server_id = server_id();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let pki_metrics = PkiMetrics::register(&mut registry);
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    let workers = Workers::start(std::thread::available_parallelism().map_or(1, usize::from))?;
    register_tasks(postern, [&[Handle::current()], workers.runtimes()].concat());
    register_stalled(postern);
    let metrics = Metrics::new(postern);
    let router = Arc::new(Router::new(config.router(Source::api_server(&config.source).await), postern));
    let lifetimes = Lifetimes::from_environment()?;
    load_claims(&router, &config.state_dir);
    let source = Source::open(&config, lifetimes, postern).await?;
    let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
    register_links(registry.sub_registry_with_prefix("postern"), sessions.clone());
    let peers = Arc::new(Peers::new(router.clone()));
    register_peers(registry.sub_registry_with_prefix("postern"), peers.clone());
    let readiness = Readiness::new();
    let starting = readiness.pending("start");

    // Pins name it. A disk that is read-only must not keep a server from starting.
    let _ = std::fs::create_dir_all(&config.state_dir);
    let mut before = Predecessor::find(&config.state_dir).await;
    // Addresses before the redirect: a foreign server on this host makes this one fail before it touches the kernel.
    let mut listeners = Listeners::bind(&config, &mut before).await?;
    let mut redirect = None;
    let mut orphans = Orphans::default();
    if let Some(options) = config.redirect.clone() {
        orphans = Orphans::find(&options, before.as_ref().and_then(Predecessor::pins))?;
        router.take_over_tokens(orphans.tokens());
        router.take_over_tokens(before.as_ref().map_or(&[], Predecessor::tokens));
        let running = listeners.start_redirect(options, &mut before).await?;
        let collector = Box::new(RedirectMetrics(running.clone()));
        registry.sub_registry_with_prefix("postern").register_collector(collector);
        redirect = Some(running);
    }
    let reporter = Reporter {
        server_id: server_id.clone(),
        started,
        readiness: readiness.clone(),
        sessions: sessions.clone(),
        peers: peers.clone(),
        router: router.clone(),
        source: source.status(&router),
        metrics: metrics.clone(),
        redirect: redirect.clone(),
        doors: listeners.addresses()?,
    };
    let (mut admin, mut copies) = (None, listeners.copies()?);
    if let Some(address) = config.admin_address {
        let (registry, readiness, status) = (Arc::new(registry), readiness.clone(), reporter.into_status());
        let endpoints = Admin { registry, readiness, status, log };
        let taken = before.as_mut().and_then(|before| before.listener(ADMIN, |at| at == address));
        let bound = match taken {
            Some(listener) => endpoints.at(listener)?,
            None => endpoints.bind("--admin-address", address)?,
        };
        copies.push((ADMIN.to_owned(), bound.address(), bound.copy()?));
        admin = Some(bound.serve()?);
    }
    if let Some(listener) = &listeners.agents {
        let agent_addresses = agent_addresses(&config.server_names(), listener.local_addr()?);
        // A disk that is full or read-only must not keep a server that has its CA from starting.
        if let Err(error) = (ServerFile { agent_addresses }).write(&config.state_dir) {
            tracing::error!(%error, "`token create` will not know this server's addresses");
        }
    }
    Ok(Bound {
        config,
        server_id,
        lifetimes,
        source,
        router,
        sessions,
        peers,
        metrics,
        pki_metrics,
        listeners,
        redirect,
        workers,
        open_files,
        readiness,
        starting,
        admin,
        gates: Gates::new(before.is_none() && orphans.is_empty()),
        before,
        orphans,
        copies,
    })
}

impl Bound {
    /// Serves until `shutdown`, or until another server has taken over, then drains and stops.
    ///
    /// # Errors
    /// No usable CA or certificate.
    pub async fn run(self, shutdown: Shutdown) -> anyhow::Result<()> {
        let ca = self.source.authority(&self.config, self.lifetimes, &self.readiness, &shutdown).await?;
        let Some(ca) = ca else { return Ok(()) };
        let names = self.config.server_names();
        let certificate =
            Arc::new(ServerCertificate::start(ca, names, &self.server_id, self.pki_metrics.clone())?);
        let drain_timeout = self.config.drain_timeout;
        // Known before anyone is let in.
        let revocations = RevocationStore::new(&self.config.state_dir).open()?;
        // A kubelet would start it again.
        let ends_when_passed = matches!(self.config.source, NodeSource::File(_));
        let own = Shutdown::new();
        let serving = self.serve(certificate, revocations, &own).await;
        let succession = serving.succession.clone();
        tokio::select! {
            () = shutdown.draining() => tokio::select! {
                // What a successor that is half-way has not got yet would fail.
                _ = tokio::time::timeout(drain_timeout, succession.settled()) => {}
                () = shutdown.forced() => {}
            },
            () = succession.passed(), if ends_when_passed => {}
        }
        let force = async {
            shutdown.forced().await;
            own.force();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            stopped = serving.stop(drain_timeout) => stopped,
            () = force => Ok(()),
        }
    }

    /// Starts every task. Nothing fails here, so everything that runs is stopped in order.
    async fn serve(
        self,
        certificate: Arc<ServerCertificate>,
        revoked: watch::Sender<Arc<Revocations>>,
        shutdown: &Shutdown,
    ) -> Running {
        let Self {
            config,
            server_id,
            router,
            sessions,
            peers,
            metrics,
            pki_metrics,
            redirect,
            readiness,
            ..
        } = self;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let pending = readiness.pending("taking over");
        let handover = watch::Sender::default();
        // Ends with the drain, or when a successor does what one server alone may do.
        let leading = shutdown.draining_token().child_token();
        let (settings, settings_now) = watch::channel(Arc::default());
        let (known_nodes, nodes_now) = watch::channel(None::<Arc<KnownNodes>>);
        let standing = Standing::new(revoked.subscribe(), nodes_now, config.refuse_unknown);
        let (peer_addresses, peers_now) = watch::channel(Arc::new(config.peers.clone()));
        let revocations = RevocationStore::new(&config.state_dir);
        tasks.spawn(revocations.clone().follow(revoked, stop.clone()));
        let source_parts = Parts {
            router: router.clone(),
            sessions: sessions.clone(),
            fleet: peers.clone(),
            certificate: certificate.clone(),
            server_names: config.server_names(),
            server_id: &server_id,
            selector: config.edge_selector.clone(),
            allow_empty: config.allow_empty_inventory,
            doors: config.internal_doors(),
            state_dir: config.state_dir.clone(),
            given_peers: config.peers.clone(),
            peers: peer_addresses.clone(),
            pki_metrics: pki_metrics.clone(),
            settings: settings.clone(),
            known_nodes,
            revocations,
            standing: standing.clone(),
            nodes_known: readiness.pending(NODES),
            tasks: &tasks,
            draining: leading.clone(),
            stop: stop.clone(),
        };
        self.source.start(source_parts, shutdown.clone()).await;
        tasks.spawn(follow(router.clone(), stop.clone()));
        tasks.spawn(keep_claims(router.clone(), config.state_dir.clone(), stop.clone()));
        if let Some(redirect) = &redirect {
            let routes = router.clone();
            let mut feeder =
                Feeder::new(redirect.clone(), readiness.clone(), router.changed(), move || routes.desired());
            feeder.feed().await;
            tasks.spawn(feeder.run(stop.clone()));
            tasks.spawn(redirect.clone().watch(stop.clone()));
        }
        let links = LinkContext {
            server_id: server_id.clone(),
            bundle: follow_bundle(certificate.ca(), &tasks, stop.clone()),
            settings: settings_now,
            sessions: sessions.clone(),
            standing: standing.clone(),
            metrics: metrics.clone(),
            draining: shutdown.draining_token().clone(),
            handover: handover.subscribe(),
            forced: shutdown.forced_token().clone(),
            stop: stop.clone(),
            congestion: config.congestion.clone(),
            drain_timeout: config.drain_timeout,
        };
        let policy = EnrollPolicy { standing, tokens: config.token_enrollment };
        let enroll = EnrollService::new(certificate.ca(), &config.state_dir, policy, pki_metrics);
        let (budget, workers) = (Budget::of(self.open_files), Arc::new(self.workers));
        let drain = Drain::new(shutdown.clone());
        let to_peers = PeerContext {
            server_id: server_id.clone(),
            tls: certificate.peer_tls(),
            workers: workers.clone(),
            peers: peers.clone(),
            congestion: config.congestion.clone(),
            forced: shutdown.forced_token().clone(),
            stop: stop.clone(),
        };
        tasks.spawn(peers::follow(Arc::new(to_peers), peers_now));
        let context = DoorContext {
            router: router.clone(),
            sessions: sessions.clone(),
            peers,
            metrics,
            drain: drain.clone(),
        };
        let agent_port = AgentPort::new(certificate.tls(), workers, enroll, links, context.clone(), &budget);
        let Listeners { agents, https, http, redirected } = self.listeners;
        let gates = self.gates;
        if let Some(listener) = agents {
            tasks.spawn(agent_port.clone().serve(gates.agents(listener)));
            tasks.spawn(agent_port.clone().shut_out());
        }
        if let Some(listener) = https {
            tasks.spawn(door::serve(Https, gates.door(listener), context.clone(), Shares::new(budget.https)));
        }
        if let Some(listener) = http {
            tasks.spawn(door::serve(Http, gates.door(listener), context.clone(), Shares::new(budget.http)));
        }
        if let Some(redirect) = &redirect {
            let shares = Shares::new(budget.redirect);
            for listener in redirected {
                let door = Redirected { redirect: redirect.clone() };
                tasks.spawn(door::serve(door, gates.door(listener), context.clone(), shares.clone()));
            }
        }
        let succession = Arc::new(Succession {
            server_id: server_id.clone(),
            sockets: Mutex::new(self.copies),
            gates: gates.clone(),
            admin: self.admin.as_ref().map(Serving::accepting),
            sessions: sessions.clone(),
            redirect: redirect.clone(),
            handover,
            phase: watch::Sender::default(),
            passed: leading,
        });
        let succeeded = succession.clone().run(config.state_dir, shutdown.draining_token().clone());
        tasks.spawn(succeeded);
        let stopping = stop.clone();
        let take_over = TakeOver {
            gates,
            router,
            sessions,
            redirect: redirect.clone(),
            readiness: readiness.clone(),
            pending,
            stop: stopping,
        };
        tasks.spawn(take_over.run(self.before, self.orphans));
        tasks.close();
        self.starting.ready();
        tracing::info!(server_id, open_files = self.open_files, ?budget, "serving");
        Running {
            agent_port,
            redirect,
            succession,
            drain,
            tasks,
            stop,
            readiness,
            _certificate: certificate,
            _settings: settings,
            _peer_addresses: peer_addresses,
            _admin: self.admin,
        }
    }
}

struct Running {
    agent_port: Arc<AgentPort>,
    redirect: Option<Arc<Redirect>>,
    succession: Arc<Succession>,
    drain: Drain,
    tasks: TaskTracker,
    /// Ends the tasks and links.
    stop: CancellationToken,
    readiness: Readiness,
    // Held to the end: dropping these ends what they keep going.
    _certificate: Arc<ServerCertificate>,
    _settings: watch::Sender<Arc<Settings>>,
    _peer_addresses: watch::Sender<Arc<BTreeSet<HostPort>>>,
    _admin: Option<Serving>,
}

impl Running {
    /// Waits for the connections in flight, then ends links and tasks and, last, the redirect.
    async fn stop(self, drain_timeout: Duration) -> anyhow::Result<()> {
        let _stopping = self.readiness.pending("stopping");
        self.succession.close();
        if let Some(Err(error)) = self.redirect.as_ref().map(|redirect| redirect.drain()) {
            tracing::warn!(%error, "new connects to edge nodes are not refused while draining");
        }
        let drained = self.drain.finish(drain_timeout).await;
        self.stop.cancel();
        let closed = async {
            self.agent_port.closed().await;
            self.tasks.wait().await;
        };
        if tokio::time::timeout(CLOSING, closed).await.is_err() {
            tracing::debug!("some links or tasks did not end in time");
        }
        if let Some(redirect) = self.redirect {
            tokio::task::spawn_blocking(move || redirect.stop()).await.context("stopping the redirect")?;
        }
        tracing::info!(%drained, "stopped");
        Ok(())
    }
}

//! The server from start to end: [`build`] -> [`Bound`] -> [`Bound::run`]. The only module that knows all parts.

mod running;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use prometheus_client::registry::Registry;
use rustls::ClientConfig;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_core::admin::{Serving, register_process_metrics, register_tasks};
use tunnel_core::carry::register_stalled;
use tunnel_core::config::HostPort;
use tunnel_core::lifecycle::{ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::limits::{Limits, register_limits};
use tunnel_core::logging;
use tunnel_core::takeover::Copies;
use tunnel_identity::IdentityMetrics;

use self::running::Running;
use crate::admin::AdminParts;
use crate::admission::Budget;
use crate::agent_port::{AgentPort, Handover, LinkContext, Tokens};
use crate::authority::Authority;
use crate::config::{Config, NodeSource};
use crate::doctor::warn_of_taken_pod_ports;
use crate::door::{DoorContext, EgressTls, TargetFiles, check_egress};
use crate::door_files::DoorFiles;
use crate::kube::{Parts, Reads, Writes};
use crate::listeners::Listeners;
use crate::moved::end_moved;
use crate::peers::{self, PeerContext, RedirectorLinks};
use crate::pki::{
    EnrollPolicy, EnrollService, KnownNodes, Lifetimes, PkiMetrics, RevocationStore, ServerCertificate,
    ServerFile, Standing, agent_addresses, follow_bundle,
};
use crate::redirect::{Feeder, Orphans, RedirectMetrics};
use crate::redirector::{self, Redirector};
use crate::reloaded::FileMetrics;
use crate::role::register_role;
use crate::route::{Router, follow, keep_claims, load_claims};
use crate::runtime::Runtime;
use crate::serving::{DoorParts, Doors, konnectivity_tokens};
use crate::session::{MOST_STREAMS, Workers};
use crate::settings::Settings;
use crate::source::Source;
use crate::status::Reporter;
use crate::takeover::{Gates, NODES, PORTS, Predecessor, Succession, TakeOver};

/// A server that has its addresses and its redirect. Only its admin endpoints answer.
pub struct Bound {
    config: Config,
    runtime: Runtime,
    lifetimes: Lifetimes,
    source: Source,
    registry: Arc<Registry>,
    pki_metrics: PkiMetrics,
    identity_metrics: IdentityMetrics,
    listeners: Listeners,
    files: DoorFiles,
    file_metrics: FileMetrics,
    targets: TargetFiles,
    open_files: u32,
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
    let limits = Limits::of_process();
    limits.log(open_files);
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let pki_metrics = match config.redirector {
        Some(_) => PkiMetrics::default(),
        None => PkiMetrics::register(&mut registry),
    };
    let identity_metrics = redirector::register(&config, &mut registry);
    let workers = Arc::new(Workers::start(limits.threads())?);
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    register_tasks(postern, [&[Handle::current()], workers.runtimes()].concat());
    register_stalled(postern);
    register_limits(postern);
    register_role(postern, config.role());
    let router = Arc::new(Router::new(config.router(Source::api_server(&config.source()).await), postern));
    let lifetimes = Lifetimes::from_environment()?;
    let file_metrics = FileMetrics::register(postern);
    let targets = TargetFiles::read(&config.doors.targets, &file_metrics)?;
    let files = DoorFiles::open(&config, &file_metrics)?;
    load_claims(&router, &config.process.state_dir);
    let source = Source::open(&config, lifetimes, &file_metrics, postern).await?;
    let mut runtime = Runtime::new(router, workers, postern);
    let starting = runtime.readiness.pending("start");

    // Pins name it. A disk that is read-only must not keep a server from starting.
    let _ = std::fs::create_dir_all(&config.process.state_dir);
    let mut before = Predecessor::find(&config.process.state_dir).await;
    check_egress(&config.egress)?;
    // Addresses before the redirect: a foreign server on this host makes this one fail before it touches the kernel.
    let mut listeners = Listeners::bind(&config, files.maps(&config.connect.maps), &mut before).await?;
    let orphans = start_redirect(&config, &mut runtime, &mut listeners, &mut before).await?;
    if let Some(redirect) = &runtime.redirect {
        postern.register_collector(Box::new(RedirectMetrics(redirect.clone())));
    }
    let (registry, mut copies) = (Arc::new(registry), listeners.copies()?);
    let reporter = Reporter {
        role: config.role(),
        started,
        source: source.status(&runtime.router),
        doors: listeners.addresses()?,
        runtime: runtime.clone(),
    };
    let admin = AdminParts { registry: registry.clone(), reporter, log };
    let admin = admin.serve(&config, &mut before, &mut copies)?;
    if let Some(listener) = &listeners.agents {
        let agent_addresses = agent_addresses(&config.server_names(), listener.local_addr()?);
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
        registry,
        pki_metrics,
        identity_metrics,
        listeners,
        files,
        file_metrics,
        targets,
        open_files,
        starting,
        admin,
        gates: Gates::new(before.is_none() && orphans.is_empty()),
        before,
        orphans,
        copies,
    })
}

/// Starts the redirect if it is on. Returns what dead servers have left.
async fn start_redirect(
    config: &Config,
    runtime: &mut Runtime,
    listeners: &mut Listeners,
    before: &mut Option<Predecessor>,
) -> anyhow::Result<Orphans> {
    let Some(options) = config.redirect_start() else { return Ok(Orphans::default()) };
    let orphans = Orphans::find(&options, before.as_ref().and_then(Predecessor::pins))?;
    // What the predecessor redirects is newer than what a dead server has left.
    let given = before.as_ref().map_or(&[][..], Predecessor::tokens);
    runtime.router.take_over_tokens(&[given, orphans.tokens()].concat());
    runtime.redirect = Some(listeners.start_redirect(options, before).await?);
    Ok(orphans)
}

impl Bound {
    /// Serves until `shutdown`, or until another server has taken over, then drains and stops.
    ///
    /// # Errors
    /// No usable CA or certificate.
    pub async fn run(self, shutdown: Shutdown) -> anyhow::Result<()> {
        let Some(authority) = self.authority(&shutdown).await? else { return Ok(()) };
        let drain_timeout = self.config.process.drain_timeout;
        // A kubelet would start it again.
        let ends_when_passed = matches!(self.config.source(), NodeSource::File(_));
        let own = self.runtime.drain.shutdown().clone();
        let egress_tls = authority.egress_tls(&self.config, &self.file_metrics)?;
        let mut serving = self.serve(authority, egress_tls).await;
        let succession = serving.succession.clone();
        tokio::select! {
            () = shutdown.draining() => tokio::select! {
                // What a successor that is half-way has not got yet would fail.
                _ = tokio::time::timeout(drain_timeout, succession.settled()) => {}
                () = shutdown.forced() => {}
            },
            () = succession.passed(), if ends_when_passed => {
                // Should the successor die, the next server must be able to listen there while this one drains.
                serving.admin = None;
            }
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

    /// What this process shows to others; None: the drain has started meanwhile.
    async fn authority(&self, shutdown: &Shutdown) -> anyhow::Result<Option<Authority>> {
        if let Some(redirector) = &self.config.redirector {
            let _enrolling = self.runtime.readiness.pending("certificate");
            let enrolled = Redirector::enrol(&self.config, redirector, self.identity_metrics.clone());
            let enrolled = shutdown.draining_token().run_until_cancelled(enrolled).await;
            return Ok(enrolled.transpose()?.map(Authority::Redirector));
        }
        let ca =
            self.source.authority(&self.config, self.lifetimes, &self.runtime.readiness, shutdown).await?;
        let Some(ca) = ca else { return Ok(None) };
        let names = self.config.server_names();
        let certificate =
            ServerCertificate::start(ca, names, &self.runtime.server_id, self.pki_metrics.clone())?;
        // Known before anyone is let in.
        let revocations = RevocationStore::new(&self.config.process.state_dir).open()?;
        Ok(Some(Authority::Server(Arc::new(certificate), revocations)))
    }

    /// Starts every task. Nothing fails here, so everything that runs is stopped in order.
    async fn serve(mut self, authority: Authority, egress_tls: Option<EgressTls>) -> Running {
        let (config, runtime) = (&self.config, &self.runtime);
        let pending = runtime.readiness.pending("taking over");
        let handover = watch::Sender::default();
        // Not while a successor does what one server alone may do.
        let (eligible, eligible_now) = watch::channel(true);
        let (settings, settings_now) = watch::channel(Arc::default());
        let (peer_addresses, peers_now) = watch::channel(Arc::new(config.nodes.peers.clone()));
        let known_nodes = watch::Sender::default();
        let peer_tls = authority.peer_tls();
        let (certificate, redirector, standing) = self.identity(authority, &known_nodes, &peers_now);

        let client = self.source.client();
        let services = config.egress.follows_services().then(|| self.source.services(runtime)).flatten();
        let reads = reads(config, runtime, peer_addresses.clone(), settings.clone(), known_nodes);
        let writes = Writes {
            server_names: config.server_names(),
            node_condition: config.writes.node_condition,
            dns_records: config.writes.dns_records,
            pki_metrics: self.pki_metrics.clone(),
            revocations: RevocationStore::new(&config.process.state_dir),
            standing: standing.clone(),
            eligible: eligible_now,
        };
        let parts = Parts {
            runtime,
            state_dir: config.process.state_dir.clone(),
            doors: config.internal_doors(),
            reads,
            writes,
            certificate: certificate.clone(),
        };
        self.source.start(parts).await;
        start_routes(config, runtime).await;

        let to_peers = to_peers(config, runtime, peer_tls, redirector);
        runtime.tasks.spawn(peers::follow(Arc::new(to_peers), peers_now.clone()));
        let budget = Budget::of(self.open_files, Limits::of_process().memory.amount);
        let parts = DoorParts {
            config,
            client: client.clone(),
            services,
            certificate: certificate.as_ref(),
            runtime,
            registry: &self.registry,
            budget: &budget,
            gates: &self.gates,
        };
        let doors = Doors::new(parts, (self.files, self.targets), settings_now.clone());
        let agent_port = certificate.as_ref().map(|certificate| {
            let links = links(config, runtime, certificate, &standing, settings_now, handover.subscribe());
            let policy = EnrollPolicy { standing, tokens: config.token_enrollment() };
            let state_dir = &config.process.state_dir;
            let enroll = EnrollService::new(certificate.ca(), state_dir, policy, self.pki_metrics);
            let context = DoorContext::of(runtime);
            let (tls, workers) = (certificate.tls(), runtime.workers.clone());
            AgentPort::new(tls, workers, enroll, links, context, doors.workloads(), &budget)
        });
        if let Some(agent_port) = &agent_port {
            let tokens = || konnectivity_tokens(&config.konnectivity, client);
            start_agents(runtime, agent_port, &mut self.listeners, &self.gates, (tokens, peers_now));
        }
        let sockets = Arc::new(Copies::new(self.copies));
        doors.start(self.listeners, egress_tls, &sockets);
        look_at_rules(config, runtime);

        let succession = Arc::new(Succession {
            runtime: runtime.clone(),
            sockets,
            gates: self.gates.clone(),
            admin: self.admin.as_ref().map(Serving::accepting),
            handover: handover.clone(),
            phase: watch::Sender::default(),
            closed: CancellationToken::new(),
            eligible,
        });
        let draining = runtime.drain.shutdown().draining_token().clone();
        runtime.tasks.spawn(succession.clone().run(config.process.state_dir.clone(), draining));
        let take_over = TakeOver {
            runtime: runtime.clone(),
            gates: self.gates,
            pending: Some(pending),
            handover,
            drain_timeout: config.process.drain_timeout,
        };
        let before = take_over.start(self.before, self.orphans);
        runtime.tasks.close();
        self.starting.ready();
        let (server_id, role, open_files) = (&runtime.server_id, config.role(), self.open_files);
        tracing::info!(server_id, %role, open_files, ?budget, "serving");
        Running {
            runtime: self.runtime,
            agent_port,
            succession,
            before,
            _certificate: certificate,
            _settings: settings,
            _peer_addresses: peer_addresses,
            admin: self.admin,
        }
    }

    /// What this server shows to others, and by what it judges agents. `known_nodes` are those that may attach.
    fn identity(
        &self,
        authority: Authority,
        known_nodes: &watch::Sender<Option<Arc<KnownNodes>>>,
        peers: &watch::Receiver<Arc<BTreeSet<HostPort>>>,
    ) -> (Option<Arc<ServerCertificate>>, Option<RedirectorLinks>, Standing) {
        let Runtime { tasks, stop, readiness, .. } = &self.runtime;
        let judge = |revoked: &watch::Sender<_>| {
            Standing::new(revoked.subscribe(), known_nodes.subscribe(), self.config.agents.refuse_unknown)
        };
        match authority {
            Authority::Server(certificate, revoked) => {
                let standing = judge(&revoked);
                let revocations = RevocationStore::new(&self.config.process.state_dir);
                tasks.spawn(revocations.follow(revoked, stop.clone()));
                (Some(certificate), None, standing)
            }
            Authority::Redirector(redirector) => {
                let linking = readiness.pending("a server");
                let peers_held = self.runtime.peers.clone();
                tasks.spawn(redirector::ready_once_linked(peers_held, linking, stop.clone()));
                let links = redirector.start(peers.clone(), tasks, stop.clone());
                (None, Some(links), judge(&watch::Sender::default()))
            }
        }
    }
}

/// Keeps the routes, the kernel's and the claims up to date.
async fn start_routes(config: &Config, runtime: &Runtime) {
    let Runtime { router, tasks, stop, .. } = runtime;
    tasks.spawn(follow(router.clone(), stop.clone()));
    tasks.spawn(end_moved(router.clone(), runtime.metrics.clone(), stop.clone()));
    tasks.spawn(keep_claims(router.clone(), config.process.state_dir.clone(), stop.clone()));
    let Some(redirect) = &runtime.redirect else { return };
    let (routes, readiness) = (router.clone(), runtime.readiness.clone());
    let mut feeder = Feeder::new(redirect.clone(), readiness, router.changed(), move || routes.desired());
    feeder.feed().await;
    tasks.spawn(feeder.run(stop.clone()));
    tasks.spawn(redirect.clone().watch(stop.clone()));
}

/// Looks at the rules of this host, once the redirect's listeners accept.
fn look_at_rules(config: &Config, runtime: &Runtime) {
    let Some(redirect) = &runtime.redirect else { return };
    if config.redirect.edge_pod_routes.is_empty() {
        return;
    }
    let (config, ipv6, stop) = (config.clone(), redirect.ipv6(), runtime.stop.clone());
    runtime.tasks.spawn(async move {
        stop.run_until_cancelled(warn_of_taken_pod_ports(&config, ipv6)).await;
    });
}

/// The cluster's part of the configuration, and the receivers of the rest.
fn reads(
    config: &Config,
    runtime: &Runtime,
    peers: watch::Sender<Arc<BTreeSet<HostPort>>>,
    settings: watch::Sender<Arc<Settings>>,
    known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
) -> Reads {
    Reads {
        selector: config.nodes.edge_selector.clone(),
        allow_empty: config.nodes.allow_empty_inventory,
        given_peers: config.nodes.peers.clone(),
        peers,
        settings,
        known_nodes,
        nodes_known: runtime.readiness.pending(NODES),
        ports_known: runtime.readiness.pending(PORTS),
    }
}

/// The handles of the links with other servers.
fn to_peers(
    config: &Config,
    runtime: &Runtime,
    tls: Arc<ArcSwap<ClientConfig>>,
    redirector: Option<RedirectorLinks>,
) -> PeerContext {
    PeerContext {
        server_id: runtime.server_id.clone(),
        tls,
        redirector,
        workers: runtime.workers.clone(),
        peers: runtime.peers.clone(),
        congestion: config.process.congestion_control.clone(),
        most_streams: MOST_STREAMS,
        forced: runtime.drain.shutdown().forced_token().clone(),
        stop: runtime.stop.clone(),
    }
}

/// The handles of the links of agents.
fn links(
    config: &Config,
    runtime: &Runtime,
    certificate: &ServerCertificate,
    standing: &Standing,
    settings: watch::Receiver<Arc<Settings>>,
    handover: watch::Receiver<Handover>,
) -> LinkContext {
    let shutdown = runtime.drain.shutdown();
    LinkContext {
        server_id: runtime.server_id.clone(),
        bundle: follow_bundle(certificate.ca(), &runtime.tasks, runtime.stop.clone()),
        settings,
        sessions: runtime.sessions.clone(),
        standing: standing.clone(),
        metrics: runtime.metrics.clone(),
        draining: shutdown.draining_token().clone(),
        handover,
        forced: shutdown.forced_token().clone(),
        stop: runtime.stop.clone(),
        congestion: config.process.congestion_control.clone(),
        most_streams: MOST_STREAMS,
        drain_timeout: config.process.drain_timeout,
    }
}

/// Opens the ports of agents, and of konnectivity's.
fn start_agents(
    runtime: &Runtime,
    agent_port: &Arc<AgentPort>,
    listeners: &mut Listeners,
    gates: &Gates,
    (tokens, peers): (impl FnOnce() -> Tokens, watch::Receiver<Arc<BTreeSet<HostPort>>>),
) {
    if let Some(listener) = listeners.agents.take() {
        runtime.tasks.spawn(agent_port.clone().serve(gates.agents(listener)));
        runtime.tasks.spawn(agent_port.clone().shut_out());
    }
    if let Some(listener) = listeners.konnectivity.take() {
        let port = agent_port.for_konnectivity(tokens(), peers);
        runtime.tasks.spawn(port.serve(gates.agents(listener)));
    }
}

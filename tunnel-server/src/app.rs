//! The server from start to end: [`build`] -> [`Bound`] -> [`Bound::run`]. The only module that knows all parts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::admin::{Serving, register_process_metrics, register_tasks};
use tunnel_core::carry::register_stalled;
use tunnel_core::config::HostPort;
use tunnel_core::lifecycle::{Drain, Readiness, ReadyGuard, Shutdown, raise_open_files};
use tunnel_core::limits::{Limits, register_limits};
use tunnel_core::logging;
use tunnel_core::takeover::Copies;
use tunnel_identity::IdentityMetrics;

use crate::admin::AdminParts;
use crate::admission::Budget;
use crate::agent_port::{AgentPort, LinkContext};
use crate::authority::Authority;
use crate::config::{Config, NodeSource};
use crate::doctor::warn_of_taken_pod_ports;
use crate::door::{DoorContext, EgressTls, TargetFiles, check_egress};
use crate::door_files::DoorFiles;
use crate::kube::Parts;
use crate::listeners::Listeners;
use crate::metrics::Metrics;
use crate::moved::end_moved;
use crate::peers::{self, PeerContext, Peers, register_peers};
use crate::pki::{
    EnrollPolicy, EnrollService, KnownNodes, Lifetimes, PkiMetrics, RevocationStore, ServerCertificate,
    ServerFile, Standing, agent_addresses, follow_bundle,
};
use crate::redirect::{Feeder, Orphans, Redirect, RedirectMetrics};
use crate::redirector::{self, Redirector};
use crate::reloaded::FileMetrics;
use crate::role::register_role;
use crate::route::{Router, follow, keep_claims, load_claims};
use crate::server_id::server_id;
use crate::serving::{DoorParts, Doors, konnectivity_tokens};
use crate::session::{MOST_STREAMS, Sessions, Workers, register_links};
use crate::settings::Settings;
use crate::source::Source;
use crate::status::Reporter;
use crate::takeover::{Before, Gates, NODES, PORTS, Predecessor, Succession, TakeOver};

/// How long links and tasks may take to end once nothing is carried any more.
const CLOSING: Duration = Duration::from_secs(3);

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
    registry: Arc<Registry>,
    pki_metrics: PkiMetrics,
    identity_metrics: IdentityMetrics,
    listeners: Listeners,
    files: DoorFiles,
    file_metrics: FileMetrics,
    targets: TargetFiles,
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
    let limits = Limits::of_process();
    limits.log(open_files);
    let server_id = server_id();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let pki_metrics = match config.redirector {
        Some(_) => PkiMetrics::default(),
        None => PkiMetrics::register(&mut registry),
    };
    let identity_metrics = redirector::register(&config, &mut registry);
    let postern = registry.sub_registry_with_prefix("postern");
    postern.register_collector(Box::new(log.lost().clone()));
    let workers = Workers::start(limits.threads())?;
    register_tasks(postern, [&[Handle::current()], workers.runtimes()].concat());
    register_stalled(postern);
    register_limits(postern);
    register_role(postern, config.role());
    let metrics = Metrics::new(postern);
    let router = Arc::new(Router::new(config.router(Source::api_server(&config.source()).await), postern));
    let lifetimes = Lifetimes::from_environment()?;
    let file_metrics = FileMetrics::register(postern);
    let targets = TargetFiles::read(&config.doors.targets, &file_metrics)?;
    let files = DoorFiles::open(&config, &file_metrics)?;
    load_claims(&router, &config.process.state_dir);
    let source = Source::open(&config, lifetimes, &file_metrics, postern).await?;
    let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
    register_links(registry.sub_registry_with_prefix("postern"), sessions.clone());
    let peers = Arc::new(Peers::new(router.clone()));
    register_peers(registry.sub_registry_with_prefix("postern"), peers.clone());
    let readiness = Readiness::new();
    let starting = readiness.pending("start");

    // Pins name it. A disk that is read-only must not keep a server from starting.
    let _ = std::fs::create_dir_all(&config.process.state_dir);
    let mut before = Predecessor::find(&config.process.state_dir).await;
    check_egress(&config.egress)?;
    // Addresses before the redirect: a foreign server on this host makes this one fail before it touches the kernel.
    let mut listeners = Listeners::bind(&config, files.maps(&config.connect.maps), &mut before).await?;
    let mut redirect = None;
    let mut orphans = Orphans::default();
    if let Some(options) = config.redirect_start() {
        orphans = Orphans::find(&options, before.as_ref().and_then(Predecessor::pins))?;
        // What the predecessor redirects is newer than what a dead server has left.
        let given = before.as_ref().map_or(&[][..], Predecessor::tokens);
        router.take_over_tokens(&[given, orphans.tokens()].concat());
        let running = listeners.start_redirect(options, &mut before).await?;
        let collector = Box::new(RedirectMetrics(running.clone()));
        registry.sub_registry_with_prefix("postern").register_collector(collector);
        redirect = Some(running);
    }
    let reporter = Reporter {
        server_id: server_id.clone(),
        role: config.role(),
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
    let (registry, mut copies) = (Arc::new(registry), listeners.copies()?);
    let admin = AdminParts {
        registry: registry.clone(),
        readiness: readiness.clone(),
        reporter,
        sessions: sessions.clone(),
        log,
    };
    let admin = admin.serve(&config, &mut before, &mut copies)?;
    if let Some(listener) = &listeners.agents {
        let agent_addresses = agent_addresses(&config.server_names(), listener.local_addr()?);
        // A disk that is full or read-only must not keep a server that has its CA from starting.
        if let Err(error) = (ServerFile { agent_addresses }).write(&config.process.state_dir) {
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
        registry,
        pki_metrics,
        identity_metrics,
        listeners,
        files,
        file_metrics,
        targets,
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
        let Some(authority) = self.authority(&shutdown).await? else { return Ok(()) };
        let drain_timeout = self.config.process.drain_timeout;
        // A kubelet would start it again.
        let ends_when_passed = matches!(self.config.source(), NodeSource::File(_));
        let own = Shutdown::new();
        let egress_tls = authority.egress_tls(&self.config, &self.file_metrics)?;
        let mut serving = self.serve(authority, egress_tls, &own).await;
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
            let _enrolling = self.readiness.pending("certificate");
            let enrolled = Redirector::enrol(&self.config, redirector, self.identity_metrics.clone());
            let enrolled = shutdown.draining_token().run_until_cancelled(enrolled).await;
            return Ok(enrolled.transpose()?.map(Authority::Redirector));
        }
        let ca = self.source.authority(&self.config, self.lifetimes, &self.readiness, shutdown).await?;
        let Some(ca) = ca else { return Ok(None) };
        let names = self.config.server_names();
        let certificate = ServerCertificate::start(ca, names, &self.server_id, self.pki_metrics.clone())?;
        // Known before anyone is let in.
        let revocations = RevocationStore::new(&self.config.process.state_dir).open()?;
        Ok(Some(Authority::Server(Arc::new(certificate), revocations)))
    }

    /// Starts every task. Nothing fails here, so everything that runs is stopped in order.
    async fn serve(
        mut self,
        authority: Authority,
        egress_tls: Option<EgressTls>,
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
        // Not while a successor does what one server alone may do.
        let (eligible, eligible_now) = watch::channel(true);
        let (settings, settings_now) = watch::channel(Arc::default());
        let (known_nodes, nodes_now) = watch::channel(None::<Arc<KnownNodes>>);
        let peer_tls = authority.peer_tls();
        let (certificate, redirector, revoked) = match authority {
            Authority::Server(certificate, revoked) => (Some(certificate), None, revoked),
            Authority::Redirector(redirector) => (None, Some(redirector), watch::Sender::default()),
        };
        let standing = Standing::new(revoked.subscribe(), nodes_now, config.agents.refuse_unknown);
        let (peer_addresses, peers_now) = watch::channel(Arc::new(config.nodes.peers.clone()));
        let revocations = RevocationStore::new(&config.process.state_dir);
        let redirector = match redirector {
            Some(redirector) => {
                let linking = readiness.pending("a server");
                tasks.spawn(redirector::ready_once_linked(peers.clone(), linking, stop.clone()));
                Some(redirector.start(peers_now.clone(), &tasks, stop.clone()))
            }
            None => {
                tasks.spawn(revocations.clone().follow(revoked, stop.clone()));
                None
            }
        };
        let source_parts = Parts {
            router: router.clone(),
            sessions: sessions.clone(),
            fleet: peers.clone(),
            certificate: certificate.clone(),
            server_names: config.server_names(),
            server_id: &server_id,
            selector: config.nodes.edge_selector.clone(),
            allow_empty: config.nodes.allow_empty_inventory,
            node_condition: config.writes.node_condition,
            dns_records: config.writes.dns_records,
            doors: config.internal_doors(),
            state_dir: config.process.state_dir.clone(),
            given_peers: config.nodes.peers.clone(),
            peers: peer_addresses.clone(),
            pki_metrics: pki_metrics.clone(),
            settings: settings.clone(),
            known_nodes,
            revocations,
            standing: standing.clone(),
            nodes_known: readiness.pending(NODES),
            ports_known: readiness.pending(PORTS),
            tasks: &tasks,
            eligible: eligible_now,
            draining: shutdown.draining_token().clone(),
            stop: stop.clone(),
        };
        let client = self.source.client();
        let services =
            config.egress.follows_services().then(|| self.source.services(&tasks, &stop)).flatten();
        self.source.start(source_parts, shutdown.clone()).await;
        tasks.spawn(follow(router.clone(), stop.clone()));
        tasks.spawn(end_moved(router.clone(), metrics.clone(), stop.clone()));
        tasks.spawn(keep_claims(router.clone(), config.process.state_dir.clone(), stop.clone()));
        if let Some(redirect) = &redirect {
            let routes = router.clone();
            let mut feeder =
                Feeder::new(redirect.clone(), readiness.clone(), router.changed(), move || routes.desired());
            feeder.feed().await;
            tasks.spawn(feeder.run(stop.clone()));
            tasks.spawn(redirect.clone().watch(stop.clone()));
        }
        let budget = Budget::of(self.open_files, Limits::of_process().memory.amount);
        let workers = Arc::new(self.workers);
        let drain = Drain::new(shutdown.clone());
        let to_peers = PeerContext {
            server_id: server_id.clone(),
            tls: peer_tls,
            redirector,
            workers: workers.clone(),
            peers: peers.clone(),
            congestion: config.process.congestion_control.clone(),
            most_streams: MOST_STREAMS,
            forced: shutdown.forced_token().clone(),
            stop: stop.clone(),
        };
        tasks.spawn(peers::follow(Arc::new(to_peers), peers_now.clone()));
        let context = DoorContext {
            router: router.clone(),
            sessions: sessions.clone(),
            peers,
            metrics: metrics.clone(),
            drain: drain.clone(),
        };
        let gates = self.gates;
        let parts = DoorParts {
            config: &config,
            client: client.clone(),
            services,
            certificate: certificate.as_ref(),
            context: &context,
            registry: &self.registry,
            budget: &budget,
            workers: workers.clone(),
            gates: &gates,
            tasks: &tasks,
            stop: &stop,
        };
        let doors = Doors::new(parts, (self.files, self.targets), settings_now.clone());
        let agent_port = certificate.as_ref().map(|certificate| {
            let links = LinkContext {
                server_id: server_id.clone(),
                bundle: follow_bundle(certificate.ca(), &tasks, stop.clone()),
                settings: settings_now,
                sessions: sessions.clone(),
                standing: standing.clone(),
                metrics,
                draining: shutdown.draining_token().clone(),
                handover: handover.subscribe(),
                forced: shutdown.forced_token().clone(),
                stop: stop.clone(),
                congestion: config.process.congestion_control.clone(),
                most_streams: MOST_STREAMS,
                drain_timeout: config.process.drain_timeout,
            };
            let policy = EnrollPolicy { standing, tokens: config.token_enrollment() };
            let enroll = EnrollService::new(certificate.ca(), &config.process.state_dir, policy, pki_metrics);
            AgentPort::new(
                certificate.tls(),
                workers,
                enroll,
                links,
                context.clone(),
                doors.workloads(),
                &budget,
            )
        });
        if let (Some(listener), Some(agent_port)) = (self.listeners.agents.take(), &agent_port) {
            tasks.spawn(agent_port.clone().serve(gates.agents(listener)));
            tasks.spawn(agent_port.clone().shut_out());
        }
        let konnectivity =
            self.listeners.konnectivity.take().map(|listener| (listener, &config.konnectivity));
        if let (Some((listener, options)), Some(agent_port)) = (konnectivity, &agent_port) {
            let port = agent_port.for_konnectivity(konnectivity_tokens(options, client), peers_now);
            tasks.spawn(port.serve(gates.agents(listener)));
        }
        let sockets = Arc::new(Copies::new(self.copies));
        doors.start(self.listeners, redirect.as_ref(), egress_tls, &sockets);
        if let Some(redirect) = redirect.as_ref().filter(|_| !config.redirect.edge_pod_routes.is_empty()) {
            let (config, ipv6, stop) = (config.clone(), redirect.ipv6(), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(warn_of_taken_pod_ports(&config, ipv6)).await;
            });
        }
        let role = config.role();
        let succession = Arc::new(Succession {
            server_id: server_id.clone(),
            sockets,
            gates: gates.clone(),
            admin: self.admin.as_ref().map(Serving::accepting),
            router: router.clone(),
            sessions: sessions.clone(),
            peers: context.peers.clone(),
            redirect: redirect.clone(),
            handover: handover.clone(),
            phase: watch::Sender::default(),
            closed: CancellationToken::new(),
            eligible,
        });
        let succeeded = succession.clone().run(config.process.state_dir, shutdown.draining_token().clone());
        tasks.spawn(succeeded);
        let take_over = TakeOver {
            gates,
            router,
            sessions,
            peers: context.peers,
            redirect: redirect.clone(),
            readiness: readiness.clone(),
            pending: Some(pending),
            handover,
            drain_timeout: config.process.drain_timeout,
            stop: stop.clone(),
        };
        let before = take_over.start(self.before, self.orphans, &tasks);
        tasks.close();
        self.starting.ready();
        tracing::info!(server_id, %role, open_files = self.open_files, ?budget, "serving");
        Running {
            agent_port,
            redirect,
            succession,
            before,
            drain,
            metrics: context.metrics,
            tasks,
            stop,
            readiness,
            _certificate: certificate,
            _settings: settings,
            _peer_addresses: peer_addresses,
            admin: self.admin,
        }
    }
}

struct Running {
    /// None: this is a redirector.
    agent_port: Option<Arc<AgentPort>>,
    redirect: Option<Arc<Redirect>>,
    succession: Arc<Succession>,
    before: Before,
    drain: Drain,
    metrics: Metrics,
    tasks: TaskTracker,
    /// Ends the tasks and links.
    stop: CancellationToken,
    readiness: Readiness,
    // Held to the end: dropping these ends what they keep going.
    _certificate: Option<Arc<ServerCertificate>>,
    _settings: watch::Sender<Arc<Settings>>,
    _peer_addresses: watch::Sender<Arc<BTreeSet<HostPort>>>,
    admin: Option<Serving>,
}

impl Running {
    /// Waits for the connections in flight, then ends links and tasks and, last, the redirect.
    async fn stop(mut self, drain_timeout: Duration) -> anyhow::Result<()> {
        let _stopping = self.readiness.pending("stopping");
        self.succession.close();
        let another = self.succession.has_successor() || self.before.take_back(self.drain.shutdown()).await;
        if another {
            // It answers there.
            self.admin = None;
        }
        if let Some(redirect) = &self.redirect {
            // Its programs are in place, and need not be found by their names.
            if another && redirect.finds_another().await {
                redirect.release();
            } else if let Err(error) = redirect.drain() {
                tracing::warn!(%error, "new connects to edge nodes are not refused while draining");
            }
        }
        let drained = self.drain.finish(drain_timeout, self.metrics.end_quiet()).await;
        self.stop.cancel();
        let closed = async {
            if let Some(agent_port) = &self.agent_port {
                agent_port.closed().await;
            }
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

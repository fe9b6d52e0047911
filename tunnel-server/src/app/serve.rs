//! Starts every part of the server.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_pki::TrustBundle;
use tunnel_pki::enrol::reach::Reach;
use tunnel_redirect::Feeder;
use tunnel_routing::{follow, keep_claims};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::limits::Limits;
use tunnel_runtime::takeover::{self, socket_path};

use super::identity::ServerIdentity;
use super::running::{Running, Said};
use super::{Bound, Found, Registered, Sockets};
use crate::admission::Budget;
use crate::agent_port::{AgentPort, Handover, LinkContext};
use crate::config::Config;
use crate::kube::{Parts as KubeParts, Writes};
use crate::listen::{Callers, Parts, places};
use crate::listener::ListenerContext;
use crate::listener::{end_moved, judge_open};
use crate::peers::{self, PeerContext, RedirectorLinks, Trust};
use crate::pki::{EnrollPolicy, EnrollService, RevocationStore, ServerCertificate, Standing};
use crate::runtime::Runtime;
use crate::runtime::settings::Settings;
use crate::session::MOST_STREAMS;
use crate::takeover::{Gates, NODES, PORTS, Succession, TakeOver};

impl Bound {
    /// Starts every task. Nothing fails here, so everything that runs is stopped in order.
    pub(super) async fn serve(self, said: Said, identity: ServerIdentity) -> Running {
        let pending = self.runtime.readiness.pending("taking over");
        let (settings, peers) = (said.settings.subscribe(), said.peers.subscribe());
        let ServerIdentity { certificate, redirector, standing, roots, peer_tls, caller_tls, egress_tls } =
            identity;
        let (config, runtime, metrics) = (&self.config, &self.runtime, &self.metrics);
        let client = self.source.client();
        let egress = &config.listeners.egress;
        let services = egress.follows_services().then(|| self.source.services(runtime)).flatten();
        let parts = kube_parts(config, runtime, metrics, &said, certificate.clone(), standing.clone());
        self.source.start(parts).await;
        start_routes(config, runtime).await;
        let keep_out = runtime.peers.clone().keep_out(standing.clone(), runtime.stop.clone());
        runtime.tasks.spawn(keep_out);
        let to_peers = to_peers(config, runtime, peer_tls, redirector, (roots.clone(), standing.clone()));
        runtime.tasks.spawn(peers::follow(Arc::new(to_peers), peers.clone()));

        let Sockets { listeners, files, copies, open_files } = self.sockets;
        let Found { running: before, orphans } = self.found;
        let gates = Gates::new(before.is_none() && orphans.is_empty());
        let budget = Budget::of(open_files, Limits::of_process().memory.amount);
        let own = certificate.as_ref().map(|certificate| certificate.tls.clone());
        let named = move |address: IpAddr| own.as_ref().is_some_and(|own| own.names(&address.to_string()));
        runtime.router.own_ports.start(config.listeners.own_ports(), peers, Box::new(named));
        let callers = Callers::new(&config.listeners, files.callers, runtime, client, caller_tls, &budget);
        let agents = certificate.as_ref().map(|certificate| {
            let links =
                links(config, runtime, roots.clone(), &standing, settings.clone(), said.handover.subscribe());
            let policy = EnrollPolicy { standing, tokens: config.token_enrollment() };
            let state_dir = &config.process.state_dir;
            let enroll = EnrollService::new(certificate.ca.clone(), state_dir, policy, metrics.pki.clone());
            let context = ListenerContext::of(runtime);
            let (tls, workers) = (certificate.tls.clone(), runtime.workers.clone());
            let workloads = config.listeners.connect.policy.is_some().then(|| callers.workloads());
            AgentPort::new(tls, workers, enroll, links, context, workloads, &budget)
        });
        let agent_port = agents.clone();
        if let Some(agents) = &agents {
            // Also if only konnectivity's agents have a port.
            runtime.tasks.spawn(agents.clone().shut_out());
        }
        let parts = Parts {
            config: &config.listeners,
            runtime,
            registry: &metrics.registry,
            gates: &gates,
            sockets: copies.clone(),
            callers,
            targets: files.targets,
            settings,
            maps: files.maps,
            services,
            egress_socket: None,
            egress: files.egress,
            egress_tls,
            agents,
        };
        listeners.start(parts, &budget);

        let succession = Arc::new(Succession {
            runtime: runtime.clone(),
            sockets: copies,
            gates: gates.clone(),
            admin: self.admin.as_ref().map(|admin| admin.gate.clone()),
            handover: said.handover.clone(),
            phase: watch::Sender::default(),
            closed: CancellationToken::new(),
            eligible: said.eligible.clone(),
        });
        let draining = runtime.drain.shutdown().draining_token().clone();
        let path = socket_path(&config.process.state_dir);
        runtime.tasks.spawn(succession.clone().run(move || takeover::Listener::bind(&path), draining));
        let take_over = TakeOver {
            runtime: runtime.clone(),
            gates,
            pending: Some(pending),
            handover: said.handover.clone(),
            drain_timeout: config.process.drain_timeout,
        };
        let before = take_over.start(before, orphans);
        runtime.tasks.close();
        self.starting.ready();
        let (server_id, role, budget) = (&runtime.server_id, config.role(), places(&budget));
        tracing::info!(server_id, %role, open_files, ?budget, "serving");
        Running {
            runtime: self.runtime,
            agent_port,
            succession,
            before,
            certificate,
            said,
            admin: self.admin,
            threads: self.threads,
        }
    }
}

/// Keeps the routes, the kernel's and the claims up to date.
async fn start_routes(config: &Config, runtime: &Runtime) {
    let Runtime { router, tasks, stop, .. } = runtime;
    tasks.spawn(follow(router.clone(), stop.clone()));
    tasks.spawn(end_moved(router.clone(), runtime.metrics.clone(), stop.clone()));
    tasks.spawn(judge_open(runtime.metrics.clone(), runtime.rights.clone(), stop.clone()));
    tasks.spawn(keep_claims(router.clone(), config.process.state_dir.clone(), stop.clone()));
    let Some(redirect) = &runtime.redirect else { return };
    let (routes, readiness) = (router.clone(), runtime.readiness.clone());
    let mut feeder = Feeder::new(redirect.clone(), readiness, router.changed(), move || routes.desired());
    let (changed, applied) = (router.changed(), feeder.applied());
    runtime.settling.stage("routes", move || {
        let (wanted, mut applied) = (*changed.borrow(), applied.clone());
        async move { drop(applied.wait_for(|applied| *applied >= wanted).await) }
    });
    feeder.feed().await;
    tasks.spawn(feeder.run(stop.clone()));
    tasks.spawn(redirect.clone().watch(stop.clone()));
}

/// The cluster's parts, with the receivers of what is read.
fn kube_parts<'a>(
    config: &Config,
    runtime: &'a Runtime,
    metrics: &Registered,
    said: &Said,
    certificate: Option<Arc<ServerCertificate>>,
    standing: Standing,
) -> KubeParts<'a> {
    KubeParts {
        runtime,
        state_dir: config.process.state_dir.clone(),
        listeners: config.listeners.listeners.internal(),
        selector: config.nodes.edge_selector.clone(),
        allow_empty: config.nodes.allow_empty_inventory,
        peers: said.peers.clone(),
        settings: said.settings.clone(),
        known_nodes: said.known_nodes.clone(),
        nodes_known: runtime.readiness.pending(NODES),
        ports_known: runtime.readiness.pending(PORTS),
        writes: certificate.map(|certificate| Writes {
            certificate,
            server_names: config.server_names(),
            node_condition: config.writes.node_condition,
            dns_records: config.writes.dns_records.then(|| config.writes.dns_zones.clone()),
            pki_metrics: metrics.pki.clone(),
            standing,
            eligible: said.eligible.subscribe(),
        }),
    }
}

/// The handles of the links with other servers.
fn to_peers(
    config: &Config,
    runtime: &Runtime,
    tls: Arc<ArcSwap<ClientConfig>>,
    redirector: Option<RedirectorLinks>,
    (roots, standing): (watch::Receiver<Arc<TrustBundle>>, Standing),
) -> PeerContext {
    let revocations = RevocationStore::new(&config.process.state_dir);
    let drain_timeout = config.process.drain_timeout;
    PeerContext {
        server_id: runtime.server_id.clone(),
        tls,
        trust: Trust {
            clock: Clock::default(),
            roots,
            standing,
            revocations,
            readmissions: redirector.is_some() || config.nodes.inventory.is_some(),
            drain_timeout,
        },
        redirector,
        workers: runtime.workers.clone(),
        peers: runtime.peers.clone(),
        reach: Reach { congestion: config.process.congestion_control.clone(), ..Reach::default() },
        most_streams: MOST_STREAMS,
        forced: runtime.drain.shutdown().forced_token().clone(),
        stop: runtime.stop.clone(),
    }
}

/// The handles of the links of agents.
fn links(
    config: &Config,
    runtime: &Runtime,
    bundle: watch::Receiver<Arc<TrustBundle>>,
    standing: &Standing,
    settings: watch::Receiver<Arc<Settings>>,
    handover: watch::Receiver<Handover>,
) -> LinkContext {
    let shutdown = runtime.drain.shutdown();
    LinkContext {
        server_id: runtime.server_id.clone(),
        bundle,
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

//! The agent from start to end. The only module that knows all parts.

use std::future::pending;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::task::AbortOnDropHandle;
use tunnel_link::relay::{ENDING, register_stalled};
use tunnel_pki::Holder;
use tunnel_pki::enrol::{EnrollConfig, EnrollError, Enrolled, IdentityMetrics, install_bundles};
use tunnel_runtime::admin::{
    Admin, Connections, Serving, Status, register_process_metrics, register_tasks, to_json,
};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::files::create_private_directory;
use tunnel_runtime::lifecycle::{Drain, ReadyGuard, Shutdown};
use tunnel_runtime::limits::register_limits;
use tunnel_runtime::logging;
use tunnel_runtime::settled::Settling;
use tunnel_runtime::takeover;

use crate::addresses;
use crate::config::{Config, KonnectivityConfig, Listen};
use crate::connections;
use crate::konnectivity::{self, KonnectivityMetrics, check_files};
use crate::kube::node;
use crate::listeners::{Listener, Listeners};
use crate::metrics::Metrics;
use crate::outbound::Outbound;
use crate::places::Places;
use crate::runtime::Runtime;
use crate::servers::Servers;
use crate::session::{LinkSet, Running, Shared, register_links};
use crate::status::{self, AgentStatus};
use crate::takeover::{Predecessor, Succession, TAKE_OVER, take_over};

/// Maximum trust bundles waiting to be installed.
const BUNDLES: usize = 16;
/// Time that a slow line has for the request to end connections, and for the ends.
const LATE: Duration = Duration::from_secs(1);
/// Maximum time for targets and servers to read the resets of connections that the drain has cut.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum wait for a renewal in progress before the agent before has the node's place back. This agent serves meanwhile.
const GIVE_BACK: Duration = Duration::from_secs(3);

/// Runs the agent until `shutdown`.
///
/// # Errors
/// Those that only the operator can fix: files, addresses, the kubeconfig, or a refused enrolment.
pub async fn run(config: Config, log: logging::Handle, shutdown: Shutdown) -> anyhow::Result<()> {
    let start = Start::new(config, log);
    let (process, own) = (shutdown.clone(), start.runtime.shutdown.clone());
    let _forced = AbortOnDropHandle::new(tokio::spawn(async move {
        process.forced().await;
        own.force();
    }));
    if let Some(servers) = start.runtime.config.konnectivity.clone() {
        return start.konnectivity(servers, shutdown).await;
    }
    let bound = tokio::select! {
        bound = start.bind(&shutdown) => bound?,
        () = shutdown.draining() => return Ok(()),
    };
    bound.run(shutdown).await;
    Ok(())
}

/// The part of the start that is the same for both kinds of servers.
struct Start {
    runtime: Runtime,
    registry: Registry,
    log: logging::Handle,
}

impl Start {
    fn new(config: Config, log: logging::Handle) -> Self {
        let places = Places::of_process();
        let mut registry = Registry::default();
        register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
        let postern = registry.sub_registry_with_prefix("postern");
        postern.register_collector(Box::new(log.lost().clone()));
        register_tasks(postern, vec![Handle::current()]);
        register_limits(postern);
        let metrics = Metrics::new(&mut registry);
        Self { runtime: Runtime::new(config, places, metrics), registry, log }
    }

    /// Answers on the admin address, if there is one, until the returned handle is dropped.
    async fn serve_admin(
        self,
        listener: Option<Listener>,
        status: Arc<Status>,
        connections: Option<Arc<Connections>>,
    ) -> anyhow::Result<Option<Serving>> {
        let Some(listener) = listener else { return Ok(None) };
        let settling = Settling::default();
        settling.threads(vec![Handle::current()]);
        let admin = Admin {
            cluster: None,
            registry: Arc::new(self.registry),
            readiness: self.runtime.readiness,
            status,
            connections,
            flags: self.runtime.config.flags.clone().into(),
            bench: None,
            pages: &[],
            log: self.log,
            settling,
        };
        Ok(Some(admin.serve(listener.socket().await.into_std()?)?))
    }

    /// Keeps the streams with konnectivity's servers until `shutdown`, then drains.
    async fn konnectivity(mut self, servers: KonnectivityConfig, shutdown: Shutdown) -> anyhow::Result<()> {
        check_files(&servers)?;
        let runtime = self.runtime.clone();
        let (_servers, known) = watch::channel(Arc::new(vec![servers.server.clone()]));
        let mut background = JoinSet::new();
        addresses::follow(&runtime, known, &mut background).await;
        let metrics = KonnectivityMetrics::register(&mut self.registry);
        let set = konnectivity::Set::new(konnectivity::Shared::new(runtime.clone(), servers, metrics));
        let (shown, of) = (set.clone(), runtime.clone());
        let status = move || {
            let status = AgentStatus::new(&of, Vec::new(), None);
            to_json(&status.at_konnectivity(shown.status()))
        };
        let listeners = Listeners::open(&runtime.config, &mut None).await?;
        let _admin = self.serve_admin(listeners.admin, Arc::new(status), None).await?;
        keep_streams(&runtime, set, &shutdown).await;
        Ok(())
    }

    /// Obtains everything that an agent of tunnel-servers needs. May be dropped at any time; takes as long as the
    /// enrolment does. Another agent may take over meanwhile, which may begin `shutdown`.
    async fn bind(mut self, shutdown: &Shutdown) -> anyhow::Result<Bound> {
        let runtime = self.runtime.clone();
        let Runtime { config, readiness, .. } = &runtime;
        register_stalled(self.registry.sub_registry_with_prefix("postern"));
        let identity_metrics = IdentityMetrics::register(&mut self.registry, Holder::Agent);
        let (enrolling, attaching) = (readiness.pending("certificate"), readiness.pending("a server"));
        let servers = Arc::new(Servers::open(config).await?);
        let running = Arc::<OnceLock<Running>>::default();
        let of_links = running.clone();
        register_links(&mut self.registry, move || {
            of_links.get().map(|running| running.links.status()).unwrap_or_default()
        });
        let mut before = Predecessor::find(&config.given.state_dir).await;
        let listeners = Listeners::open(config, &mut before).await?;
        // Answers before the enrolment, which may take long: an operator wants to see why it waits.
        let status = status::endpoint(runtime.clone(), servers.clone(), running.clone());
        let connections = connections::endpoint(runtime.metrics.live.clone(), config.node_name.clone());
        let admin = self.serve_admin(listeners.admin, status, Some(connections)).await?;
        runtime.handover.set_successor(before.is_some());
        let accepting = admin.as_ref().map(|admin| admin.gate.clone());
        let succession =
            Succession::new(runtime.clone(), listeners.copies, accepting, running, shutdown.clone());
        let succession = Arc::new(succession);
        let mut background = JoinSet::new();
        let socket = takeover::socket_path(&config.given.state_dir);
        let bind = move || {
            if let Some(directory) = socket.parent() {
                // The directory does not exist before the first enrolment. An error here recurs in the next step.
                let _ = create_private_directory(directory);
            }
            takeover::Listener::bind(&socket)
        };
        background.spawn(succession.clone().run(bind));
        if before.is_none() {
            succession.open();
        }
        let before = before.map(|agent| (agent, readiness.pending("taking over")));
        if let Some(proxy) = &config.reach.proxy {
            tracing::info!(%proxy, "using an HTTP proxy");
        }
        background.spawn(servers.clone().ready_once_known(readiness.pending("API server")));
        let identity = enrol(config, &servers, identity_metrics).await?;
        let before = match before {
            // Held before the first renewal begins.
            Some((agent, pending)) => Some((agent, pending, identity.keeper.hold_pending_key().await)),
            None => None,
        };
        enrolling.ready();
        addresses::follow(&runtime, servers.known(), &mut background).await;
        let outbound = listeners.outbound;
        Ok(Bound { runtime, servers, identity, outbound, before, succession, admin, attaching, background })
    }
}

/// An agent that has its identity and answers on the admin address, but has not connected to any server yet.
struct Bound {
    runtime: Runtime,
    servers: Arc<Servers>,
    identity: Enrolled,
    outbound: Vec<(Listen, Listener)>,
    /// The agent to take over from, and the guards that hold back readiness and renewals until then.
    before: Option<(Predecessor, ReadyGuard, OwnedMutexGuard<()>)>,
    succession: Arc<Succession>,
    admin: Option<Serving>,
    attaching: ReadyGuard,
    /// These tasks end with the agent, not with the drain.
    background: JoinSet<()>,
}

impl Bound {
    /// Keeps sessions with the servers until `shutdown`, or until another agent has taken over, then drains.
    async fn run(self, shutdown: Shutdown) {
        let Self { runtime, servers, identity, succession, mut background, .. } = self;
        let keeper = identity.keeper.clone();
        let (config, live) = (&runtime.config, runtime.metrics.live.clone());
        let (bundles, announced) = mpsc::channel(BUNDLES);
        let shared = Shared::new(runtime.clone(), keeper.subscribe(), bundles);
        let links = LinkSet::new(shared.clone());
        let outbound = Outbound::new(shared.clone(), links.clone(), servers.known());
        // Nobody else sets it.
        let _ = succession.running.set(Running { links: links.clone(), keeper: keeper.clone() });
        links.set(&servers.known().borrow());

        for (listen, listener) in self.outbound {
            let (outbound, succession) = (outbound.clone(), succession.clone());
            let shutdown = runtime.shutdown.clone();
            background.spawn(async move {
                // The previous agent accepts until then.
                succession.opened().await;
                let socket = shutdown.draining_token().run_until_cancelled(listener.socket()).await;
                if let Some(socket) = socket {
                    outbound.serve(listen, socket).await;
                }
            });
        }
        let before = self.before.map(|(before, pending, renewals)| {
            background.spawn(take_over(before, links.clone(), succession.clone(), pending, renewals))
        });
        background.spawn(async move { match shared.resumed.clone().watch().await {} });
        background.spawn(connections::end_lost(live.clone(), runtime.addresses.subscribe()));
        background.spawn(install_bundles(keeper.clone(), config.reach.clone(), announced));
        background.spawn(links.clone().ready_once_attached(self.attaching));
        background.spawn(links.clone().follow(servers.known()));
        background.spawn(keeper.follow_servers(servers.known()));
        background.spawn(identity.recover(move || links.refused()));
        if let Some(api) = servers.api.clone().filter(|_| config.given.targets.pods) {
            let (node, state_dir) = (config.node_name.clone(), config.given.state_dir.clone());
            background.spawn(node::follow(api, node, runtime.pods.clone(), state_dir));
        }

        let ending = async {
            runtime.ending.cancel();
            tokio::join!(tokio::time::sleep(ENDING + LATE), outbound.end_quiet());
        };
        end(&runtime, &succession, before, &shutdown, self.admin, ending).await;
    }
}

/// Keeps the streams with konnectivity's servers until the agent is to end. Then drains.
pub async fn keep_streams(runtime: &Runtime, streams: Arc<konnectivity::Set>, shutdown: &Shutdown) {
    runtime.tasks.spawn(streams.run());
    shutdown.draining().await;
    drain(runtime, std::future::ready(())).await;
}

/// Waits until the agent is to end, and until no takeover is in progress. Then drains. `before`: the task that keeps
/// the connection with the agent that this one took over from.
pub async fn end(
    runtime: &Runtime,
    succession: &Succession,
    before: Option<AbortHandle>,
    shutdown: &Shutdown,
    mut admin: Option<Serving>,
    ending: impl Future<Output = ()>,
) {
    shutdown.draining().await;
    let settled = settle(runtime, succession, before.as_ref());
    let renewals = tokio::select! {
        settled = tokio::time::timeout(runtime.config.given.drain_timeout, settled) => settled.ok().flatten(),
        () = shutdown.forced() => None,
    };
    runtime.shutdown.begin();
    succession.close();
    let alone = runtime.handover.is_alone();
    // It waits to be stopped, and has the node's place again now, not only once this agent's connections have ended.
    // Where a successor has the place, or is still taking over, it is not to come back.
    let before = before.filter(|before| alone && !before.is_finished());
    if let Some(before) = &before {
        before.abort();
    }
    if !alone || before.is_some() {
        // It answers there. If a successor dies, the next agent must be able to listen there while this one drains.
        admin = None;
    }
    let renews_no_more = async {
        let _held = match renewals {
            None if before.is_some() => succession.hold_renewals(TAKE_OVER).await,
            held => held,
        };
        pending::<()>().await;
    };
    tokio::select! {
        () = drain(runtime, ending) => {}
        () = renews_no_more => {}
    }
    drop(admin);
}

/// Waits until no takeover is in progress: a successor that is still taking over does not have all sessions yet, and
/// connections for the others would fail. The returned guard stops renewals, so that the agent `before` may have the
/// node's place back.
async fn settle(
    runtime: &Runtime,
    succession: &Succession,
    before: Option<&AbortHandle>,
) -> Option<OwnedMutexGuard<()>> {
    loop {
        runtime.handover.settled().await;
        let has_one = before.is_some_and(|before| !before.is_finished());
        // While it has not handed the place over, this agent's renewals are held anyway.
        if runtime.handover.has_passed() || !has_one || !succession.is_open() {
            return None;
        }
        let renewals = succession.hold_renewals(GIVE_BACK).await;
        // Otherwise a successor has come meanwhile, and needs the renewals to be free.
        if runtime.handover.is_alone() {
            return renewals;
        }
    }
}

/// Waits for the connections in flight, and for `ending` after the timeout, and ends the rest.
async fn drain(runtime: &Runtime, ending: impl Future<Output = ()>) {
    let drain = Drain::of(runtime.tasks.clone(), runtime.shutdown.clone());
    let drained = drain.finish(runtime.config.given.drain_timeout, ending).await;
    runtime.shutdown.force();
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, runtime.tasks.wait()).await;
    tracing::info!(%drained, "stopped");
}

/// Obtains a certificate, and keeps it valid.
async fn enrol(
    config: &Config,
    servers: &Servers,
    metrics: IdentityMetrics,
) -> Result<Enrolled, EnrollError> {
    let enroll = EnrollConfig {
        servers: servers.known().borrow().iter().map(ToString::to_string).collect(),
        holder: Holder::Agent,
        node: config.node_name.clone(),
        state_dir: config.given.state_dir.clone(),
        token: config.token.clone().zip(config.ca_hash.clone()),
        reach: config.reach.clone(),
        clock: Clock::default(),
    };
    Enrolled::obtain(enroll, servers.api.clone(), metrics).await
}

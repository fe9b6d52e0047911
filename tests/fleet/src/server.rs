//! A server: the real code from the end of a TCP handshake on, built of its parts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Result;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tunnel_agent::reach::Reach;
use tunnel_link::link::Congestion;
use tunnel_pki::TrustBundle;
use tunnel_redirect::Orphans;
use tunnel_routing::inventory::Selector;
use tunnel_routing::{Router, RouterConfig};
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::Shutdown;
use tunnel_server::agent_port::{AgentPort, AgentTokens, Budget, Handover, KonnectivityPort, LinkContext};
use tunnel_server::app::{Running, Said};
use tunnel_server::inventory::NodeCount;
use tunnel_server::kube::{Kube, ObjectNames, Parts as KubeParts, Writes};
use tunnel_server::listener::{ListenerContext, Piped};
use tunnel_server::peers::{self, PeerContext, Trust};
use tunnel_server::pki::{
    Ca, EnrollPolicy, EnrollService, PkiMetrics, RevocationStore, Revocations, ServerCertificate,
    ServerNames, Standing,
};
use tunnel_server::runtime::Runtime;
use tunnel_server::runtime::settings::Listeners;
use tunnel_server::session::{MOST_STREAMS, Threads, Workers};
use tunnel_server::takeover::{Gates, Phase, Predecessor, Succession, TakeOver};

use crate::cluster::{Cluster, NAMESPACE};
use crate::konnectivity;
use crate::network::Net;
use crate::revocations::Reading;

/// Time for connections to finish.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);

/// Pause before a process that could not start is started again.
pub(crate) const RESTARTS: Duration = Duration::from_secs(1);

/// Connections of clients that a process accepts.
const CLIENTS: u32 = 1024;

/// As the product sets it on links with other servers.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// One process of a server.
pub(crate) struct Server {
    pub(crate) id: String,
    /// Number of the server, and of this process of it.
    pub(crate) process: (usize, usize),
    pub(crate) runtime: Runtime,
    clients: OnceLock<Piped>,
    gates: Gates,
    handover: watch::Receiver<Handover>,
    phase: watch::Receiver<Phase>,
    /// True while it writes to the cluster.
    leader: watch::Receiver<bool>,
    /// Cancelled once it has found its predecessor, or that there is none.
    started: CancellationToken,
    /// A signal to the process.
    signal: Shutdown,
    ends_when_passed: bool,
    serving: JoinHandle<()>,
    revocations: watch::Sender<Arc<Revocations>>,
    _bundle: watch::Sender<Arc<TrustBundle>>,
}

/// How a server starts.
pub(crate) struct Start<'a> {
    pub(crate) net: &'a Net,
    pub(crate) cluster: Option<&'a Cluster>,
    pub(crate) ca: Ca,
    pub(crate) clock: Clock,
    pub(crate) state_dir: PathBuf,
    pub(crate) process: (usize, usize),
    /// Number of servers.
    pub(crate) count: usize,
    pub(crate) files: u32,
    /// It accepts konnectivity's agents too.
    pub(crate) konnectivity: bool,
    /// Once a successor has taken over. Otherwise it waits to be stopped, as in a cluster.
    pub(crate) ends_when_passed: bool,
    /// Interval at which it reads the revocations; None in a run without revocations.
    pub(crate) reads: Option<Duration>,
}

/// Address of the server with this index.
pub(crate) fn address(index: usize) -> SocketAddr {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)), 10262)
}

/// Where a server waits for its successor, and the address from which that comes.
pub(crate) fn takeover(index: usize) -> (SocketAddr, IpAddr) {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    let [waits, comes] = [2, 3].map(|net| IpAddr::V4(Ipv4Addr::new(10, net, 0, last)));
    (SocketAddr::new(waits, 1), comes)
}

/// The server at an address.
pub(crate) fn index(address: &str) -> Option<usize> {
    let last: usize = address.strip_suffix(":10262")?.rsplit('.').next()?.parse().ok()?;
    last.checked_sub(1)
}

pub(crate) fn id_of((index, process): (usize, usize)) -> String {
    format!("server-{index}.{process}")
}

pub(crate) fn process(id: &str) -> Option<(usize, usize)> {
    let (index, process) = id.strip_prefix("server-")?.split_once('.')?;
    Some((index.parse().ok()?, process.parse().ok()?))
}

pub(crate) fn host_port(address: SocketAddr) -> HostPort {
    HostPort { host: address.ip().to_string(), port: address.port() }
}

impl Start<'_> {
    /// Starts a server at its address. It takes over from the one that runs there, if there is one.
    pub(crate) fn start(self) -> Result<Server> {
        let (index, id) = (self.process.0, id_of(self.process));
        let runtime = self.runtime(&id)?;
        let address = address(index);
        let others = (0..self.count).map(self::address).map(host_port).collect::<BTreeSet<_>>();
        let said = Said::new(others);
        let (bundle, trusted) = watch::channel(Arc::new(self.ca.state()?.bundle().clone()));
        let store = RevocationStore::new(&self.state_dir);
        let revocations = if self.reads.is_some() { store.open()? } else { watch::Sender::default() };
        let standing = Standing::new(revocations.subscribe(), said.known_nodes.subscribe(), true);
        let mut names = ServerNames::default();
        names.addresses.extend(self.konnectivity.then_some(konnectivity::BALANCER.ip()));
        let certificate = ServerCertificate::start(self.ca.clone(), names, &id, PkiMetrics::default())?;
        let policy = EnrollPolicy { standing: standing.clone(), tokens: true };
        let certificate = Arc::new(certificate);
        let leader = match self.cluster {
            Some(cluster) => self.follow(cluster, (&runtime, &said), &certificate, &standing),
            None => watch::channel(false).1,
        };
        let enroll =
            EnrollService::new(certificate.ca.clone(), self.ca.state_dir(), policy, PkiMetrics::default());
        let context = links(&runtime, &said, trusted.clone(), standing.clone());
        let (tls, listeners) = (certificate.tls.clone(), ListenerContext::of(&runtime));
        let budget = Budget::of(self.files, 1 << 30);
        let workers = runtime.workers.clone();
        let port = AgentPort::new(tls, workers.clone(), enroll, context, listeners, None, &budget);
        let konnectivity = self.konnectivity.then(|| {
            let tokens = AgentTokens::new(None, String::new());
            port.for_konnectivity(tokens)
        });
        let to_peers = PeerContext {
            server_id: id.clone(),
            tls: certificate.peer_tls.clone(),
            workers,
            peers: runtime.peers.clone(),
            reach: Reach { network: Some(self.net.at(address.ip(), KEEPALIVE)), ..Reach::default() },
            redirector: None,
            trust: Trust {
                clock: self.clock,
                roots: trusted,
                standing,
                revocations: store.clone(),
                readmissions: self.cluster.is_none(),
                drain_timeout: DRAIN,
            },
            most_streams: MOST_STREAMS,
            forced: runtime.drain.shutdown().forced_token().clone(),
            stop: runtime.stop.clone(),
        };
        // Open once it has taken over.
        let gates = Gates::new(false);
        let succession = Arc::new(Succession {
            runtime: runtime.clone(),
            sockets: Arc::default(),
            gates: gates.clone(),
            admin: None,
            handover: said.handover.clone(),
            phase: watch::Sender::default(),
            closed: CancellationToken::new(),
            eligible: said.eligible.clone(),
        });
        let (handover, phase) = (said.handover.subscribe(), succession.phase.subscribe());
        let (signal, ends_when_passed) = (Shutdown::default(), self.ends_when_passed);
        let started = CancellationToken::new();
        let parts = Parts {
            net: self.net.clone(),
            index,
            state_dir: self.state_dir,
            runtime: runtime.clone(),
            said,
            certificate,
            port,
            konnectivity,
            to_peers,
            gates: gates.clone(),
            succession,
            started: started.clone(),
            reading: self.reads.map(|every| Reading { store, publish: revocations.clone(), every }),
        };
        let serving = tokio::spawn(parts.serve(signal.clone(), ends_when_passed));
        let process = self.process;
        Ok(Server {
            id,
            process,
            runtime,
            clients: OnceLock::new(),
            gates,
            handover,
            phase,
            leader,
            started,
            signal,
            ends_when_passed,
            serving,
            revocations,
            _bundle: bundle,
        })
    }

    /// Follows the cluster, and takes part in writing to it.
    fn follow(
        &self,
        cluster: &Cluster,
        (runtime, said): (&Runtime, &Said),
        certificate: &Arc<ServerCertificate>,
        standing: &Standing,
    ) -> watch::Receiver<bool> {
        let (client, mut registry) =
            (cluster.client(self.process.0, runtime.stop.clone()), Registry::default());
        let (names, nodes) = (ObjectNames::default(), NodeCount::default());
        Kube::new((client, NAMESPACE.to_owned()), names, nodes, &mut registry).start(KubeParts {
            runtime,
            state_dir: self.state_dir.clone(),
            listeners: Listeners { https: 0, secure: BTreeMap::new(), http: 0, pairs: 0 },
            selector: Selector::default(),
            allow_empty: false,
            peers: said.peers.clone(),
            settings: said.settings.clone(),
            known_nodes: said.known_nodes.clone(),
            nodes_known: runtime.readiness.pending("nodes"),
            ports_known: runtime.readiness.pending("ports"),
            writes: Some(Writes {
                certificate: certificate.clone(),
                server_names: ServerNames::default(),
                node_condition: true,
                dns_records: None,
                pki_metrics: PkiMetrics::default(),
                standing: standing.clone(),
                eligible: said.eligible.subscribe(),
            }),
        })
    }

    fn runtime(&self, id: &str) -> Result<Runtime> {
        let mut registry = Registry::default();
        let mut config =
            RouterConfig::new("198.18.0.0/15".parse()?, "fd9e:706f:7374:6572::/64".parse()?, [10250]);
        config.clock = self.clock;
        let router = Arc::new(Router::new(config, &mut registry));
        let mut runtime = Runtime::new(router, Workers::here(), &mut registry);
        id.clone_into(&mut runtime.server_id);
        Ok(runtime)
    }
}

fn links(
    runtime: &Runtime,
    said: &Said,
    bundle: watch::Receiver<Arc<TrustBundle>>,
    standing: Standing,
) -> LinkContext {
    let shutdown = runtime.drain.shutdown();
    LinkContext {
        server_id: runtime.server_id.clone(),
        bundle,
        settings: said.settings.subscribe(),
        sessions: runtime.sessions.clone(),
        standing,
        metrics: runtime.metrics.clone(),
        draining: shutdown.draining_token().clone(),
        handover: said.handover.subscribe(),
        forced: shutdown.forced_token().clone(),
        stop: runtime.stop.clone(),
        congestion: Congestion::System,
        most_streams: MOST_STREAMS,
        drain_timeout: DRAIN,
    }
}

/// The parts with which a process serves.
struct Parts {
    net: Net,
    index: usize,
    state_dir: PathBuf,
    runtime: Runtime,
    said: Said,
    certificate: Arc<ServerCertificate>,
    port: Arc<AgentPort>,
    konnectivity: Option<Arc<KonnectivityPort>>,
    to_peers: PeerContext,
    gates: Gates,
    succession: Arc<Succession>,
    started: CancellationToken,
    reading: Option<Reading>,
}

impl Parts {
    /// Serves until the signal, or until a successor has taken over.
    async fn serve(self, signal: Shutdown, ends_when_passed: bool) {
        let Self { net, runtime, said, gates, succession, .. } = self;
        let (waits, comes) = takeover(self.index);
        let before = loop {
            let before = match net.succeed(comes, waits) {
                Ok(stream) => Predecessor::at(&self.state_dir, stream).await,
                Err(_) => None,
            };
            if before.is_some() || !net.has_listener(address(self.index)) {
                break before;
            }
            // The address is in use: it fails, and is started again.
            sleep(RESTARTS).await;
        };
        self.started.cancel();
        // Ends with this process.
        let mut tasks = JoinSet::new();
        if let Some(reading) = self.reading {
            tasks.spawn(reading.run());
        }
        let listener = net.listen(address(self.index), gates.agents.clone());
        tasks.spawn(runtime.tasks.track_future(self.port.clone().shut_out()));
        tasks.spawn(runtime.tasks.track_future(self.port.clone().serve(listener)));
        if let Some(port) = self.konnectivity {
            let listener = net.listen(konnectivity::address(self.index), gates.agents.clone());
            tasks.spawn(runtime.tasks.track_future(port.serve(listener)));
        }
        let others = peers::follow(Arc::new(self.to_peers), said.peers.subscribe());
        tasks.spawn(runtime.tasks.track_future(others));
        let draining = runtime.drain.shutdown().draining_token().clone();
        let successors = succession.clone().run(move || Ok(net.wait_at(waits)), draining);
        tasks.spawn(runtime.tasks.track_future(successors));
        let take_over = TakeOver {
            runtime: runtime.clone(),
            gates,
            pending: None,
            handover: said.handover.clone(),
            drain_timeout: DRAIN,
        };
        let before = take_over.start(before, Orphans::default());
        runtime.tasks.close();
        let running = Running {
            runtime,
            agent_port: Some(self.port),
            succession,
            before,
            certificate: Some(self.certificate),
            said,
            admin: None,
            threads: Threads::default(),
        };
        if let Err(error) = running.run(signal, DRAIN, ends_when_passed).await {
            tracing::error!(%error, "a server failed to stop");
        }
    }
}

impl Server {
    /// True if it accepts agents, and keeps those that it has.
    pub(crate) fn is_settled(&self) -> bool {
        *self.handover.borrow() == Handover::Nothing && !self.runtime.drain.shutdown().is_draining()
    }

    /// True if connections of clients are its.
    pub(crate) fn accepts(&self) -> bool {
        self.gates.listeners.is_open() && !self.runtime.drain.shutdown().is_draining()
    }

    /// True if it has been told to end, or ends because it has a successor.
    pub(crate) fn ends(&self) -> bool {
        self.signal.is_draining() || (self.ends_when_passed && *self.phase.borrow() == Phase::Passed)
    }

    /// True if it has started, and is not about to end.
    pub(crate) fn goes_on(&self) -> bool {
        self.started.is_cancelled() && !self.ends()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.serving.is_finished()
    }

    /// True while it writes to the cluster.
    pub(crate) fn leads(&self) -> bool {
        *self.leader.borrow()
    }

    pub(crate) fn epoch(&self, node: &NodeName) -> Option<u64> {
        self.runtime.sessions.get(node).map(|session| session.epoch)
    }

    /// True if it knows that the node is revoked; false if it knows that this one is readmitted.
    pub(crate) fn says(&self, node: &NodeName) -> Option<bool> {
        let known = self.revocations.borrow();
        known.records.get(&node.into()).map(|record| record.readmitted.is_none())
    }

    /// SIGTERM.
    pub(crate) fn stop(&self) {
        self.signal.begin();
    }

    /// Where clients connect. Made for the first one: it has hash maps, which change the order of those that follow, and so runs
    /// without clients.
    pub(crate) fn clients(&self) -> Piped {
        self.clients.get_or_init(|| Piped::new(ListenerContext::of(&self.runtime), CLIENTS)).clone()
    }

    /// A connection of a client that lasts so long.
    pub(crate) fn relay(&self, lasts: Duration) {
        let guard = self.runtime.drain.guard();
        tokio::spawn(async move {
            tokio::select! {
                () = sleep(lasts) => {}
                () = guard.shutdown().forced() => {}
            }
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.runtime.stop.cancel();
        self.serving.abort();
    }
}

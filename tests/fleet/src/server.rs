//! A server: the real code from the end of a TCP handshake on, built of its parts.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tunnel_agent::reach::Reach;
use tunnel_link::link::Congestion;
use tunnel_pki::TrustBundle;
use tunnel_routing::{Router, RouterConfig};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::{Drain, Shutdown};
use tunnel_server::agent_port::{AgentPort, Budget, Handover, LinkContext};
use tunnel_server::listener::ListenerContext;
use tunnel_server::metrics::Metrics;
use tunnel_server::peers::{self, PeerContext, Peers, Trust};
use tunnel_server::pki::{
    Ca, EnrollPolicy, EnrollService, KnownNodes, PkiMetrics, RevocationStore, Revocations, ServerCertificate,
    ServerNames, Standing,
};
use tunnel_server::runtime::settings::Settings;
use tunnel_server::session::{MOST_STREAMS, Sessions, Workers};

use crate::network::Net;

/// Time for connections to finish.
const DRAIN: Duration = Duration::from_secs(5);

/// As the product sets it on links with other servers.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// One process of a server.
pub(crate) struct Server {
    pub(crate) id: String,
    /// Number of the server, and of this process of it.
    pub(crate) process: (usize, usize),
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) peers: Arc<Peers>,
    handover: watch::Sender<Handover>,
    draining: CancellationToken,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    port: Arc<AgentPort>,
    _certificate: ServerCertificate,
    _followed: Followed,
}

/// What a server follows. None of it ends before the server.
type Followed = (
    watch::Sender<Arc<TrustBundle>>,
    watch::Sender<Arc<Settings>>,
    watch::Sender<Arc<Revocations>>,
    watch::Sender<Option<Arc<KnownNodes>>>,
);

/// Address of the server with this index.
pub(crate) fn address(index: usize) -> SocketAddr {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)), 10262)
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

impl Server {
    /// Starts a server at its address. If there is one already, new connections are this one's.
    pub(crate) fn start(
        net: &Net,
        ca: &Ca,
        state_dir: &Path,
        process: (usize, usize),
        count: usize,
        files: u32,
    ) -> Result<Self> {
        let (index, id) = (process.0, id_of(process));
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        let config =
            RouterConfig::new("198.18.0.0/15".parse()?, "fd9e:706f:7374:6572::/64".parse()?, [10250]);
        let router = Arc::new(Router::new(config, &mut registry));
        let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
        let (bundle, trusted) = watch::channel(Arc::new(ca.state()?.bundle().clone()));
        let (draining, stop) = (CancellationToken::new(), CancellationToken::new());
        let (handover, handed_over) = watch::channel(Handover::Nothing);
        let revocations = watch::Sender::<Arc<Revocations>>::default();
        let (settings, set) = watch::channel(Arc::default());
        let (nodes, known_nodes) = watch::channel(None);
        let standing = Standing::new(revocations.subscribe(), known_nodes, true);
        let forced = CancellationToken::new();
        let context = LinkContext {
            server_id: id.clone(),
            bundle: trusted.clone(),
            settings: set,
            sessions: sessions.clone(),
            standing: standing.clone(),
            metrics: metrics.clone(),
            draining: draining.clone(),
            handover: handed_over,
            forced: forced.clone(),
            stop: stop.clone(),
            congestion: Congestion::System,
            most_streams: MOST_STREAMS,
            drain_timeout: DRAIN,
        };
        let certificate =
            ServerCertificate::start(ca.clone(), ServerNames::default(), &id, PkiMetrics::default())?;
        let policy = EnrollPolicy { standing: standing.clone(), tokens: true };
        let enroll = EnrollService::new(certificate.ca(), ca.state_dir(), policy, PkiMetrics::default());
        let workers = Arc::new(Workers::here());
        let peers = Arc::new(Peers::new(router.clone()));
        let listeners = ListenerContext {
            router,
            sessions: sessions.clone(),
            peers: peers.clone(),
            metrics,
            drain: Drain::new(Shutdown::new()),
        };
        let budget = Budget::of(files, 1 << 30);
        let tls = certificate.tls();
        let port = AgentPort::new(tls, workers.clone(), enroll, context, listeners, None, &budget);
        let address = address(index);
        let others = (0..count).map(self::address).map(host_port).collect::<BTreeSet<_>>();
        let to_peers = PeerContext {
            server_id: id.clone(),
            tls: certificate.peer_tls(),
            workers,
            peers: peers.clone(),
            reach: Reach::over(net.at(address.ip(), KEEPALIVE)),
            redirector: None,
            trust: Trust {
                roots: trusted,
                standing,
                revocations: RevocationStore::new(state_dir),
                readmissions: true,
                drain_timeout: DRAIN,
            },
            most_streams: MOST_STREAMS,
            forced,
            stop: stop.clone(),
        };
        let tasks = vec![
            tokio::spawn(port.clone().shut_out()),
            tokio::spawn(port.clone().serve(net.listen(address))),
            tokio::spawn(peers::follow(Arc::new(to_peers), watch::channel(Arc::new(others)).1)),
        ];
        Ok(Self {
            id,
            process,
            sessions,
            peers,
            handover,
            draining,
            stop,
            tasks,
            port,
            _certificate: certificate,
            _followed: (bundle, settings, revocations, nodes),
        })
    }

    /// True if it accepts agents, and keeps those that it has.
    pub(crate) fn is_settled(&self) -> bool {
        *self.handover.borrow() == Handover::Nothing && !self.draining.is_cancelled()
    }

    pub(crate) fn epoch(&self, node: &NodeName) -> Option<u64> {
        self.sessions.get(node).map(|session| session.epoch)
    }

    /// Hands its agents over to the successor that listens at its address now, and ends once they have gone.
    pub(crate) async fn hand_over(self) {
        let over = Duration::from_millis(500);
        self.handover.send_replace(Handover::Agents { over });
        let mut changed = self.sessions.changed();
        let gone = async { while !self.sessions.live().is_empty() && changed.changed().await.is_ok() {} };
        // As long as a server waits for agents that do not come.
        let _ = tokio::time::timeout(DRAIN, gone).await;
        self.handover.send_replace(Handover::All);
        self.draining.cancel();
        let _ = tokio::time::timeout(DRAIN * 2, self.port.closed()).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

//! Servers that come and go, followed through the API server, with real sessions.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use postern_fake_kube::{ApiServer, eventually};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tunnel_agent::kube::discover::Discovery;
use tunnel_agent::kube::node as node_ranges;
use tunnel_agent::reach::Reach;
use tunnel_agent::runtime::Runtime;
use tunnel_agent::session::{LinkPhase, LinkSet};
use tunnel_link::link::Congestion;
use tunnel_pki::enrol::{IdentityKeeper, IdentityMetrics, Recovery};
use tunnel_pki::{AgentIdentity, TrustBundle};
use tunnel_routing::{Router, RouterConfig};
use tunnel_runtime::accept::Gate;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::{Drain, Shutdown};
use tunnel_server::agent_port::{AgentPort, Budget, Handover, LinkContext};
use tunnel_server::listener::ListenerContext;
use tunnel_server::peers::{self, PeerContext, Peers, Trust};
use tunnel_server::pki::{
    EnrollPolicy, EnrollService, KnownNodes, PkiMetrics, RevocationStore, Revocations, Standing,
};
use tunnel_server::runtime::settings::Settings;
use tunnel_server::session::{MOST_STREAMS, Sessions, Threads, Workers};

use super::{agent_api, links};
use crate::harness::{TestServer, node};

pub(super) const SERVICES: &str = "/api/v1/namespaces/kube-system/services";
pub(super) const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";
pub(super) const SERVICE: &str = "x-tunnel-server-svc";

/// Time for connections on links whose certificate is over.
pub(super) const DRAIN: Duration = Duration::from_secs(1);

/// A server's agent port: real sessions.
pub(crate) struct Port {
    pub(crate) address: String,
    id: String,
    pub(crate) sessions: Arc<Sessions>,
    pub(super) peers: Arc<Peers>,
    pub(crate) workers: Arc<Workers>,
    _threads: Threads,
    pub(crate) router: Arc<Router>,
    pub(crate) revocations: watch::Sender<Arc<Revocations>>,
    /// None if the inventory is not known.
    pub(crate) nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub(super) standing: Standing,
    stop: CancellationToken,
    /// Those in force. The sessions follow it, and end with it.
    pub(super) roots: watch::Sender<Arc<TrustBundle>>,
    /// Takes what the other servers tell.
    pub(super) store: RevocationStore,
    pub(super) settings: watch::Sender<Arc<Settings>>,
    registry: Registry,
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Port {
    /// Another server of this installation.
    pub(crate) async fn of(server: &TestServer, id: &str) -> Self {
        Self::with_links_of(MOST_STREAMS, server, id).await
    }

    /// A server whose links open so many streams before others take their places.
    pub(super) async fn with_links_of(most_streams: u32, server: &TestServer, id: &str) -> Self {
        let mut registry = Registry::default();
        let metrics = tunnel_server::metrics::Metrics::new(&mut registry);
        let config = RouterConfig::new(
            "198.18.0.0/15".parse().unwrap(),
            "fd9e:706f:7374:6572::/64".parse().unwrap(),
            [10250],
        );
        let router = Arc::new(Router::new(config, &mut registry));
        let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
        let (bundle, trusted) = watch::channel(Arc::new(server.ca.state().unwrap().bundle().clone()));
        let (settings, known) = watch::channel(Arc::default());
        let stop = CancellationToken::new();
        let revocations = watch::Sender::<Arc<Revocations>>::default();
        let (nodes, known_nodes) = watch::channel(None);
        let standing = Standing::new(revocations.subscribe(), known_nodes, true);
        let context = LinkContext {
            server_id: id.to_owned(),
            bundle: trusted,
            settings: known,
            sessions: sessions.clone(),
            standing: standing.clone(),
            metrics: metrics.clone(),
            draining: CancellationToken::new(),
            handover: watch::channel(Handover::Nothing).1,
            forced: CancellationToken::new(),
            stop: stop.clone(),
            congestion: Congestion::System,
            most_streams,
            drain_timeout: DRAIN,
        };
        let (workers, threads) = Workers::start(1).unwrap();
        let enroll = EnrollService::new(
            server.certificate.ca.clone(),
            server.state_dir(),
            EnrollPolicy { standing: standing.clone(), tokens: true },
            PkiMetrics::default(),
        );
        let peers = Arc::new(Peers::new(router.clone()));
        let listeners = ListenerContext {
            router: router.clone(),
            sessions: sessions.clone(),
            peers: peers.clone(),
            metrics,
            workers: workers.clone(),
            drain: Drain::new(Shutdown::default()),
        };
        let budget = Budget::of(1024, 1 << 30);
        let tls = server.certificate.tls.clone();
        let port = AgentPort::new(tls, workers.clone(), enroll, context, listeners, None, &budget);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(port.clone().shut_out());
        tokio::spawn(port.serve(Gate::new(true).guard(listener)));
        Self {
            address,
            id: id.to_owned(),
            sessions,
            peers,
            workers,
            _threads: threads,
            router,
            revocations,
            nodes,
            standing,
            stop,
            roots: bundle,
            store: RevocationStore::new(&server.directory.path().join(id)),
            settings,
            registry,
        }
    }

    /// Follows the nodes of another server of this installation. The task ends once this port is dropped.
    pub(super) fn follow(&self, server: &TestServer, other: &Self) -> JoinHandle<()> {
        self.follow_all(server, watch::channel(Arc::new(BTreeSet::from([other.host_port()]))).1)
    }

    /// The same for the servers at each of the addresses.
    pub(super) fn follow_all(
        &self,
        server: &TestServer,
        addresses: watch::Receiver<Arc<BTreeSet<HostPort>>>,
    ) -> JoinHandle<()> {
        let context = PeerContext {
            server_id: self.id.clone(),
            tls: server.certificate.peer_tls.clone(),
            workers: self.workers.clone(),
            peers: self.peers.clone(),
            reach: Reach { congestion: Congestion::System, ..Reach::default() },
            redirector: None,
            trust: Trust {
                clock: Clock::default(),
                roots: self.roots.subscribe(),
                standing: self.standing.clone(),
                revocations: self.store.clone(),
                readmissions: true,
                drain_timeout: DRAIN,
            },
            most_streams: MOST_STREAMS,
            forced: CancellationToken::new(),
            stop: self.stop.clone(),
        };
        tokio::spawn(peers::follow(Arc::new(context), addresses))
    }

    /// Number of handshakes that resumed a session.
    pub(crate) fn resumed(&self) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let name = r#"agent_tls_handshakes_total{resumed="true"} "#;
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
    }

    pub(super) fn host_port(&self) -> HostPort {
        self.address.parse().unwrap()
    }

    fn port(&self) -> u16 {
        self.address.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    pub(super) fn has_edge_1(&self) -> bool {
        self.sessions.live().iter().eq([&node("edge-1")])
    }
}

/// The parts of an agent that deal with servers.
struct Agent {
    discovery: Discovery,
    links: Arc<LinkSet>,
    runtime: Runtime,
    _keeper: IdentityKeeper,
    _announced: mpsc::Receiver<tunnel_pki::enrol::Announced>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.runtime.shutdown.force();
    }
}

impl Agent {
    async fn start(api: &ApiServer, server: &TestServer, identity: &AgentIdentity, state_dir: &Path) -> Self {
        let discovery = Discovery::start(agent_api(api).await, SERVICE, state_dir);
        let keeper = IdentityKeeper::start(
            server.agent("edge-1", "edge-1", None),
            identity.with_bundle(identity.bundle.clone()),
            IdentityMetrics::default(),
            Recovery::Token,
        );
        let (links, runtime, announced) = links(state_dir, keeper.subscribe());
        tokio::spawn(links.clone().follow(discovery.servers()));
        Self { discovery, links, runtime, _keeper: keeper, _announced: announced }
    }

    fn attached_to(&self) -> Vec<String> {
        let links = self.links.status().into_iter();
        links.filter(|link| link.phase == LinkPhase::Attached).map(|link| link.address).collect()
    }

    async fn until(&self, servers: &[&Port]) {
        let wanted: BTreeSet<_> = servers.iter().map(|port| port.address.clone()).collect();
        let what = format!("attached to {wanted:?} and no other");
        let waiting = eventually(&what, || {
            let links = self.links.status();
            let all: BTreeSet<_> = links.iter().map(|link| link.address.clone()).collect();
            let attached = BTreeSet::from_iter(self.attached_to());
            (attached == wanted && all == wanted).then_some(())
        });
        waiting.await;
        for port in servers {
            eventually("the server has the session", || port.has_edge_1().then_some(())).await;
        }
    }
}

fn balancer(port: &Port) -> Value {
    json!({
        "metadata": {"name": SERVICE},
        "spec": {"type": "LoadBalancer", "ports": [{"name": "tcp", "port": port.port()}]},
        "status": {"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}]}},
    })
}

async fn agent(api: &ApiServer) -> (TestServer, AgentIdentity, std::path::PathBuf) {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let state_dir = config.state_dir;
    assert!(api.dir().exists());
    (server, identity, state_dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_moves_to_the_servers_of_the_service() {
    let api = ApiServer::start();
    let (server, identity, state_dir) = agent(&api).await;
    let (a, b) = (Port::of(&server, "server-a").await, Port::of(&server, "server-b").await);
    // No Service yet: the agent waits, and reports the reason.
    let agent = Agent::start(&api, &server, &identity, &state_dir).await;
    let trouble = eventually("it says what is missing", || agent.discovery.trouble()).await;
    assert!(trouble.contains("Service kube-system/x-tunnel-server-svc: there is none"), "{trouble}");
    api.put(SERVICES, balancer(&a));
    agent.until(&[&a]).await;
    assert_eq!(agent.discovery.trouble(), None);

    // The address changes: the old server is left only once the new one is attached.
    api.put(SERVICES, balancer(&b));
    agent.until(&[&b]).await;
    eventually("the old one knows", || a.sessions.live().is_empty().then_some(())).await;

    // Nothing that the API server reports, and no outage of it, ends the tunnel.
    api.edit(SERVICES, SERVICE, |service| service["status"]["loadBalancer"]["ingress"] = json!([]));
    let trouble = eventually("it says so", || agent.discovery.trouble()).await;
    assert!(trouble.contains("no address yet"), "{trouble}");
    api.remove(SERVICES, SERVICE);
    eventually("it says so too", || agent.discovery.trouble().filter(|text| text.contains("there is none")))
        .await;
    assert_eq!(agent.attached_to(), std::slice::from_ref(&b.address));
    api.down();
    eventually("the loss is known", || agent.discovery.trouble().filter(|text| text.contains("onnect")))
        .await;
    assert_eq!(agent.attached_to(), std::slice::from_ref(&b.address));

    // A restart while the API server is down.
    drop(agent);
    let agent = Agent::start(&api, &server, &identity, &state_dir).await;
    agent.until(&[&b]).await;
    api.put(SERVICES, balancer(&a));
    api.up();
    agent.until(&[&a]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_without_a_server_does_not_end_a_working_tunnel() {
    let api = ApiServer::start();
    let (server, identity, state_dir) = agent(&api).await;
    let a = Port::of(&server, "server-a").await;
    api.put(SERVICES, balancer(&a));
    let agent = Agent::start(&api, &server, &identity, &state_dir).await;
    agent.until(&[&a]).await;
    let nothing = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    api.edit(SERVICES, SERVICE, |service| service["spec"]["ports"][0]["port"] = json!(nothing));
    let nowhere = format!("127.0.0.1:{nothing}");
    eventually("the new address was tried", || {
        let links = agent.links.status();
        let link = links.iter().find(|link| link.address == nowhere)?;
        link.last_error.clone()
    })
    .await;
    assert_eq!(agent.attached_to(), std::slice::from_ref(&a.address));
    assert!(a.has_edge_1());

    // Another address of the same server: the agent moves there once and does not alternate.
    let forward = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = forward.local_addr().unwrap().port();
    let target = a.address.clone();
    tokio::spawn(async move {
        while let Ok((mut from, _)) = forward.accept().await {
            let target = target.clone();
            tokio::spawn(async move {
                let mut to = tokio::net::TcpStream::connect(target).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            });
        }
    });
    api.edit(SERVICES, SERVICE, |service| service["spec"]["ports"][0]["port"] = json!(other));
    eventually("it is attached there, and only there", || {
        let links = agent.links.status();
        (links.len() == 1 && agent.attached_to() == [format!("127.0.0.1:{other}")]).then_some(())
    })
    .await;
    eventually("the server has the session", || a.has_edge_1().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_port_leads_to_every_server_that_stays() {
    let api = ApiServer::start();
    let (server, identity, state_dir) = agent(&api).await;
    // One node port on several nodes: the same port on several addresses of loopback.
    let a = Port::of(&server, "server-a").await;
    let slice = |name: &str, address: &str, terminating: bool| {
        json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{
                "addresses": [address],
                "conditions": {"ready": !terminating, "terminating": terminating},
            }],
        })
    };
    api.put(SLICES, slice("a", "127.0.0.1", true));
    api.put(
        SLICES,
        json!({
            "metadata": {"name": "other", "labels": {"kubernetes.io/service-name": "another"}},
            "addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.9"]}],
        }),
    );
    api.put(
        SERVICES,
        json!({
            "metadata": {"name": SERVICE},
            "spec": {"type": "NodePort", "ports": [{"name": "tcp", "port": 10262, "nodePort": a.port()}]},
        }),
    );
    let agent = Agent::start(&api, &server, &identity, &state_dir).await;
    let trouble = eventually("it says what is missing", || agent.discovery.trouble()).await;
    assert!(trouble.contains("no endpoint"), "{trouble}");
    api.put(SLICES, slice("a", "127.0.0.1", false));
    agent.until(&[&a]).await;
    api.put(SLICES, slice("b", "127.0.0.2", false));
    let addresses = |agent: &Agent| -> Vec<String> {
        agent.discovery.servers().borrow().iter().map(ToString::to_string).collect()
    };
    let both = [a.address.clone(), format!("127.0.0.2:{}", a.port())];
    eventually("both", || (addresses(&agent) == both).then_some(())).await;
    let session = |agent: &Agent| {
        agent.links.status().iter().find(|link| link.address == a.address).map(|link| link.epoch)
    };
    let before = session(&agent);
    // A probe that fails for a moment is no reason to leave a server.
    for name in ["a", "b"] {
        api.edit(SLICES, name, |slice| slice["endpoints"][0]["conditions"]["ready"] = json!(false));
    }
    let rest = slice("c", "127.0.0.3", false);
    api.put(SLICES, rest);
    let three = [both[0].clone(), both[1].clone(), format!("127.0.0.3:{}", a.port())];
    eventually("all three", || (addresses(&agent) == three).then_some(())).await;
    assert_eq!(agent.attached_to(), std::slice::from_ref(&a.address));
    assert_eq!(session(&agent), before, "the same session");
    api.remove(SLICES, "c");
    // All of them go simultaneously, as while every server restarts.
    api.edit(SLICES, "a", |slice| slice["endpoints"][0]["conditions"]["terminating"] = json!(true));
    api.remove(SLICES, "b");
    eventually("it says so", || agent.discovery.trouble()).await;
    assert_eq!(agent.attached_to(), std::slice::from_ref(&a.address));
    // Its watches break in every way.
    api.cut_watches();
    api.edit(SLICES, "a", |slice| slice["endpoints"][0]["conditions"]["terminating"] = json!(false));
    eventually("it is in order again", || agent.discovery.trouble().is_none().then_some(())).await;
    api.expire_watches();
    api.compact();
    api.put(SLICES, slice("b", "127.0.0.2", false));
    eventually("both again", || (addresses(&agent) == both).then_some(())).await;
}

/// The ranges of the default policy are known after a restart while the API server is down.
#[tokio::test(flavor = "multi_thread")]
async fn the_ranges_of_the_nodes_pods_survive_a_restart_without_the_api_server() {
    const NODES: &str = "/api/v1/nodes";
    let api = ApiServer::start();
    let state_dir = api.dir().join("agent");
    let start = async |pods: &Arc<ArcSwap<Vec<_>>>| {
        let (agent_api, state_dir) = (agent_api(&api).await, state_dir.clone());
        tokio::spawn(node_ranges::follow(agent_api, node("edge-1"), pods.clone(), state_dir)).abort_handle()
    };
    api.put(
        NODES,
        json!({"metadata": {"name": "edge-1"}, "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:1::/64"]}}),
    );
    let pods = Arc::<ArcSwap<Vec<_>>>::default();
    let following = start(&pods).await;
    let file = state_dir.join("pod-ranges.json");
    eventually("it is written", || file.exists().then_some(())).await;
    let expected = pods.load().clone();
    assert_eq!(expected.len(), 2);
    following.abort();
    api.down();
    // The file cannot grant more than the API server could.
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace(']', ",\"0.0.0.0/0\"]")).unwrap();
    let pods = Arc::<ArcSwap<Vec<_>>>::default();
    let following = start(&pods).await;
    eventually("they are known", || (!pods.load().is_empty()).then_some(())).await;
    assert_eq!(**pods.load(), *expected);
    following.abort();
}

//! Tests the notices to an attached agent, and their timing.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use prometheus_client::registry::Registry;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use tokio::io::DuplexStream;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tunnel_link::link::{Flow, LinkIo};
use tunnel_link::outcome::Outcome;
use tunnel_link::proto::agent_server::{Agent, AgentServer};
use tunnel_link::proto::{self, LoopbackPorts, Notice, NoticeAck, Segment, ServerDraining};
use tunnel_pki::TrustBundle;

use super::*;
use crate::admission::Budget;
use crate::agent_port::limits::ConnectionLimits;
use crate::agent_port::link::Handover;
use crate::metrics::{Connection, Metrics, Relayed};
use crate::pki::Standing;
use crate::runtime::settings::Settings;
use crate::session::{MOST_STREAMS, Sessions};

/// On the paused clock, longer than any pending event.
const LONG: Duration = Duration::from_secs(60);

/// The agent's end of the link.
struct FakeAgent {
    welcomes: mpsc::UnboundedSender<Welcome>,
    /// Lets it answer Attach.
    answer: Arc<Notify>,
    notices: mpsc::UnboundedSender<notice::Notice>,
    /// Number of next notices that it does not acknowledge.
    unanswered: Arc<AtomicUsize>,
    events: Arc<EventSender>,
}

/// Keeps the agent's event stream open, and sends on it.
type EventSender = Mutex<Option<mpsc::Sender<Result<AgentEvent, Status>>>>;

#[tonic::async_trait]
impl Agent for FakeAgent {
    type AttachStream = ReceiverStream<Result<AgentEvent, Status>>;
    type RelayStream = ReceiverStream<Result<Segment, Status>>;

    async fn attach(&self, request: Request<Welcome>) -> Result<Response<Self::AttachStream>, Status> {
        self.welcomes.send(request.into_inner()).unwrap();
        self.answer.notified().await;
        let (events, stream) = mpsc::channel(1);
        let hello = Hello { node: "edge-1".to_owned(), epoch: 1, ..Hello::default() };
        events.try_send(Ok(AgentEvent { event: Some(agent_event::Event::Hello(hello)) })).unwrap();
        *self.events.lock().unwrap() = Some(events);
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn relay(&self, _: Request<Streaming<Segment>>) -> Result<Response<Self::RelayStream>, Status> {
        Err(Status::unimplemented("nothing is relayed here"))
    }

    async fn notify(&self, request: Request<Notice>) -> Result<Response<NoticeAck>, Status> {
        self.notices.send(request.into_inner().notice.unwrap()).unwrap();
        if self.unanswered.load(Ordering::Relaxed) > 0 {
            self.unanswered.fetch_sub(1, Ordering::Relaxed);
            std::future::pending::<()>().await;
        }
        Ok(Response::new(NoticeAck {}))
    }
}

/// A server with one agent's link, which is being greeted.
struct Site {
    welcomes: mpsc::UnboundedReceiver<Welcome>,
    answer: Arc<Notify>,
    notices: mpsc::UnboundedReceiver<notice::Notice>,
    unanswered: Arc<AtomicUsize>,
    events: Arc<EventSender>,
    draining: CancellationToken,
    sessions: Arc<Sessions>,
    metrics: Metrics,
    inputs: Inputs,
}

/// Senders of the values that a context follows.
pub(in crate::agent_port) struct Inputs {
    bundle: watch::Sender<Arc<TrustBundle>>,
    settings: watch::Sender<Arc<Settings>>,
    handover: watch::Sender<Handover>,
}

fn roots() -> Arc<TrustBundle> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone();
    Arc::new(TrustBundle::new(vec![root]).unwrap())
}

impl Site {
    fn start() -> Self {
        let (welcomed, welcomes) = mpsc::unbounded_channel();
        let (noticed, notices) = mpsc::unbounded_channel();
        let (answer, unanswered) = (Arc::new(Notify::new()), Arc::<AtomicUsize>::default());
        let (near, far) = tokio::io::duplex(256 << 10);
        let events = Arc::<EventSender>::default();
        let agent = FakeAgent {
            welcomes: welcomed,
            answer: answer.clone(),
            notices: noticed,
            unanswered: unanswered.clone(),
            events: events.clone(),
        };
        tokio::spawn(serve(agent, far));
        let (context, inputs) = context();
        let (draining, sessions) = (context.draining.clone(), context.sessions.clone());
        let metrics = context.metrics.clone();
        let peer: SocketAddr = "203.0.113.9:40000".parse().unwrap();
        let presented = Presented {
            node: "edge-1".parse().unwrap(),
            credential: Arc::new(Credential::token(SystemTime::now())),
        };
        let limits = ConnectionLimits::new(&Budget::of(2_000, 1 << 30), 1);
        let place = limits.certified(&presented.node, peer.ip()).unwrap();
        tokio::spawn(run(context, (near, Arc::default()), peer, presented, Handle::current(), place));
        Self { welcomes, answer, notices, unanswered, events, draining, sessions, metrics, inputs }
    }

    /// A site whose agent is attached.
    async fn attached() -> Self {
        let site = Self::start();
        let mut changed = site.sessions.changed();
        site.answer.notify_one();
        changed.changed().await.unwrap();
        site
    }

    fn dial_on_loopback(&self, ports: impl Into<BTreeSet<u16>>) {
        let settings = Settings { loopback: ports.into(), ..Settings::default() };
        self.inputs.settings.send_replace(Arc::new(settings));
    }

    async fn next(&mut self) -> notice::Notice {
        tokio::time::timeout(LONG, self.notices.recv()).await.unwrap().unwrap()
    }
}

async fn serve(agent: FakeAgent, io: DuplexStream) {
    let mut link = link::server_builder().handshake::<_, Bytes>(io).await.unwrap();
    let service = AgentServer::new(agent);
    while let Some(Ok((request, respond))) = link.accept().await {
        tokio::spawn(grpc::serve(service.clone(), request, respond));
    }
}

pub(in crate::agent_port) fn context() -> (Arc<LinkContext>, Inputs) {
    let (bundle, settings, handover) =
        (watch::Sender::new(roots()), watch::Sender::default(), watch::Sender::default());
    let mut registry = Registry::default();
    let router = crate::runtime::without_nodes(&mut registry);
    let metrics = Metrics::new(&mut registry);
    let context = LinkContext {
        server_id: "server-a".to_owned(),
        bundle: bundle.subscribe(),
        settings: settings.subscribe(),
        sessions: Arc::new(Sessions::new(router, metrics.clone())),
        standing: Standing::default(),
        metrics,
        draining: CancellationToken::new(),
        handover: handover.subscribe(),
        forced: CancellationToken::new(),
        stop: CancellationToken::new(),
        congestion: Congestion::System,
        most_streams: MOST_STREAMS,
        drain_timeout: LONG,
    };
    (Arc::new(context), Inputs { bundle, settings, handover })
}

#[tokio::test(start_paused = true)]
async fn what_changes_while_an_agent_is_greeted_is_told_afterwards() {
    let mut site = Site::start();
    let welcome = site.welcomes.recv().await.unwrap();
    assert_eq!(welcome.trust_bundle, site.inputs.bundle.borrow().to_pem());
    let rotated = roots();
    site.inputs.bundle.send_replace(rotated.clone());
    site.dial_on_loopback([9100]);
    site.answer.notify_one();
    let told = [site.next().await, site.next().await];
    for wanted in [
        notice::Notice::TrustBundle(proto::TrustBundle { pem: rotated.to_pem() }),
        notice::Notice::LoopbackPorts(LoopbackPorts { ports: vec![9100] }),
    ] {
        assert!(told.contains(&wanted), "{wanted:?} is not among {told:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_told_again_what_it_did_not_acknowledge() {
    let mut site = Site::start();
    site.answer.notify_one();
    site.welcomes.recv().await.unwrap();
    site.unanswered.store(2, Ordering::Relaxed);
    site.dial_on_loopback([9100]);
    let ports = notice::Notice::LoopbackPorts(LoopbackPorts { ports: vec![9100] });
    for _ in 0..3 {
        assert_eq!(site.next().await, ports);
    }
    assert!(tokio::time::timeout(LONG, site.notices.recv()).await.is_err(), "told again all the same");
    site.unanswered.store(1, Ordering::Relaxed);
    let rotated = roots();
    site.inputs.bundle.send_replace(rotated.clone());
    let bundle = notice::Notice::TrustBundle(proto::TrustBundle { pem: rotated.to_pem() });
    assert_eq!((site.next().await, site.next().await), (bundle.clone(), bundle));
    site.unanswered.store(1, Ordering::Relaxed);
    site.draining.cancel();
    let leaving = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: false });
    assert_eq!((site.next().await, site.next().await), (leaving.clone(), leaving));
    assert!(tokio::time::timeout(LONG, site.notices.recv()).await.is_err(), "told again all the same");
}

#[tokio::test(start_paused = true)]
async fn many_agents_are_told_of_a_successor_one_after_the_other() {
    let node = "edge-1".parse().unwrap();
    let mut took = Vec::new();
    for _ in 0..30 {
        let mut site = Site::attached().await;
        let moving = |site: &Site| site.sessions.get(&node).unwrap().moving.load(Ordering::Relaxed);
        let start = tokio::time::Instant::now();
        site.inputs.handover.send_replace(Handover::Agents { over: LONG / 2 });
        let serving = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: true });
        assert_eq!(site.next().await, serving);
        assert!(moving(&site));
        took.push(start.elapsed());
        // That one dies, and the agent comes back.
        site.inputs.handover.send_replace(Handover::Nothing);
        site.sessions.get(&node).unwrap().replaced.cancel();
        let left = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: false });
        assert_eq!(site.next().await, left);

        // The successor dies before an agent was told, and the next one takes over everything at once.
        let mut site = Site::attached().await;
        site.inputs.handover.send_replace(Handover::Agents { over: LONG * 1_000_000 });
        tokio::task::yield_now().await;
        site.inputs.handover.send_replace(Handover::Nothing);
        assert!(tokio::time::timeout(LONG, site.notices.recv()).await.is_err());
        assert!(!moving(&site));
        site.inputs.handover.send_replace(Handover::Agents { over: LONG * 1_000_000 });
        tokio::task::yield_now().await;
        let start = tokio::time::Instant::now();
        site.inputs.handover.send_replace(Handover::All);
        let stopped = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: false });
        assert_eq!(site.next().await, stopped);
        assert!(start.elapsed() < Duration::from_secs(1));
    }
    let (early, late) = (took.iter().min().unwrap(), took.iter().max().unwrap());
    assert!(*early < LONG / 4 && *late > LONG / 4, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn many_agents_are_told_of_the_end_one_after_the_other() {
    let left = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: false });
    let mut took = Vec::new();
    for n in 0..30 {
        let mut site = Site::attached().await;
        for other in 0..800 {
            site.sessions.replace(&format!("other-{other}"), 1).await;
        }
        let start = Instant::now();
        if n % 2 == 0 {
            site.draining.cancel();
        } else {
            site.inputs.handover.send_replace(Handover::All);
        }
        assert_eq!(site.next().await, left);
        took.push(start.elapsed());
    }
    let (early, late) = (took.iter().min().unwrap(), took.iter().max().unwrap());
    assert!(*early < Duration::from_secs(1) && *late > Duration::from_secs(1), "{took:?}");
    assert!(*late < Duration::from_secs(3), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_to_attach_again_hears_of_everything_else_meanwhile() {
    let node = "edge-1".parse().unwrap();
    let left = notice::Notice::Draining(ServerDraining { timeout_seconds: 60, serving: false });
    for _ in 0..10 {
        let mut site = Site::attached().await;
        site.sessions.get(&node).unwrap().links.use_up();
        sleep(Duration::from_millis(1)).await;
        site.draining.cancel();
        let start = Instant::now();
        assert_eq!(site.next().await, left);
        assert!(start.elapsed() < Duration::from_millis(10), "{:?}", start.elapsed());

        // A successor comes and dies before it has the agent.
        let mut site = Site::attached().await;
        site.sessions.get(&node).unwrap().links.use_up();
        site.inputs.handover.send_replace(Handover::Agents { over: LONG * 1_000_000 });
        sleep(Duration::from_millis(1)).await;
        site.inputs.handover.send_replace(Handover::Nothing);
        assert_eq!(site.next().await, left);
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_whose_link_is_of_no_use_is_not_told_that_another_has_its_place() {
    let mut site = Site::attached().await;
    site.sessions.get(&"edge-1".parse().unwrap()).unwrap().close();
    assert_eq!(site.notices.recv().await, None);
}

#[tokio::test(start_paused = true)]
async fn why_a_session_was_ended_by_its_server_is_remembered() {
    let mut site = Site::attached().await;
    let node = "edge-1".parse().unwrap();
    site.sessions.get(&node).unwrap().refuse(Refusal::Unknown(node.clone()));
    assert!(matches!(site.notices.recv().await, Some(notice::Notice::Refused(_))));
    assert_eq!(site.notices.recv().await, None);
    let reason = site.sessions.last_end(&node).unwrap().reason.unwrap();
    assert!(reason.contains("is not in the server's inventory"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_session_ends_also_while_its_agent_does_not_acknowledge_a_notice() {
    let mut site = Site::attached().await;
    let node = "edge-1".parse().unwrap();
    site.unanswered.store(1, Ordering::Relaxed);
    site.inputs.bundle.send_replace(roots());
    assert!(matches!(site.next().await, notice::Notice::TrustBundle(_)));
    let (mut changed, start) = (site.sessions.changed(), Instant::now());
    site.sessions.get(&node).unwrap().refuse(Refusal::Unknown(node.clone()));
    changed.changed().await.unwrap();
    assert!(site.sessions.get(&node).is_none());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_sends_hello_again_loses_its_session() {
    let mut site = Site::attached().await;
    let node = "edge-1".parse().unwrap();
    let hello = AgentEvent { event: Some(agent_event::Event::Hello(Hello::default())) };
    let sender = site.events.lock().unwrap().clone().unwrap();
    sender.send(Ok(hello)).await.unwrap();
    assert_eq!(site.notices.recv().await, None);
    assert!(site.sessions.get(&node).is_none());
    let reason = site.sessions.last_end(&node).unwrap().reason.unwrap();
    assert_eq!(&*reason, "the agent sent Hello again");
}

#[tokio::test(start_paused = true)]
async fn a_session_ends_with_the_token_that_let_it_in() {
    let mut site = Site::attached().await;
    let node = "edge-1".parse().unwrap();
    let refusal = Refusal::Token("it has expired".to_owned());
    let another = Arc::new(Credential::token(SystemTime::now()));
    assert!(!site.sessions.refuse(&node, &another, &refusal), "of an earlier stream");
    let own = site.sessions.get(&node).unwrap().credential.load_full();
    assert!(site.sessions.refuse(&node, &own, &refusal));
    let Some(notice::Notice::Refused(refused)) = site.notices.recv().await else { panic!("no refusal") };
    assert!(refused.reason.ends_with("no longer accepted: it has expired"), "{}", refused.reason);
    assert_eq!(site.notices.recv().await, None);
    let reason = site.sessions.last_end(&node).unwrap().reason.unwrap();
    assert_eq!(*reason, *refused.reason);
}

/// A server holds one per agent. Measured: 3,408 bytes.
#[test]
fn the_future_of_a_session_stays_small() {
    fn size_of_future<A, B, C, D, E, F, G>(_: fn(A, B, C, D, E, F) -> G) -> usize {
        size_of::<G>()
    }
    let size = size_of_future(run::<LinkIo>);
    assert!(size <= 3450, "{size} bytes");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_asks_for_the_end_of_its_connections() {
    let site = Site::attached().await;
    let session = site.sessions.get(&"edge-1".parse().unwrap()).unwrap();
    let own = session.links.all()[0].flow.clone();
    let connection = |flow: &Arc<Flow>| {
        let client = "198.18.0.1:40000".parse().unwrap();
        let target = "192.168.50.2:10250".parse().unwrap();
        let connection = Connection::new("redirect", client, Some(session.node.clone()), target);
        let relayed = Relayed { traffic: Arc::default(), link: Some((0, flow.clone())) };
        connection.relayed.set(relayed).unwrap();
        site.metrics.live.enter(connection)
    };
    // The other one is the node's too: a successor of its agent relays it.
    let (ends, stays) = (connection(&own), connection(&Arc::default()));
    let sender = site.events.lock().unwrap().clone().unwrap();
    let tell = async |ending| {
        let event = Some(agent_event::Event::Draining(proto::Draining { ending }));
        sender.send(Ok(AgentEvent { event })).await.unwrap();
    };
    tell(false).await;
    assert!(tokio::time::timeout(LONG, ends.abort.triggered()).await.is_err());
    let start = Instant::now();
    tell(true).await;
    assert_eq!(ends.abort.triggered().await, (Outcome::Shutdown, ""));
    assert!((500..1000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    assert!(tokio::time::timeout(LONG, stays.abort.triggered()).await.is_err());
}

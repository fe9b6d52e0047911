//! Keeps a link with each of the other servers, and follows what each says that it has.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status, Streaming};
use tunnel_link::grpc::{Channel, origin};
use tunnel_link::link::{self, HANDSHAKE_TIMEOUT, LinkIo};
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::proto::{Holdings, WatchRequest};
use tunnel_pki::enrol::reach::{Reach, Server};
use tunnel_pki::enrol::{Announced, Refusals};
use tunnel_pki::{concerns_certificates, server_name};
use tunnel_runtime::NodeName;
use tunnel_runtime::backoff::{Backoff, jittered};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::text::printable;

use super::nodes::Peers;
use super::peer::Peer;
use super::trust::{Distrust, Trust, Unstored, learn, not_trusted};
use crate::session::{Link, Streams, Workers};

/// How often to look whether a link is needed.
const CHECK: Duration = Duration::from_millis(500);
/// How long to connect, for each step. Servers are near each other.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// Before this server's own address is dialled again.
const OWN: Duration = Duration::from_secs(60);
/// Before what a server has is asked for anew.
const AGAIN: Duration = Duration::from_millis(100);

/// Facts that a redirector, which has no CA, learns from its links.
pub struct RedirectorLinks {
    /// Takes the roots that servers tell.
    pub announced: mpsc::Sender<Announced>,
    pub refusals: Arc<Mutex<Refusals>>,
}

/// The means to connect with other servers.
pub struct PeerContext {
    pub server_id: String,
    /// Loaded for each connection.
    pub tls: Arc<ArcSwap<ClientConfig>>,
    pub workers: Arc<Workers>,
    pub peers: Arc<Peers>,
    /// How they are reached.
    pub reach: Reach,
    /// None: this server has the CA.
    pub redirector: Option<RedirectorLinks>,
    pub trust: Trust,
    /// How many streams a link opens before another one takes its place.
    pub most_streams: u32,
    /// Ends every connection: the time of the drain is up.
    pub forced: CancellationToken,
    /// Ends every link.
    pub stop: CancellationToken,
}

/// Keeps a link with the server at each of the addresses, as they change, until the stop. A link to an address that is
/// removed finishes what it relays: it ends with its server, or once that one is linked again and the link is idle.
pub async fn follow(context: Arc<PeerContext>, mut addresses: watch::Receiver<Arc<BTreeSet<HostPort>>>) {
    let mut kept: HashMap<HostPort, CancellationToken> = HashMap::new();
    let mut links = JoinSet::new();
    loop {
        let wanted = addresses.borrow_and_update().clone();
        context.peers.want(&wanted);
        kept.retain(|address, removed| {
            let stays = wanted.contains(address);
            if !stays {
                removed.cancel();
            }
            stays
        });
        for address in wanted.iter() {
            kept.entry(address.clone()).or_insert_with(|| {
                let removed = context.stop.child_token();
                links.spawn(keep(context.clone(), address.to_string(), removed.clone()));
                removed
            });
        }
        tokio::select! {
            changed = addresses.changed() => if changed.is_err() { break },
            Some(_) = links.join_next() => {}
            () = context.stop.cancelled() => break,
        }
    }
    context.stop.cancelled().await;
    while links.join_next().await.is_some() {}
}

/// Connects again and again until the address is removed.
async fn keep(context: Arc<PeerContext>, address: String, removed: CancellationToken) {
    let mut backoff = Backoff::new(PAUSE.0, PAUSE.1);
    let mut failing = LogOnce::default();
    // Links with servers that stop soon, those that are used up, and those to an address that was removed.
    let mut leaving = JoinSet::new();
    while !removed.is_cancelled() {
        // Those that have ended: an address may be kept for years.
        while leaving.try_join_next().is_some() {}
        let (worker, started) = (context.workers.next().clone(), Instant::now());
        let draining = CancellationToken::new();
        // It runs on the thread that owns the link.
        let work = connected(context.clone(), address.clone(), worker.clone(), draining.clone());
        let mut link = AbortOnDropHandle::new(worker.spawn(work));
        let ended = tokio::select! {
            ended = &mut link => ended,
            () = removed.cancelled() => {
                // The address may come back, and its server never have gone.
                draining.cancel();
                leaving.spawn(link);
                break;
            }
            () = draining.cancelled() => {
                tracing::debug!(server = address, "peer is draining or its link is used up, dialling again");
                leaving.spawn(link);
                // At once: the successor accepts already, and in a moment its agents are nowhere else. If there is none,
                // the attempt fails, and a pause follows as after any other.
                failing.clear();
                backoff.reset();
                continue;
            }
        };
        match ended {
            Ok(End::Itself) => {
                tracing::debug!(server = address, "ignoring this server's own address");
                backoff.reset();
                // A virtual address may move to another server.
                let _ = removed.run_until_cancelled(tokio::time::sleep(jittered(OWN, 0.5))).await;
                continue;
            }
            Ok(End::Failed(error)) => {
                // While another server has a link with this one, a new certificate is of no use.
                let refused = || error.concerns_identity() && context.peers.all().is_empty();
                if let Some(redirector) = context.redirector.as_ref().filter(|_| refused()) {
                    redirector.refusals.lock().add(Instant::now());
                }
                if failing.is_new(&error) {
                    tracing::warn!(server = address, %error, "failed to link with a peer, retrying");
                }
            }
            Ok(End::Lost { server_id, error }) => {
                failing.clear();
                // One that is lost right away each time is dialled no faster than one that is never there.
                if started.elapsed() >= PAUSE.1 {
                    backoff.reset();
                }
                tracing::warn!(server = address, server_id, %error, "peer link ended");
            }
            Ok(End::Stopped) => break,
            Err(error) => tracing::error!(server = address, %error, "peer link task panicked"),
        }
        let _ = removed.run_until_cancelled(tokio::time::sleep(backoff.next_delay())).await;
    }
    while leaving.join_next().await.is_some() {}
}

/// How a link with another server ended.
enum End {
    /// The address is this server's.
    Itself,
    /// It never was of use.
    Failed(Error),
    Lost {
        server_id: String,
        error: Error,
    },
    Stopped,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{step} took longer than {} s", CONNECT.as_secs())]
    Slow { step: &'static str },
    #[error("{step}: {source}")]
    Io { step: &'static str, source: io::Error },
    #[error("{}", link::reason(.0))]
    Link(#[from] h2::Error),
    #[error("the other server closed the connection")]
    Closed,
    #[error(transparent)]
    Dead(#[from] link::LinkDead),
    #[error("the other server did not send its nodes: {}", printable(.0.message(), 200))]
    Watch(Box<Status>),
    #[error("the other server sent node {0:?}: not the name of a node")]
    Node(String),
    #[error("closed: a forward request failed on this link")]
    Broken,
    #[error("superseded by a newer peer link")]
    Unneeded,
    #[error(transparent)]
    Distrust(#[from] Distrust),
}

impl Error {
    /// True if another certificate or other roots could fix it.
    fn concerns_identity(&self) -> bool {
        match self {
            Self::Io { source, .. } => concerns_certificates(source),
            // With TLS 1.3 the client learns only after its handshake that the server refuses its certificate.
            Self::Link(error) => error.get_io().is_some_and(concerns_certificates),
            Self::Watch(status) => status.code() == Code::Unauthenticated,
            _ => false,
        }
    }
}

async fn within<T, E>(step: &'static str, work: impl Future<Output = Result<T, E>>) -> Result<T, Error>
where
    E: Into<io::Error>,
{
    match tokio::time::timeout(CONNECT, work).await {
        Err(_) => Err(Error::Slow { step }),
        Ok(done) => done.map_err(|error| Error::Io { step, source: error.into() }),
    }
}

/// `draining` is cancelled when the other server says that it stops soon, or the link has opened as many streams as it may.
async fn connected(
    context: Arc<PeerContext>,
    address: String,
    worker: Handle,
    draining: CancellationToken,
) -> End {
    let stop = context.stop.clone();
    stop.run_until_cancelled(connect(&context, &address, worker, draining)).await.unwrap_or(End::Stopped)
}

async fn connect(context: &PeerContext, address: &str, worker: Handle, draining: CancellationToken) -> End {
    let (io, chain) = match handshake(context, address).await {
        Ok(done) => done,
        Err(error) => return End::Failed(error),
    };
    let flow = io.flow();
    let handshake = tokio::time::timeout(CONNECT, link::client_builder().handshake::<_, Bytes>(io)).await;
    let (send, mut connection) = match handshake {
        Ok(Ok(link)) => link,
        Ok(Err(error)) => return End::Failed(error.into()),
        Err(_) => return End::Failed(Error::Slow { step: "HTTP/2" }),
    };
    let Some(pings) = connection.ping_pong() else { return End::Failed(Error::Closed) };
    // A task of its own, so that relayed bytes wake only it.
    let mut driver = JoinSet::new();
    driver.spawn(link::drive(connection, flow.clone()));
    let mut client = PeerClient::with_origin(Channel::new(send.clone()), origin());
    let (first, told) = tokio::select! {
        biased;
        begun = tokio::time::timeout(HANDSHAKE_TIMEOUT, watch_holdings(&mut client, context)) => match begun {
            Ok(Ok(begun)) => begun,
            Ok(Err(status)) => return End::Failed(Error::Watch(Box::new(status))),
            Err(_) => return End::Failed(Error::Slow { step: "Watch" }),
        },
        ended = driver.join_next() => return End::Failed(ended_with(ended)),
    };
    let server_id = printable(&first.server_id, 128);
    context.peers.found(address, &server_id);
    if first.server_id == context.server_id {
        return End::Itself;
    }
    if let Err(refusal) = context.trust.standing.judge_server(&server_id) {
        return End::Failed(Distrust::from(refusal).into());
    }
    let told_by = (server_id.clone(), printable(&first.server_version, 64), address.to_owned());
    // Either way the server is dialled again, and this link finishes what it relays.
    let streams = Streams { most: context.most_streams, spent: draining.clone() };
    let link = Link::new(0, flow.clone(), context.forced.child_token(), send, worker, streams);
    let peer = Arc::new(Peer::new(told_by, link.clone(), context.stop.child_token(), draining));
    context.peers.join(&peer);
    let _joined = Joined { peers: context.peers.clone(), peer: peer.clone(), link };
    if let Some(redirector) = &context.redirector {
        *redirector.refusals.lock() = Refusals::default();
    }
    tracing::info!(server = address, server_id, version = peer.version, "peer link established");
    let error = tokio::select! {
        biased;
        ended = driver.join_next() => ended_with(ended),
        error = follow_holdings(&context.peers, &peer, (first, told), &mut client, context, chain.clone()) => error,
        distrust = not_trusted(&context.trust, &peer, &chain) => distrust.into(),
        dead = link::keep_alive_of_server(pings, &flow, || peer.stalls.sweep()) => dead.into(),
        () = peer.closed.cancelled() => Error::Broken,
        () = unneeded(&context.peers, &peer) => Error::Unneeded,
    };
    End::Lost { server_id, error }
}

/// The connection, and what the other server presented.
async fn handshake(context: &PeerContext, address: &str) -> Result<(LinkIo, Chain), Error> {
    let server = Server::Named(address.to_owned());
    let socket = within("TCP", context.reach.connect(&server)).await?.stream;
    link::tune_server_link(&socket);
    let connector = TlsConnector::from(context.tls.load_full());
    let stream = within("TLS", connector.connect(server_name(), socket)).await?;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default().into();
    Ok((LinkIo::new(stream), chain))
}

fn ended_with(ended: Option<Result<Result<(), h2::Error>, tokio::task::JoinError>>) -> Error {
    match ended {
        Some(Ok(Err(error))) => error.into(),
        _ => Error::Closed,
    }
}

/// Takes a server out of use, however the task of its link ends.
struct Joined {
    peers: Arc<Peers>,
    peer: Arc<Peer>,
    link: Arc<Link>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.peers.part(&self.peer);
        self.link.over.cancel();
    }
}

type Told = Streaming<Holdings>;
type Chain = Arc<[CertificateDer<'static>]>;

/// Begins to follow what the server has; returns its first message.
async fn watch_holdings(
    client: &mut PeerClient<Channel>,
    context: &PeerContext,
) -> Result<(Holdings, Told), Status> {
    let request = WatchRequest {
        server_id: context.server_id.clone(),
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut told = client.watch(request).await?.into_inner();
    let first = told.message().await?;
    Ok((first.ok_or_else(|| Status::unavailable("it ended before its first message"))?, told))
}

/// Follows what the server has. When it ends the stream, because it could not keep up, it is asked anew.
async fn follow_holdings(
    peers: &Peers,
    peer: &Arc<Peer>,
    (mut first, mut told): (Holdings, Told),
    client: &mut PeerClient<Channel>,
    context: &PeerContext,
    chain: Chain,
) -> Error {
    let mut unstored = Unstored::default();
    loop {
        let mut all = Some(HashSet::new());
        let mut next = Some(first);
        while let Some(mut holdings) = next {
            let revocations = std::mem::take(&mut holdings.revocations);
            learn(&context.trust, peer, revocations, &mut unstored).await;
            let bundle = std::mem::take(&mut holdings.trust_bundle);
            if let Some(redirector) = context.redirector.as_ref().filter(|_| !bundle.is_empty()) {
                let announced =
                    Announced { bundle, server: peer.address.clone(), server_chain: chain.clone() };
                // Closed: this server stops.
                let _ = redirector.announced.send(announced).await;
            }
            if let Err(error) = apply(peers, peer, holdings, &mut all) {
                return error;
            }
            next = loop {
                tokio::select! {
                    next = told.message() => match next {
                        Ok(next) => break next,
                        Err(status) => return Error::Watch(Box::new(status)),
                    },
                    () = unstored.due() => unstored.retry(&context.trust.revocations, &peer.server_id).await,
                }
            };
        }
        tokio::time::sleep(AGAIN).await;
        (first, told) = match watch_holdings(client, context).await {
            Ok(begun) => begun,
            Err(status) => return Error::Watch(Box::new(status)),
        };
    }
}

/// `all`: the nodes that were named, until everything was told.
fn apply(
    peers: &Peers,
    peer: &Arc<Peer>,
    holdings: Holdings,
    all: &mut Option<HashSet<NodeName>>,
) -> Result<(), Error> {
    let name = |name: String| name.parse::<NodeName>().map_err(|_| Error::Node(printable(&name, 253)));
    for node in holdings.gained {
        let node = name(node)?;
        if let Some(all) = all {
            all.insert(node.clone());
        }
        peers.gained(peer, &node);
    }
    for node in holdings.lost {
        let node = name(node)?;
        if let Some(all) = all {
            all.remove(&node);
        }
        peers.lost(peer, &node);
    }
    if holdings.draining {
        peer.draining.cancel();
    }
    if holdings.complete
        && let Some(all) = all.take()
    {
        peers.only(peer, &all);
    }
    Ok(())
}

/// Ends once this link relays nothing, and there is another one: it is used up, or the server said that it stops and goes on after
/// all, because its successor has died.
async fn unneeded(peers: &Peers, peer: &Arc<Peer>) {
    loop {
        tokio::time::sleep(CHECK).await;
        let stays = |other: &Arc<Peer>| other.server_id == peer.server_id && !other.is_draining();
        if peer.is_draining() && peer.links.connections() == 0 && peers.all().iter().any(stays) {
            return;
        }
    }
}

//! A link that another server or a redirector has dialled: it is told which nodes are attached here, and forwards
//! connections to them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::vec::IntoIter;

use tokio::sync::broadcast::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;
use tokio_stream::Iter;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::grpc;
use tunnel_link::link::{self, HANDSHAKE_TIMEOUT, LinkIo, Wire};
use tunnel_link::proto::peer_server::{Peer, PeerServer};
use tunnel_link::proto::{Holdings, Segment, StatusPart, StatusRequest, WatchRequest};
use tunnel_link::relay::PEER_RELAY_PATH;
use tunnel_runtime::text::printable;

use super::forwarded::{Forwarder, LISTENER, serve_forwarded};
use super::judged::Judged;
use super::link::{Handover, LinkContext};
use crate::admission::{Place, Shares};
use crate::listener::ListenerContext;
use crate::peers::Peers;
use crate::pki::{Refusal, Revocations};
use crate::session::Move;

/// Maximum number of nodes in one message.
const PART: usize = 1000;
/// Size of a part of the status, in bytes.
const STATUS_PART: usize = 64 << 10;
/// Maximum number of calls of a link at a time, besides forwarded connections. There is one that lasts, and one for each
/// page that is open at the other server.
const MOST_CALLS: usize = 16;

/// Serves the link of a server or a redirector until it ends. A redirector, which has no CA, also gets the roots. `shares`:
/// of the connections to forward.
pub(super) async fn serve(
    listeners: ListenerContext,
    stream: Box<TlsStream<Wire>>,
    (judged, peer): (Judged, SocketAddr),
    (place, shares): (Place<String>, Shares),
) {
    let (context, server_id, redirector) = (judged.context.clone(), judged.name(), judged.is_redirector());
    link::tune_server_link(stream.get_ref().0);
    let io = LinkIo::new(*stream);
    let flow = io.flow();
    let admitted = if redirector { shares.most_of(peer.ip()) } else { shares.limit };
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, link::admitting_builder(admitted).handshake(io));
    let Ok(Ok(mut link)) = handshake.await else {
        tracing::debug!(%peer, server_id, "HTTP/2 handshake with another server failed");
        return;
    };
    let Some(pings) = link.ping_pong() else { return };
    // Every server dials all addresses, and learns from the answer that one is its own.
    if server_id != context.server_id {
        context.metrics.handshake(if redirector { "redirector" } else { "peer" });
        tracing::info!(%peer, server_id, "incoming peer link established");
    }
    let refusal = judged.judge().err();
    let caller = Arc::new(Forwarder { server_id, peer, redirector, shares, flow: flow.clone() });
    let calls = Arc::new(Semaphore::new(MOST_CALLS));
    let service = PeerServer::new(PeerService {
        context: context.clone(),
        peers: listeners.peers.clone(),
        redirector,
        refusal: refusal.clone(),
        new_link: judged.new_link.clone(),
        watching: Arc::new(Semaphore::new(1)),
    });
    let refused = async {
        match &refusal {
            // It gets the reason first, in answer to its calls.
            Some(refusal) => {
                tokio::time::sleep(HANDSHAKE_TIMEOUT).await;
                refusal.clone()
            }
            None => judged.refused().await,
        }
    };
    let mut refused = std::pin::pin!(refused);
    // A separate task: relayed bytes wake this one, which must not poll everything else each time.
    let mut watching = JoinSet::new();
    let shared = flow.clone();
    watching.spawn(async move { link::keep_alive_of_server(pings, &shared, || ()).await });
    let end = loop {
        tokio::select! {
            biased;
            Some(ended) = watching.join_next() => {
                break ended.map_or_else(|error| error.to_string(), |dead| dead.to_string());
            }
            refusal = &mut refused => {
                context.metrics.session_refused(refusal.label());
                tracing::warn!(%peer, server_id = caller.server_id, reason = %refusal, "peer link refused");
                break refusal.to_string();
            }
            () = place.evicted() => {
                context.metrics.handshake("evicted");
                break "evicted: it has too many links with this server".to_owned();
            }
            accepted = link::accept(&mut link, &flow) => match accepted {
                Some(Ok((request, respond)))
                    if request.uri().path() == PEER_RELAY_PATH && refusal.is_none() =>
                {
                    if let Some(forwarding) = serve_forwarded(&listeners, &caller, request, respond) {
                        tokio::spawn(forwarding);
                    }
                }
                Some(Ok((request, mut respond))) => match calls.clone().try_acquire_owned() {
                    Ok(call) => {
                        let serving = grpc::serve(service.clone(), request, respond);
                        tokio::spawn(async move {
                            serving.await;
                            drop(call);
                        });
                    }
                    Err(_) => {
                        context.metrics.turned_away(LISTENER);
                        let reason = format!("this link has {MOST_CALLS} calls already");
                        grpc::refuse(&mut respond, &Status::resource_exhausted(reason));
                    }
                },
                Some(Err(error)) => break link::reason(&error),
                None => break "the other server closed the connection".to_owned(),
            },
        }
    };
    if caller.server_id != context.server_id {
        tracing::info!(%peer, server_id = caller.server_id, reason = end, "incoming peer link ended");
    }
}

struct PeerService {
    context: Arc<LinkContext>,
    /// Has this server's status.
    peers: Arc<Peers>,
    /// The client is one: it gets the roots too, and no status.
    redirector: bool,
    /// Set if nothing may be forwarded for this client.
    refusal: Option<Refusal>,
    /// Cancelled when the client is to make a new link.
    new_link: CancellationToken,
    /// Has one permit: each Watch copies the names of all nodes.
    watching: Arc<Semaphore>,
}

#[tonic::async_trait]
impl Peer for PeerService {
    type WatchStream = ReceiverStream<Result<Holdings, Status>>;
    type RelayStream = ReceiverStream<Result<Segment, Status>>;
    type StatusStream = Iter<IntoIter<Result<StatusPart, Status>>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if let Some(refusal) = &self.refusal {
            return Err(Status::unauthenticated(refusal.to_string()));
        }
        let Ok(watching) = self.watching.clone().try_acquire_owned() else {
            self.context.metrics.turned_away(LISTENER);
            tracing::debug!("second Watch of a peer link refused");
            return Err(Status::resource_exhausted("this link has a Watch already"));
        };
        let WatchRequest { server_id, server_version } = request.into_inner();
        let (server_id, version) = (printable(&server_id, 128), printable(&server_version, 64));
        tracing::debug!(server_id, version, "another server watches the attached nodes");
        let (sender, receiver) = mpsc::channel(1);
        let new_link = self.new_link.clone();
        tokio::spawn(tell(self.context.clone(), self.redirector, new_link, (sender, watching)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn relay(&self, _: Request<Streaming<Segment>>) -> Result<Response<Self::RelayStream>, Status> {
        // `serve` handles Relay streams before tonic sees them, unless the client may have none.
        Err(Status::permission_denied("nothing is forwarded for this client"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<Self::StatusStream>, Status> {
        if let Some(refusal) = &self.refusal {
            return Err(Status::unauthenticated(refusal.to_string()));
        }
        // It tells who connects to what, which a redirector's host has no business to know.
        if self.redirector {
            return Err(Status::permission_denied("a server does not tell redirectors its status"));
        }
        let status = self.peers.own_status().ok_or_else(|| Status::unavailable("its admin port is off"))?;
        // Not on the thread of the links: it takes long with many nodes.
        let json = tokio::task::spawn_blocking(move || status().to_string()).await;
        let json = json.map_err(|error| Status::internal(error.to_string()))?.into_bytes();
        let parts: Vec<_> =
            json.chunks(STATUS_PART).map(|part| Ok(StatusPart { json: part.to_vec() })).collect();
        Ok(Response::new(tokio_stream::iter(parts)))
    }
}

/// Sends the attached nodes, until either server ends or the other one is too slow; it then asks again.
///
/// The permit is dropped before the sender, at whose end the client asks anew.
async fn tell(
    context: Arc<LinkContext>,
    roots: bool,
    new_link: CancellationToken,
    (sender, _watching): (mpsc::Sender<Result<Holdings, Status>>, OwnedSemaphorePermit),
) {
    let mut revocations = context.standing.revocations();
    let mut bundle = context.bundle.clone();
    let trust_bundle = if roots { bundle.borrow_and_update().to_pem() } else { String::new() };
    // State in the first message: sending all attached nodes may take a while.
    let mut handover = context.handover.clone();
    let taken_over = *handover.borrow_and_update() != Handover::Nothing;
    let mut draining_told = taken_over || context.draining.is_cancelled() || new_link.is_cancelled();
    let (nodes, mut moves) = context.sessions.follow();
    let first = Holdings {
        server_id: context.server_id.clone(),
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        draining: draining_told,
        trust_bundle,
        ..Holdings::default()
    };
    let mut parts = vec![first];
    parts.extend(nodes.chunks(PART).map(|part| Holdings {
        gained: part.iter().map(ToString::to_string).collect(),
        ..Holdings::default()
    }));
    parts.extend(revoked(&revocations.borrow_and_update()));
    parts.push(Holdings { complete: true, ..Holdings::default() });
    loop {
        for part in parts {
            if sender.send(Ok(part)).await.is_err() {
                return;
            }
        }
        parts = tokio::select! {
            next = moves.recv() => {
                // An error: some were missed, or there are none any more.
                let next = next.ok().and_then(|next| gathered(next, &mut moves));
                let Some(holdings) = next else { return };
                vec![holdings]
            }
            () = async {
                tokio::select! {
                    () = context.draining.cancelled() => {}
                    () = new_link.cancelled() => {}
                    Ok(()) = handover.changed() => {}
                }
            }, if !draining_told => {
                draining_told = true;
                vec![Holdings { draining: true, ..Holdings::default() }]
            }
            Ok(()) = bundle.changed(), if roots => {
                let trust_bundle = bundle.borrow_and_update().to_pem();
                vec![Holdings { trust_bundle, ..Holdings::default() }]
            }
            Ok(()) = revocations.changed() => revoked(&revocations.borrow_and_update()),
            () = context.stop.cancelled() => return,
            () = sender.closed() => return,
        };
    }
}

/// All revocations, also those that have ended: the other server keeps the newest of each.
fn revoked(known: &Revocations) -> Vec<Holdings> {
    let records: Vec<_> =
        known.records.values().filter_map(|record| serde_json::to_string(record).ok()).collect();
    records.chunks(PART).map(|part| Holdings { revocations: part.to_vec(), ..Holdings::default() }).collect()
}

/// Merges the move and those that have arrived since into one message. Only the last one of a node counts. None if some
/// were missed.
fn gathered(first: Move, moves: &mut broadcast::Receiver<Move>) -> Option<Holdings> {
    let mut last = HashMap::from([(first.node, first.here)]);
    while last.len() < PART {
        match moves.try_recv() {
            Ok(next) => {
                last.insert(next.node, next.here);
            }
            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            Err(TryRecvError::Lagged(_)) => return None,
        }
    }
    let mut holdings = Holdings::default();
    for (node, here) in last {
        let names = if here { &mut holdings.gained } else { &mut holdings.lost };
        names.push(node.to_string());
    }
    Some(holdings)
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use tokio_stream::StreamExt as _;
    use tonic::Code;
    use tunnel_runtime::admin;

    use super::*;
    use crate::agent_port::attach::tests::context;

    #[tokio::test]
    async fn a_server_that_begins_to_stop_while_it_tells_what_it_has_says_so() {
        let (context, _inputs) = context();
        let (sender, mut told) = mpsc::channel(1);
        let watching = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let telling =
            tokio::spawn(tell(context.clone(), false, CancellationToken::new(), (sender, watching)));
        while told.is_empty() {
            tokio::task::yield_now().await;
        }
        context.draining.cancel();
        let mut said = Vec::new();
        for _ in 0..3 {
            let holdings: Result<Holdings, Status> = told.recv().await.unwrap();
            let Holdings { complete, draining, .. } = holdings.unwrap();
            said.push((complete, draining));
        }
        assert_eq!(said, [(false, false), (true, false), (false, true)]);
        drop(told);
        telling.await.unwrap();
    }

    #[tokio::test]
    async fn a_redirector_is_not_told_the_status() {
        let (context, _inputs) = context();
        let router = crate::runtime::without_nodes(&mut Registry::default());
        let peers = Arc::new(Peers::new(router));
        let service = |redirector, refusal| PeerService {
            context: context.clone(),
            peers: peers.clone(),
            redirector,
            refusal,
            new_link: CancellationToken::new(),
            watching: Arc::new(Semaphore::new(1)),
        };
        let ask = async |redirector, refusal| {
            let told = service(redirector, refusal).status(Request::new(StatusRequest {})).await;
            let parts = told.map_err(|status| status.code())?.into_inner().collect::<Vec<_>>().await;
            Ok::<_, Code>(parts.into_iter().flat_map(|part| part.unwrap().json).collect::<Vec<u8>>())
        };
        assert_eq!(ask(false, None).await, Err(Code::Unavailable), "its admin port is off");
        let long = "x".repeat(3 * STATUS_PART);
        let status: Arc<admin::Status> = Arc::new(move || serde_json::json!(long));
        peers.tell(&status);
        let told = ask(false, None).await.unwrap();
        assert_eq!(String::from_utf8(told).unwrap(), status().to_string());
        assert_eq!(ask(true, None).await, Err(Code::PermissionDenied));
        let refusal = Refusal::Retired;
        assert_eq!(ask(false, Some(refusal)).await, Err(Code::Unauthenticated));
    }
}

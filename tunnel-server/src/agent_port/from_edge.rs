//! A link over which an agent opens streams for workloads on its node, to destinations in the cloud or on another node.
//! The policy decides which destinations they may reach.

use std::future::ready;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tonic::Code;
use tunnel_link::grpc::response;
use tunnel_link::link::{self, Flow, HANDSHAKE_TIMEOUT, LinkIo};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{
    Abort, EDGE_RELAY_PATH, Relay, Side, StallBound, TARGET_HEADER, Traffic, prepare_socket,
};
use tunnel_runtime::NodeName;

use super::forwarded::refuse;
use super::judged::Judged;
use crate::admission::{Place, Share, Shares};
use crate::listener::{self, EDGE, Reception, Workload, WorkloadMap};
use crate::metrics::Connection;
use crate::pki::Refusal;

/// Maximum length of a target; longer ones are not a host and port.
const MAX_TARGET: usize = 300;

/// Settings of such links.
#[derive(Clone)]
pub struct FromEdge {
    pub(crate) reception: Reception,
    /// Limits both the connections and the links.
    pub(crate) shares: Shares,
}

/// An agent, as identified by its certificate.
pub(super) struct Agent {
    pub(super) node: NodeName,
    pub(super) judged: Judged,
    pub(super) peer: SocketAddr,
}

/// Serves the link until it ends or the agent may no longer have one.
pub(super) async fn serve(
    from_edge: FromEdge,
    stream: Box<TlsStream<TcpStream>>,
    agent: Agent,
    (linked, share): (Place<NodeName>, Share),
) {
    let io = LinkIo::new(*stream);
    let flow = io.flow();
    let builder = link::admitting_builder(from_edge.shares.most_of(agent.peer.ip()));
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, builder.handshake(io));
    let Ok(Ok(mut link)) = handshake.await else {
        return tracing::debug!(peer = %agent.peer, "HTTP/2 handshake with an agent failed");
    };
    let Some(pings) = link.ping_pong() else { return };
    let (context, node) = (agent.judged.context.clone(), agent.node.clone());
    context.metrics.handshake("outbound");
    tracing::debug!(peer = %agent.peer, %node, "outbound link attached");
    let stalls = StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize);
    let on_link = Arc::new(OnLink { from_edge, flow: flow.clone(), stalls, agent });
    let mut dead = std::pin::pin!(link::keep_alive(pings, &flow, || on_link.stalls.sweep()));
    let mut refused = std::pin::pin!(on_link.agent.judged.refused());
    let mut draining = false;
    let end = loop {
        tokio::select! {
            biased;
            dead = &mut dead => break dead.to_string(),
            refusal = &mut refused => {
                context.metrics.session_refused(refusal.label());
                on_link.withdraw(&refusal);
                break refusal.to_string();
            }
            () = linked.evicted() => {
                context.metrics.handshake("evicted");
                break "evicted: the agent has too many outbound links".to_owned();
            }
            () = async {
                tokio::select! {
                    () = context.draining.cancelled() => {}
                    () = on_link.agent.judged.new_link.cancelled() => {}
                }
            }, if !draining => {
                // The agent uses another server for new streams, or a new link.
                draining = true;
                link.graceful_shutdown();
            }
            accepted = link::accept(&mut link, &flow) => match accepted {
                Some(Ok((request, mut respond))) => match on_link.admit(&request) {
                    Ok(place) => drop(tokio::spawn(on_link.clone().relay(request, respond, place))),
                    Err((code, reason)) => refuse(&mut respond, code, reason),
                },
                Some(Err(error)) => break link::reason(&error),
                None => break "the agent closed it".to_owned(),
            },
        }
    };
    drop(share);
    tracing::debug!(%node, reason = end, "outbound link ended");
}

struct OnLink {
    from_edge: FromEdge,
    flow: Arc<Flow>,
    stalls: StallBound,
    agent: Agent,
}

impl OnLink {
    /// Ends the workloads' connections with the reason for which their link ends.
    fn withdraw(&self, refusal: &Refusal) {
        let of_link = |connection: &Arc<Connection>| {
            connection.listener == EDGE && connection.client == self.agent.peer
        };
        let connections = self.from_edge.reception.context.metrics.judged_connections();
        connections.iter().filter(|one| of_link(one)).for_each(|one| one.withdraw(refusal.to_string()));
    }

    /// Takes a place for a stream, before a task is spawned for it.
    fn admit(&self, request: &Request<RecvStream>) -> Result<Share, (Code, String)> {
        if request.uri().path() != EDGE_RELAY_PATH {
            return Err((Code::Unimplemented, "no such method".to_owned()));
        }
        self.from_edge.shares.admit(self.agent.peer.ip()).map_err(|full| {
            self.from_edge.reception.context.metrics.over_limit(EDGE, &full);
            (Code::ResourceExhausted, full.to_string())
        })
    }

    /// Relays the stream to one of a pair of sockets, and makes the other one a listener's client.
    async fn relay(
        self: Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        place: Share,
    ) {
        let FromEdge { reception, shares } = &self.from_edge;
        let target = request.headers().get(TARGET_HEADER).map(|target| target.to_str().unwrap_or_default());
        let target = target.map(|target| target.chars().take(MAX_TARGET).collect::<String>());
        let (client, mut other) = match pair().await {
            Ok(pair) => pair,
            Err(error) => return refuse(&mut respond, Code::ResourceExhausted, error.to_string()),
        };
        prepare_socket(&other);
        let workload =
            Workload { reception: reception.clone(), node: self.agent.node.clone(), agent: self.agent.peer };
        let (context, shares, peer) = (reception.context.clone(), shares.clone(), self.agent.peer);
        let drain = context.drain.clone();
        match target {
            Some(target) => {
                let listener = Arc::new(WorkloadMap { workload, target });
                drain.spawn(listener::receive(listener, client, peer, context, shares, Some(place)));
            }
            None => {
                let listener = Arc::new(workload);
                drain.spawn(listener::receive(listener, client, peer, context, shares, Some(place)));
            }
        }
        let Ok(mut send) = respond.send_response(response(), false) else { return };
        let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
        let relay = Relay {
            side: Side::Agent,
            flow: &self.flow,
            stalls: &self.stalls,
            abort: &abort,
            traffic: &traffic,
        };
        let body = ready(Ok(request.into_body()));
        let mut running = std::pin::pin!(relay.run(&mut other, Bytes::new(), &mut send, body));
        let ended = tokio::select! {
            ended = &mut running => ended,
            () = drain.shutdown().forced() => {
                abort.trigger(Outcome::Shutdown);
                running.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(node = %self.agent.node, %error, "outbound connection failed");
        }
    }
}

/// Returns two sockets that are connected to each other.
///
/// Listeners relay plain sockets, and depend on their backpressure, half-close and reset.
async fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let one = TcpStream::connect(listener.local_addr()?).await?;
    let own = one.local_addr()?;
    loop {
        // Any process of this host may connect first.
        let (other, peer) = listener.accept().await?;
        if peer == own {
            return Ok((one, other));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_pair_is_connected_with_itself() {
        let (mut one, mut other) = pair().await.unwrap();
        one.write_all(b"x").await.unwrap();
        one.shutdown().await.unwrap();
        let mut read = Vec::new();
        other.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"x");
        assert_eq!(one.peer_addr().unwrap(), other.local_addr().unwrap());
    }
}

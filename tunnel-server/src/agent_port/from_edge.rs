//! A link over which an agent opens streams for workloads on its node, to destinations in the cloud or on another node.
//! The policy decides which destinations they may reach.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use tokio_rustls::server::TlsStream;
use tonic::Code;
use tunnel_link::grpc::response;
use tunnel_link::link::{self, Flow, HANDSHAKE_TIMEOUT, LinkIo, Wire};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{EDGE_RELAY_PATH, Pipe, StallBound, TARGET_HEADER, Traffic, pipe_of_client};
use tunnel_runtime::NodeName;

use super::forwarded::refuse;
use super::judged::Judged;
use crate::admission::{Place, Share, Shares};
use crate::listener::{EDGE, Reception, Workload};
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
    stream: Box<TlsStream<Wire>>,
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

    /// Makes the stream a client of the listener.
    async fn relay(
        self: Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        place: Share,
    ) {
        let FromEdge { reception, shares } = &self.from_edge;
        let target = request.headers().get(TARGET_HEADER).map(|target| target.to_str().unwrap_or_default());
        let target = target.map(|target| target.chars().take(MAX_TARGET).collect::<String>());
        let Ok(mut send) = respond.send_response(response(), false) else { return };
        let workload =
            Workload { reception: reception.clone(), node: self.agent.node.clone(), agent: self.agent.peer };
        // Not a pair of sockets: other processes of this host could capture its bytes.
        let (client, relayed) = pipe_of_client();
        let drain = &reception.context.drain;
        drain.spawn(workload.serve(client, target, shares.clone(), place));
        let pipe = Pipe { flow: &self.flow, stalls: &self.stalls, traffic: &Traffic::default() };
        let over = async {
            drain.shutdown().forced().await;
            Outcome::Shutdown
        };
        relayed.run(pipe, &mut send, request.into_body(), over).await;
    }
}

//! The agent port: accepts, does mutual TLS, and by ALPN serves an agent's link, another server's or a redirector's, or gRPC
//! (enrolment).

mod additional;
mod attach;
mod config;
mod enroll;
mod forwarded;
mod from_edge;
mod handshakes;
mod judged;
mod known;
mod konnectivity;
mod limits;
mod link;
mod notices;
mod peer;
mod shut_out;

use std::sync::Arc;

use tokio_util::task::TaskTracker;
use tunnel_link::link::LinkIo;
use tunnel_pki::{ALPN_EDGE, ALPN_GRPC, ALPN_PEER, ALPN_TUNNEL, Client, ServerTls, client_of_certificate};

pub use self::from_edge::FromEdge;
pub use self::link::{Handover, LinkContext};
pub use crate::admission::{Accept, Budget};
pub use config::AgentsConfig;
pub(crate) use konnectivity::NAME as KONNECTIVITY;
pub use konnectivity::{AgentTokens, KonnectivityConfig, KonnectivityPort};
pub(crate) use limits::PARTS as AGENTS_PARTS;

use crate::listener::{EDGE, ListenerContext};
use crate::pki::EnrollService;
use crate::session::Workers;
use attach::Presented;
use enroll::{EnrollConnections, EnrollPlace};
use handshakes::{Connection, Error, Handshakes};
use judged::Judged;

pub struct AgentPort {
    handshakes: Handshakes,
    context: Arc<LinkContext>,
    enroll: EnrollConnections,
    /// For connections that other servers forward.
    listeners: ListenerContext,
    /// None: no policy says what workloads on edge nodes may reach.
    from_edge: Option<FromEdge>,
}

impl AgentPort {
    /// `tls` is read at each handshake. Links run on `workers`. `budget` bounds what has not attached yet.
    pub fn new(
        tls: Arc<ServerTls>,
        workers: Arc<Workers>,
        enroll: EnrollService,
        context: LinkContext,
        listeners: ListenerContext,
        from_edge: Option<FromEdge>,
        budget: &Budget,
    ) -> Arc<Self> {
        context.metrics.listener(forwarded::LISTENER);
        context.metrics.listener(EDGE);
        let context = Arc::new(context);
        let limits = Arc::new(limits::ConnectionLimits::new(budget, workers.handshakes()));
        let handshakes =
            Handshakes { tls, workers, context: context.clone(), limits, links: TaskTracker::new() };
        let enroll = EnrollConnections::new(enroll, context.metrics.clone(), context.draining.clone());
        Arc::new(Self { handshakes, context, enroll, listeners, from_edge })
    }

    /// Accepts connections until the drain starts.
    pub async fn serve(self: Arc<Self>, listener: impl Accept) {
        let handshakes = self.handshakes.clone();
        let serve = move |connection| {
            let port = self.clone();
            async move { port.serve_one(connection).await }
        };
        handshakes.accept("agents", listener, serve).await;
    }

    /// The port of konnectivity's agents, whose sessions are as good as others.
    pub fn for_konnectivity(&self, tokens: AgentTokens) -> Arc<KonnectivityPort> {
        let (handshakes, peers) = (self.handshakes.clone(), self.listeners.peers.clone());
        Arc::new(KonnectivityPort { handshakes, tokens: Arc::new(tokens), peers })
    }

    /// Ends the sessions of agents that may have none any more, until the stop.
    pub async fn shut_out(self: Arc<Self>) {
        let context = self.context.clone();
        let _ = context.stop.run_until_cancelled(shut_out::run(&context)).await;
    }

    /// Waits until every link has ended.
    pub async fn closed(&self) {
        self.handshakes.links.close();
        self.handshakes.links.wait().await;
    }

    async fn serve_one(&self, Connection { stream, peer, place, worker }: Connection) -> Result<(), Error> {
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first()).cloned();
        let client = certificate.as_ref().map(client_of_certificate).transpose().map_err(Error::denied)?;
        match connection.alpn_protocol() {
            Some(ALPN_TUNNEL) => {
                let (Some(Client::Agent(node)), Some(certificate)) = (client, &certificate) else {
                    return Err(Error::denied("an agent's link needs a client certificate"));
                };
                let credential = self.context.credential(certificate).map_err(Error::denied)?;
                place.waits();
                let certified = self.handshakes.limits.certified_when_free(&node, peer.ip());
                let certified = tokio::select! {
                    certified = certified => certified.ok_or(Error::Busy)?,
                    () = place.evicted() => return Err(Error::Evicted),
                };
                drop(place);
                // A task of its own frees the memory of the handshake: there are as many links as agents.
                let io = LinkIo::new(stream);
                let flow = io.flow();
                let link = attach::run(
                    self.context.clone(),
                    (io, flow),
                    peer,
                    Presented { node, credential },
                    worker.clone(),
                    certified,
                );
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.handshakes.links.track_future(link));
            }
            Some(ALPN_PEER) => {
                let (Some(client @ (Client::Server(_) | Client::Redirector(_))), Some(certificate)) =
                    (client, &certificate)
                else {
                    return Err(Error::denied("it needs the certificate of a server or of a redirector"));
                };
                let judged = Judged::new(self.context.clone(), client, certificate);
                let judged = judged.map_err(Error::denied)?;
                let limits = &self.handshakes.limits;
                let linked = limits.peer(&judged.name(), peer.ip()).ok_or(Error::Links)?;
                drop(place);
                let places = (linked, limits.forwarded.clone());
                let link = peer::serve(self.listeners.clone(), Box::new(stream), (judged, peer), places);
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.handshakes.links.track_future(link));
            }
            Some(ALPN_EDGE) => {
                let (Some(Client::Agent(node)), Some(certificate)) = (client, &certificate) else {
                    return Err(Error::denied("it needs the certificate of an agent"));
                };
                let Some(from_edge) = self.from_edge.clone() else {
                    let reason = "this server has no --policy, which would say what workloads may reach";
                    return Err(Error::denied(reason));
                };
                let judged = Judged::new(self.context.clone(), Client::Agent(node.clone()), certificate);
                let judged = judged.map_err(Error::denied)?;
                if let Err(refusal) = judged.judge() {
                    self.context.metrics.session_refused(refusal.label());
                    return Err(Error::denied(refusal));
                }
                let mut share = from_edge.shares.admit(peer.ip()).map_err(|_| Error::Busy)?;
                share.reaches(&node).map_err(|_| Error::Busy)?;
                let linked = self.handshakes.limits.outbound(&node).ok_or(Error::Links)?;
                drop(place);
                let (agent, places) = (from_edge::Agent { node, judged, peer }, (linked, share));
                let link = from_edge::serve(from_edge, Box::new(stream), agent, places);
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.handshakes.links.track_future(link));
            }
            Some(ALPN_GRPC) => {
                let node = match client {
                    Some(Client::Agent(node) | Client::Redirector(node)) => Some(node),
                    Some(Client::Server(_)) => {
                        return Err(Error::denied("a server's certificate cannot enrol or renew here"));
                    }
                    None => None,
                };
                let enrol_place = match &node {
                    Some(node) => {
                        self.handshakes.limits.certified(node, peer.ip()).map(EnrollPlace::Certified)
                    }
                    None => self.handshakes.limits.enrolment(peer.ip()).map(EnrollPlace::Unauthenticated),
                };
                drop(place);
                let enrol_place = enrol_place.unwrap_or(EnrollPlace::None { certified: node.is_some() });
                self.enroll.serve(stream, peer, certificate, enrol_place).await?;
            }
            _ => {
                let offered = "the client offered none of postern/1, postern-peer/1, postern-edge/1 and h2";
                return Err(Error::denied(offered));
            }
        }
        Ok(())
    }
}

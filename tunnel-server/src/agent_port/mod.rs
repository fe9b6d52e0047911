//! The agent port: accepts, does mutual TLS, and by ALPN serves an agent's link, another server's, or gRPC (enrolment).

mod additional;
mod attach;
mod enroll;
mod gate;
mod known;
mod link;
mod passed_on;
mod peer;
mod shut_out;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio_rustls::server::TlsStream;
use tokio_util::task::TaskTracker;
use tunnel_core::identity::{
    ALPN_GRPC, ALPN_PEER, ALPN_TUNNEL, Client, ServerTls, client_of_certificate, validity,
};
use tunnel_core::link::{HANDSHAKE_TIMEOUT, tune_link};

pub use self::link::{Handover, LinkContext};
pub use crate::admission::Budget;
pub use enroll::{enroll_routes, for_client};

use crate::accept::Gated;
use crate::admission::Place;
use crate::door::DoorContext;
use crate::pki::EnrollService;
use crate::session::Workers;
use attach::Presented;
use enroll::{EnrollConnections, EnrollPlace};
use gate::Gate;

/// How long a client may take to send its first byte. An agent sends it at once.
const SILENCE: Duration = Duration::from_secs(3);

pub struct AgentPort {
    tls: Arc<ServerTls>,
    workers: Arc<Workers>,
    context: Arc<LinkContext>,
    enroll: EnrollConnections,
    /// For connections that other servers pass on.
    doors: DoorContext,
    gate: Gate,
    links: TaskTracker,
}

impl AgentPort {
    /// `tls` is read at each handshake. Links run on `workers`. `budget` bounds what has not attached yet.
    pub fn new(
        tls: Arc<ServerTls>,
        workers: Arc<Workers>,
        enroll: EnrollService,
        context: LinkContext,
        doors: DoorContext,
        budget: &Budget,
    ) -> Arc<Self> {
        context.metrics.door(passed_on::DOOR);
        Arc::new(Self {
            tls,
            workers,
            enroll: EnrollConnections::new(enroll, context.metrics.clone(), context.draining.clone()),
            context: Arc::new(context),
            doors,
            gate: Gate::new(budget),
            links: TaskTracker::new(),
        })
    }

    /// Accepts connections until the drain starts.
    pub async fn serve(self: Arc<Self>, mut listener: Gated) {
        loop {
            let (socket, peer) = tokio::select! {
                accepted = listener.accept("agents") => accepted,
                () = self.context.draining.cancelled() => return,
            };
            let Some(place) = self.gate.handshake(peer.ip()) else {
                self.context.metrics.handshake("turned_away");
                continue;
            };
            let socket = match socket.into_std() {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::debug!(%peer, %error, "connection lost before its handshake");
                    continue;
                }
            };
            let (port, worker) = (self.clone(), self.workers.next().clone());
            let on_worker = worker.clone();
            worker.spawn(self.links.track_future(async move {
                let served = port.serve_one(socket, peer, place, on_worker);
                if let Some(Err(error)) = port.context.stop.run_until_cancelled(served).await {
                    port.context.metrics.handshake(error.label());
                    match error {
                        Error::Failed(_) => {
                            tracing::info!(%peer, %error, "handshake failed on the agent port");
                        }
                        // Strangers can have as many of these as they like.
                        _ => tracing::debug!(%peer, %error, "connection to the agent port closed"),
                    }
                }
            }));
        }
    }

    /// Ends the sessions of agents that may have none any more, until the stop.
    pub async fn shut_out(self: Arc<Self>) {
        let context = self.context.clone();
        let _ = context.stop.run_until_cancelled(shut_out::run(&context)).await;
    }

    /// Waits until every link has ended.
    pub async fn closed(&self) {
        self.links.close();
        self.links.wait().await;
    }

    async fn serve_one(
        &self,
        socket: std::net::TcpStream,
        peer: SocketAddr,
        place: Place<IpAddr>,
        worker: Handle,
    ) -> Result<(), Error> {
        let stream = tokio::select! {
            stream = self.handshake(socket, &place) => stream?,
            () = place.evicted() => return Err(Error::Evicted),
        };
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first()).cloned();
        let denied = io::ErrorKind::PermissionDenied;
        let client = certificate.as_ref().map(client_of_certificate).transpose();
        let client = client.map_err(|error| io::Error::new(denied, error))?;
        match connection.alpn_protocol() {
            Some(ALPN_TUNNEL) => {
                let (Some(Client::Agent(node)), Some(certificate)) = (client, &certificate) else {
                    return Err(io::Error::new(denied, "an agent's link needs a client certificate").into());
                };
                let validity = validity(certificate).map_err(|error| io::Error::new(denied, error))?;
                let issued = validity.issued();
                let certified = self.gate.certified(&node, peer.ip()).ok_or(Error::Busy)?;
                drop(place);
                // A task of its own frees the memory of the handshake: there are as many links as agents.
                let link = attach::run(
                    self.context.clone(),
                    Box::new(stream),
                    peer,
                    Presented { node, issued },
                    worker.clone(),
                    certified,
                );
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.links.track_future(link));
            }
            Some(ALPN_PEER) => {
                let Some(Client::Server(server_id)) = client else {
                    return Err(io::Error::new(denied, "it needs the certificate of a server").into());
                };
                drop(place);
                let link =
                    peer::serve(self.context.clone(), self.doors.clone(), Box::new(stream), peer, server_id);
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.links.track_future(link));
            }
            Some(ALPN_GRPC) => {
                let node = match client {
                    Some(Client::Agent(node)) => Some(node),
                    Some(Client::Server(_)) => {
                        return Err(io::Error::new(denied, "servers have nothing to enrol").into());
                    }
                    None => None,
                };
                let enrol_place = match &node {
                    Some(node) => self.gate.certified(node, peer.ip()).map(EnrollPlace::Certified),
                    None => self.gate.enrolment(peer.ip()).map(EnrollPlace::Stranger),
                };
                drop(place);
                let enrol_place = enrol_place.unwrap_or(EnrollPlace::None { certified: node.is_some() });
                self.enroll.serve(stream, peer, certificate, enrol_place).await?;
            }
            _ => {
                let offered = "the client offered none of postern/1, postern-peer/1 and h2";
                return Err(io::Error::new(io::ErrorKind::InvalidData, offered).into());
            }
        }
        Ok(())
    }

    async fn handshake(
        &self,
        socket: std::net::TcpStream,
        place: &Place<IpAddr>,
    ) -> Result<TlsStream<TcpStream>, Error> {
        let socket = TcpStream::from_std(socket)?;
        tune_link(&socket)?;
        self.context.congestion.set(&socket)?;
        tokio::time::timeout(SILENCE, socket.readable()).await.map_err(|_| Error::Silent)??;
        place.spoke();
        let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.tls.acceptor().accept(socket))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "TLS handshake took too long"))??;
        Ok(stream)
    }
}

/// Why a connection got no further than its handshake.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("nothing was sent within {} s", SILENCE.as_secs())]
    Silent,
    #[error("it made room for another one")]
    Evicted,
    #[error("too many connections with this node's certificate, or with any, are not attached yet")]
    Busy,
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl Error {
    const fn label(&self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Evicted => "evicted",
            Self::Busy => "turned_away",
            Self::Failed(_) => "failed",
        }
    }
}

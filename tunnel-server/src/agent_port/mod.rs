//! The agent port: accepts, does mutual TLS, and by ALPN serves an agent's link or gRPC (enrolment).

mod attach;
mod enroll;
mod shut_out;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tunnel_core::identity::{ALPN_GRPC, ALPN_TUNNEL, ServerTls, node_of_certificate, validity};
use tunnel_core::link::{self, HANDSHAKE_TIMEOUT};

pub use attach::LinkContext;
pub use enroll::{enroll_routes, for_client};

use crate::accept::accept;
use crate::admission::{Admission, Admitted};
use crate::pki::EnrollService;
use crate::session::Workers;
use attach::Certified;
use enroll::EnrollConnections;

/// Handshakes at a time, in total.
const HANDSHAKES: u32 = 4096;
/// Handshakes at a time from one address; a site's agents share one behind their NAT.
const HANDSHAKES_PER_SOURCE: u32 = 256;

pub struct AgentPort {
    tls: Arc<ServerTls>,
    workers: Arc<Workers>,
    context: Arc<LinkContext>,
    enroll: EnrollConnections,
    admission: Admission,
    links: TaskTracker,
}

impl AgentPort {
    /// `tls` is read at each handshake. Links run on `workers`.
    pub fn new(
        tls: Arc<ServerTls>,
        workers: Arc<Workers>,
        enroll: EnrollService,
        context: LinkContext,
    ) -> Arc<Self> {
        Arc::new(Self {
            tls,
            workers,
            enroll: EnrollConnections::new(enroll, context.metrics.clone(), context.draining.clone()),
            context: Arc::new(context),
            admission: Admission::new(HANDSHAKES, HANDSHAKES_PER_SOURCE),
            links: TaskTracker::new(),
        })
    }

    /// Accepts connections until the drain starts.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            let (socket, peer) = tokio::select! {
                accepted = accept(&listener, "agents") => accepted,
                () = self.context.draining.cancelled() => return,
            };
            let Some(admitted) = self.admission.admit(peer.ip()) else {
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
                let handshake = port.handshake(socket, peer, admitted, on_worker);
                if let Some(Err(error)) = port.context.stop.run_until_cancelled(handshake).await {
                    port.context.metrics.handshake("failed");
                    tracing::info!(%peer, %error, "handshake failed on the agent port");
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

    async fn handshake(
        &self,
        socket: std::net::TcpStream,
        peer: SocketAddr,
        admitted: Admitted,
        worker: Handle,
    ) -> io::Result<()> {
        let socket = TcpStream::from_std(socket)?;
        link::tune_link(&socket)?;
        let handshake = self.tls.acceptor().accept(socket);
        let mut stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake)
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "TLS handshake took too long"))??;
        link::tune_tls(stream.get_mut().1);
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first()).cloned();
        let denied = io::ErrorKind::PermissionDenied;
        match connection.alpn_protocol() {
            Some(ALPN_TUNNEL) => {
                let certificate = certificate
                    .ok_or_else(|| io::Error::new(denied, "an agent's link needs a client certificate"))?;
                let unusable = |error| io::Error::new(denied, error);
                let certified = Certified {
                    node: node_of_certificate(&certificate).map_err(unusable)?,
                    issued: validity(&certificate).map_err(unusable)?.issued(),
                };
                // A task of its own frees the memory of the handshake: there are as many links as agents.
                let (context, stream) = (self.context.clone(), Box::new(stream));
                let link = attach::run(context, stream, peer, certified, worker.clone(), admitted);
                let link = self.context.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.links.track_future(link));
                Ok(())
            }
            Some(ALPN_GRPC) => {
                // These have a limit of their own, so that they cannot block agents that have a certificate.
                drop(admitted);
                self.enroll.serve(stream, peer, certificate).await
            }
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the client offered neither postern/1 nor h2"))
            }
        }
    }
}

//! The agent port: mutual TLS, and by ALPN either an agent's link or ordinary gRPC (enrolment).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tower::ServiceExt as _;
use tunnel_core::identity::{ALPN_GRPC, ALPN_TUNNEL, ServerTls, TrustBundle, node_of_certificate};
use tunnel_core::link::{self, HANDSHAKE_TIMEOUT, PING_INTERVAL, PING_TIMEOUT};
use tunnel_core::proto::enrollment_server::EnrollmentServer;

use super::attach;
use super::{Sessions, Workers};
use crate::accept::accept;
use crate::admission::{Admission, Admitted};
use crate::metrics::Metrics;
use crate::pki::{EnrollService, PeerCertificate};
use crate::settings::Settings;

/// The largest gRPC message of an enrolment: a CSR is under 2 KiB.
const MAX_MESSAGE: usize = 64 << 10;
/// Handshakes at once, from everywhere.
const HANDSHAKES: u32 = 4096;
/// Handshakes at once from one address; a site's agents share one behind their NAT.
const HANDSHAKES_PER_SOURCE: u32 = 256;
/// Enrolment connections at once.
const GRPC_CONNECTIONS: usize = 512;
/// Streams at once on one of them.
const MAX_GRPC_STREAMS: u32 = 4;
/// HTTP/2 windows of one of them, in bytes.
const GRPC_WINDOW: u32 = 64 << 10;
/// How long a connection for enrolment may last.
const GRPC_LIFETIME: std::time::Duration = std::time::Duration::from_secs(30);

/// What the agent port needs.
pub struct AgentPortConfig {
    /// This server's name for itself.
    pub server_id: String,
    /// TLS settings of the moment.
    pub tls: Arc<ServerTls>,
    /// The roots to announce.
    pub bundle: watch::Receiver<Arc<TrustBundle>>,
    /// Ports that agents dial on their node's loopback.
    pub settings: watch::Receiver<Arc<Settings>>,
    /// Where sessions are registered.
    pub sessions: Arc<Sessions>,
    /// The data path's threads.
    pub workers: Arc<Workers>,
    /// Enrolment.
    pub enroll: EnrollService,
    /// Counters.
    pub metrics: Metrics,
    /// Take nothing new; tell the agents.
    pub draining: CancellationToken,
    /// End every link.
    pub stop: CancellationToken,
    /// How long the drain may last, for the agents to know.
    pub drain_timeout: std::time::Duration,
}

/// The agent port.
pub struct AgentPort {
    pub(super) config: AgentPortConfig,
    admission: Admission,
    /// Connections that have no certificate to show, which is what enrolment is for.
    grpc_places: Semaphore,
    routes: Routes,
    /// Links, until their end.
    pub(super) links: TaskTracker,
}

impl AgentPort {
    /// Takes nothing yet.
    pub fn new(config: AgentPortConfig) -> Arc<Self> {
        let service = EnrollmentServer::new(config.enroll.clone()).max_decoding_message_size(MAX_MESSAGE);
        let routes = Routes::new(service).prepare();
        Arc::new(Self {
            config,
            admission: Admission::new(HANDSHAKES, HANDSHAKES_PER_SOURCE),
            grpc_places: Semaphore::new(GRPC_CONNECTIONS),
            routes,
            links: TaskTracker::new(),
        })
    }

    /// Takes connections until the drain starts.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            let (socket, peer) = tokio::select! {
                accepted = accept(&listener, "agents") => accepted,
                () = self.config.draining.cancelled() => return,
            };
            let Some(admitted) = self.admission.admit(peer.ip()) else {
                self.config.metrics.handshake("turned_away");
                continue;
            };
            let socket = match socket.into_std() {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::debug!(%peer, %error, "connection lost before its handshake");
                    continue;
                }
            };
            let (port, worker) = (self.clone(), self.config.workers.next().clone());
            let on_worker = worker.clone();
            worker.spawn(self.links.track_future(async move {
                let taken = tokio::select! {
                    taken = port.take(socket, peer, admitted, on_worker) => taken,
                    () = port.config.stop.cancelled() => Ok(()),
                };
                if let Err(error) = taken {
                    port.config.metrics.handshake("failed");
                    tracing::info!(%peer, %error, "handshake failed on the agent port");
                }
            }));
        }
    }

    /// Waits until every link has ended.
    pub async fn closed(&self) {
        self.links.close();
        self.links.wait().await;
    }

    async fn take(
        self: &Arc<Self>,
        socket: std::net::TcpStream,
        peer: SocketAddr,
        admitted: Admitted,
        worker: tokio::runtime::Handle,
    ) -> io::Result<()> {
        let socket = TcpStream::from_std(socket)?;
        link::tune_link(&socket)?;
        let handshake = self.config.tls.acceptor().accept(socket);
        let mut stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake)
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "TLS handshake took too long"))??;
        link::tune_tls(stream.get_mut().1);
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first()).cloned();
        match connection.alpn_protocol() {
            Some(ALPN_TUNNEL) => {
                let certificate = certificate.ok_or_else(|| {
                    io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        "an agent's link needs a client certificate",
                    )
                })?;
                let node = node_of_certificate(&certificate)
                    .map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))?;
                // A task of its own: the room of the handshake is given back, and there are as many links as agents.
                let link = attach::run(self.clone(), Box::new(stream), peer, node, worker.clone(), admitted);
                let link = self.config.stop.clone().run_until_cancelled_owned(Box::pin(link));
                worker.spawn(self.links.track_future(link));
                Ok(())
            }
            Some(ALPN_GRPC) => {
                // Their own places: who has only this to do may not hold up those with a certificate.
                drop(admitted);
                let Ok(_place) = self.grpc_places.try_acquire() else {
                    return Err(io::Error::other("too many enrolment connections at once"));
                };
                self.config.metrics.handshake("grpc");
                self.grpc(stream, peer, PeerCertificate(certificate)).await;
                Ok(())
            }
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the client offered neither postern/1 nor h2"))
            }
        }
    }

    async fn grpc(&self, stream: TlsStream<TcpStream>, peer: SocketAddr, certificate: PeerCertificate) {
        let routes =
            self.routes.clone().map_request(move |mut request: http::Request<hyper::body::Incoming>| {
                request.extensions_mut().insert(certificate.clone());
                request.extensions_mut().insert(crate::pki::PeerAddress(peer));
                request.map(tonic::body::Body::new)
            });
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_GRPC_STREAMS)
            .initial_stream_window_size(GRPC_WINDOW)
            .initial_connection_window_size(GRPC_WINDOW)
            .max_header_list_size(16 << 10)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
        tokio::select! {
            served = tokio::time::timeout(GRPC_LIFETIME, served) => if let Ok(Err(error)) = served {
                tracing::debug!(%peer, %error, "gRPC connection ended");
            },
            () = self.config.draining.cancelled() => {}
        }
    }
}

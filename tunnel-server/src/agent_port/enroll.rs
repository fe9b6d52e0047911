//! gRPC connections on the agent port: enrolment and renewal.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls_pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tower::ServiceExt as _;
use tower::util::MapRequest;
use tunnel_core::link::{PING_INTERVAL, PING_TIMEOUT};
use tunnel_core::proto::enrollment_server::EnrollmentServer;

use crate::metrics::Metrics;
use crate::pki::{EnrollService, PeerAddress, PeerCertificate};

/// The largest message accepted, in bytes: a CSR is under 2 KiB.
const MAX_MESSAGE: usize = 64 << 10;
/// Connections at a time. Their clients need no certificate, which is what enrolment is for.
const CONNECTIONS: usize = 512;
const MAX_STREAMS: u32 = 4;
/// HTTP/2 windows of a connection, in bytes.
const WINDOW: u32 = 64 << 10;
const MAX_HEADERS: u32 = 16 << 10;
const LIFETIME: Duration = Duration::from_secs(30);

/// The Enrollment service, with its limits.
pub fn enroll_routes(service: EnrollService) -> Routes {
    Routes::new(EnrollmentServer::new(service).max_decoding_message_size(MAX_MESSAGE)).prepare()
}

/// The service of one connection: every request carries the client's address and certificate.
pub fn for_client(
    routes: Routes,
    peer: SocketAddr,
    certificate: Option<CertificateDer<'static>>,
) -> MapRequest<Routes, impl FnMut(http::Request<Incoming>) -> http::Request<tonic::body::Body> + Clone> {
    routes.map_request(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(PeerCertificate(certificate.clone()));
        request.extensions_mut().insert(PeerAddress(peer));
        request.map(tonic::body::Body::new)
    })
}

/// Serves enrolment connections, a limited number at a time.
pub(super) struct EnrollConnections {
    routes: Routes,
    places: Semaphore,
    metrics: Metrics,
    draining: CancellationToken,
}

impl EnrollConnections {
    pub(super) fn new(service: EnrollService, metrics: Metrics, draining: CancellationToken) -> Self {
        Self { routes: enroll_routes(service), places: Semaphore::new(CONNECTIONS), metrics, draining }
    }

    pub(super) async fn serve(
        &self,
        stream: TlsStream<TcpStream>,
        peer: SocketAddr,
        certificate: Option<CertificateDer<'static>>,
    ) -> io::Result<()> {
        let Ok(_place) = self.places.try_acquire() else {
            return Err(io::Error::other("too many enrolment connections"));
        };
        self.metrics.handshake("grpc");
        let service = TowerToHyperService::new(for_client(self.routes.clone(), peer, certificate));
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(MAX_HEADERS)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            served = tokio::time::timeout(LIFETIME, served) => if let Ok(Err(error)) = served {
                tracing::debug!(%peer, %error, "gRPC connection ended");
            },
            () = self.draining.cancelled() => {}
        }
        Ok(())
    }
}

//! gRPC connections on the agent port: enrolment and renewal.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls_pki_types::CertificateDer;
use tokio::sync::Semaphore;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tower::Service as _;
use tunnel_link::link::{PING_INTERVAL, PING_TIMEOUT, Wire};

use super::limits::CertifiedPlace;
use crate::admission::Place;
use crate::metrics::Metrics;
use crate::pki::EnrollService;

/// An agent sends one request and closes.
const MAX_STREAMS: u32 = 1;
/// HTTP/2 windows of a connection, in bytes.
const WINDOW: u32 = 64 << 10;
const MAX_HEADERS: u32 = 16 << 10;
/// Maximum time until the request; an agent sends it in the round trip after its handshake.
const IDLE: Duration = Duration::from_secs(5);
/// Maximum time of a request, from the handshake to the answer.
const LIFETIME: Duration = Duration::from_secs(30);
/// Time that a connection stays open after its answer, for the last bytes to arrive.
const LINGER: Duration = Duration::from_secs(5);
/// The same for a connection that must make room.
const SHORT_LINGER: Duration = Duration::from_millis(250);
/// Metric label of a connection that got its answer.
const ANSWERED: &str = "answered";
/// Maximum number of connections without a place that get an error at a time; others are closed without one.
const REFUSALS: usize = 16;
const NO_PLACE: &str = "the server has no place for more enrolments at present; try again later";

/// The place of a gRPC connection.
pub(super) enum EnrollPlace {
    Certified(CertifiedPlace),
    Unauthenticated(Place<std::net::IpAddr>),
    /// No place was left; the client gets an error that says so.
    None {
        certified: bool,
    },
}

impl EnrollPlace {
    fn spoke(&self) {
        match self {
            Self::Certified(certified) => certified.place.spoke(),
            Self::Unauthenticated(place) => place.spoke(),
            Self::None { .. } => {}
        }
    }

    async fn evicted(&self) {
        match self {
            Self::Certified(certified) => certified.place.evicted().await,
            Self::Unauthenticated(place) => place.evicted().await,
            Self::None { .. } => {}
        }
    }

    const fn client(&self) -> &'static str {
        match self {
            Self::Certified(_) | Self::None { certified: true } => "certified",
            Self::Unauthenticated(_) | Self::None { certified: false } => "unauthenticated",
        }
    }
}

/// Serves enrolment connections.
pub(super) struct EnrollConnections {
    service: EnrollService,
    refusals: Semaphore,
    metrics: Metrics,
    draining: CancellationToken,
}

impl EnrollConnections {
    pub(super) fn new(service: EnrollService, metrics: Metrics, draining: CancellationToken) -> Self {
        Self { service, refusals: Semaphore::new(REFUSALS), metrics, draining }
    }

    /// Serves one request, and closes the connection after its answer.
    pub(super) async fn serve(
        &self,
        stream: TlsStream<Wire>,
        peer: SocketAddr,
        certificate: Option<CertificateDer<'static>>,
        place: EnrollPlace,
    ) -> io::Result<()> {
        let client = place.client();
        let refusal = if matches!(place, EnrollPlace::None { .. }) {
            self.metrics.enrolment(client, "refused");
            let Ok(refusal) = self.refusals.try_acquire() else {
                return Err(io::Error::other(NO_PLACE));
            };
            Some(refusal)
        } else {
            self.metrics.handshake("grpc");
            None
        };
        let progress = Arc::new(Progress::new(place));
        let (inner, reached) = (self.service.for_client(peer.ip(), certificate), progress.clone());
        // Its request ends when the connection's place is taken away.
        let service = service_fn(move |request: http::Request<Incoming>| {
            let (mut inner, progress) = (inner.clone(), reached.clone());
            progress.asked.cancel();
            progress.place.spoke();
            async move {
                let _answered = progress.answered.clone().drop_guard();
                tokio::select! {
                    biased;
                    () = progress.place.evicted() => Ok(Status::resource_exhausted(NO_PLACE).into_http()),
                    answer = inner.call(request) => answer,
                }
            }
        });
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(MAX_HEADERS)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service);
        let mut served = std::pin::pin!(served);
        let end = tokio::select! {
            served = &mut served => {
                if let Err(error) = served {
                    tracing::debug!(%peer, %error, "gRPC connection failed");
                }
                if progress.answered.is_cancelled() { ANSWERED } else { "left" }
            }
            end = progress.end() => {
                // Without a request there is nothing to answer, and a client could prolong the exchange of GOAWAYs.
                if progress.asked.is_cancelled() {
                    served.as_mut().graceful_shutdown();
                    tokio::select! {
                        _ = served => {}
                        () = progress.linger(end) => {}
                    }
                }
                end
            }
            () = self.draining.cancelled() => "draining",
        };
        if refusal.is_none() {
            self.metrics.enrolment(client, end);
        }
        Ok(())
    }
}

/// Stages that a connection has reached.
struct Progress {
    place: EnrollPlace,
    asked: CancellationToken,
    answered: CancellationToken,
}

impl Progress {
    fn new(place: EnrollPlace) -> Self {
        Self { place, asked: CancellationToken::new(), answered: CancellationToken::new() }
    }

    /// Waits until the connection must be closed. Returns the reason as metric label `result`.
    async fn end(&self) -> &'static str {
        let ending = async {
            if tokio::time::timeout(IDLE, self.asked.cancelled()).await.is_err() {
                return "idle";
            }
            self.answered.cancelled().await;
            ANSWERED
        };
        tokio::select! {
            biased;
            ended = tokio::time::timeout(LIFETIME, ending) => ended.unwrap_or("slow"),
            // A connection without a place gets its error first.
            () = self.place.evicted(), if !matches!(self.place, EnrollPlace::None { .. }) => "evicted",
        }
    }

    /// Waits for the time that the client has to read its answer.
    async fn linger(&self, end: &'static str) {
        if end == ANSWERED && !matches!(self.place, EnrollPlace::None { .. }) {
            let _ = tokio::time::timeout(LINGER, self.place.evicted()).await;
        } else {
            tokio::time::sleep(SHORT_LINGER).await;
        }
    }
}

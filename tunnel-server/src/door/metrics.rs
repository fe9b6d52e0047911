//! The metrics door: `/metrics` for other hosts, for callers who show who they are. The admin port answers the same on loopback,
//! where nobody is asked.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_core::admin::exposition;
use tunnel_core::carry::end_on_drop;
use tunnel_core::error::chain;
use tunnel_core::lifecycle::Drain;

use super::context::OpenError;
use super::first_request::FirstRequest;
use super::open::{Door, Opened};
use crate::accept::Gate;
use crate::caller::{
    Authenticator, Caller, CallerTls, Refusal, Reviewer, bearer_token, caller_of_certificate,
};
use crate::metrics::Metrics;
use crate::route::Router;

/// What a caller may get, by the cluster's rules.
const PATH: &str = "/metrics";
/// How long a client may take for its part of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a connection may wait for a whole head, also for the first line of the next request: longer than Prometheus' usual
/// 30 s from scrape to scrape.
const IDLE: Duration = Duration::from_secs(45);
/// The longest head of a request, in bytes: twice the longest token.
const MAX_HEAD: usize = 32 << 10;

type Answer = Response<Full<Bytes>>;

pub(crate) struct MetricsDoor {
    pub(crate) registry: Arc<Registry>,
    pub(crate) tls: Arc<CallerTls>,
    pub(crate) authenticator: Arc<Authenticator>,
    /// Knows who may read; None without a cluster: whoever is known.
    pub(crate) reviewer: Option<Arc<Reviewer>>,
    /// Its own, which closes when a successor has taken over.
    pub(crate) gate: Gate,
    pub(crate) metrics: Metrics,
    pub(crate) drain: Drain,
}

impl Door for MetricsDoor {
    const NAME: &'static str = "metrics";

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        self.serve(socket).await?;
        Ok(Opened::Ended)
    }
}

impl MetricsDoor {
    /// Serves a connection until it ends.
    async fn serve(&self, socket: &mut TcpStream) -> Result<(), OpenError> {
        let client = socket.peer_addr()?;
        let accepted = timeout(HANDSHAKE, self.tls.acceptor_of_http_1().accept(&mut *socket)).await;
        let stream = accepted
            .map_err(|_| OpenError::Client(format!("no TLS handshake within {} s", HANDSHAKE.as_secs())))?
            .map_err(|error| OpenError::Client(format!("TLS: {error}")))?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let shown = certificate.map(caller_of_certificate).transpose().map_err(OpenError::Client)?;
        let _counted = Counted::new(&self.metrics);
        let first = FirstRequest::default();
        let service = service_fn(|request: Request<Incoming>| {
            first.came();
            // No request here has a body that matters.
            let (head, shown) = (request.into_parts().0, shown.as_ref());
            async move { Ok::<_, Infallible>(self.answer(&head, shown, client).await) }
        });
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(MAX_HEAD).half_close(true);
        let ended = {
            let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = self.over(&first) => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        };
        match ended {
            Ok(()) => end_on_drop(socket),
            // What clients do all the time: they leave idle connections open, or leave.
            Err(error) if error.is_timeout() => end_on_drop(socket),
            Err(error) => {
                tracing::debug!(door = Self::NAME, %client, error = chain(&error), "a client's connection ended");
            }
        }
        Ok(())
    }

    /// Ends when the connection is to end: another server answers the next ones.
    async fn over(&self, first: &FirstRequest) {
        tokio::select! {
            () = self.drain.shutdown().draining() => {}
            () = self.gate.closed() => {}
        }
        first.wait().await;
    }

    async fn answer(&self, head: &Parts, shown: Option<&Caller>, client: SocketAddr) -> Answer {
        if head.uri.path() != PATH {
            return failed(StatusCode::NOT_FOUND, "only /metrics is here");
        }
        if head.method != Method::GET {
            let mut answer = failed(StatusCode::METHOD_NOT_ALLOWED, "use GET");
            answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            return answer;
        }
        if let Err(refusal) = self.admit(&head.headers, shown, client).await {
            self.metrics.turned_away(Self::NAME);
            tracing::warn!(door = Self::NAME, %client, reason = %refusal, "client turned away");
            return refused(&refusal);
        }
        let (registry, headers) = (self.registry.clone(), head.headers.clone());
        // It takes milliseconds, in which no other door should wait.
        match tokio::task::spawn_blocking(move || exposition(&registry, &headers)).await {
            Ok(Ok((content_type, text))) => {
                let mut answer = Response::new(Full::from(text));
                answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
                answer
            }
            Ok(Err(error)) => {
                failed(StatusCode::INTERNAL_SERVER_ERROR, &format!("encoding the metrics: {error}"))
            }
            Err(error) => {
                failed(StatusCode::INTERNAL_SERVER_ERROR, &format!("encoding the metrics: {error}"))
            }
        }
    }

    /// Whether the caller may read. A certificate says more than a token beside it, as at the https door.
    async fn admit(
        &self,
        headers: &HeaderMap,
        shown: Option<&Caller>,
        client: SocketAddr,
    ) -> Result<(), Refusal> {
        let caller = match (shown, bearer_token(headers).map_err(Refusal::Unauthenticated)?) {
            (Some(caller), _) => caller.clone(),
            (None, Some(token)) => self.authenticator.caller_of_token(token, client.ip()).await?,
            (None, None) => {
                let reason = "a client certificate or a bearer token is needed";
                return Err(Refusal::Unauthenticated(reason.to_owned()));
            }
        };
        match &self.reviewer {
            Some(reviewer) => reviewer.allow_path(&caller, PATH).await,
            None => Ok(()),
        }
    }
}

fn refused(refusal: &Refusal) -> Answer {
    let status = match refusal {
        Refusal::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
        Refusal::Forbidden(_) => StatusCode::FORBIDDEN,
        Refusal::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut answer = failed(status, &refusal.to_string());
    if status == StatusCode::UNAUTHORIZED {
        let challenge = HeaderValue::from_static("Bearer realm=\"postern\"");
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    answer
}

/// The connection ends with it: who may not read holds no place.
fn failed(status: StatusCode, reason: &str) -> Answer {
    let mut answer = Response::new(Full::from(format!("{reason}\n")));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

/// A connection, counted until it is dropped.
struct Counted(Metrics);

impl Counted {
    fn new(metrics: &Metrics) -> Self {
        metrics.opened(MetricsDoor::NAME);
        Self(metrics.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.answered(MetricsDoor::NAME);
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use rustls::{ClientConfig, RootCertStore};
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;
    use tunnel_core::identity::{ServerTls, TrustBundle};
    use tunnel_core::lifecycle::Shutdown;

    use super::*;
    use crate::caller::Tokens;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A door whose certificate, and those of its callers, are of one CA.
    struct Site {
        door: Arc<MetricsDoor>,
        issuer: Issuer<'static, KeyPair>,
        root: CertificateDer<'static>,
    }

    impl Site {
        fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, "root");
            let key = KeyPair::generate().unwrap();
            let root = params.self_signed(&key).unwrap().der().clone();
            let issuer = Issuer::new(params, key);
            let roots = TrustBundle::new(vec![root.clone()]).unwrap();
            let (certificate, key) = signed(&issuer, "localhost", ExtendedKeyUsagePurpose::ServerAuth);
            let tls = CallerTls::new(Arc::new(ServerTls::new(vec![certificate], &key, &roots).unwrap()));
            let tls = tls.unwrap();
            tls.accept_roots(&roots).unwrap();
            let mut registry = Registry::default();
            let metrics = Metrics::new(registry.sub_registry_with_prefix("postern"));
            let tokens = Tokens::parse("alices-token,alice,1\n").unwrap();
            let door = MetricsDoor {
                registry: Arc::new(registry),
                tls: Arc::new(tls),
                authenticator: Arc::new(Authenticator::new(tokens, None)),
                reviewer: None,
                gate: Gate::new(true),
                metrics,
                drain: Drain::new(Shutdown::new()),
            };
            Self { door: Arc::new(door), issuer, root }
        }

        /// A client's connection, which shows a certificate of the CA or none.
        async fn connect(&self, certified: bool) -> TlsStream<TcpStream> {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut accepted, _) = listener.accept().await.unwrap();
            let door = self.door.clone();
            tokio::spawn(async move { door.serve(&mut accepted).await });
            let mut roots = RootCertStore::empty();
            roots.add(self.root.clone()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
            let config = if certified {
                let (certificate, key) = signed(&self.issuer, "bob", ExtendedKeyUsagePurpose::ClientAuth);
                config.with_client_auth_cert(vec![certificate], key).unwrap()
            } else {
                config.with_no_client_auth()
            };
            let name = "localhost".try_into().unwrap();
            TlsConnector::from(Arc::new(config)).connect(name, socket).await.unwrap()
        }

        /// The answer to one request.
        async fn ask(&self, certified: bool, line: &str, header: &str) -> String {
            let mut stream = self.connect(certified).await;
            let request = format!("{line} HTTP/1.1\r\nHost: localhost\r\n{header}Connection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it closes").unwrap();
            String::from_utf8(answer).unwrap()
        }
    }

    fn signed(
        issuer: &Issuer<'static, KeyPair>,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, issuer).unwrap().der().clone();
        (certificate, PrivateKeyDer::Pkcs8(key.serialize_der().into()))
    }

    #[tokio::test]
    async fn a_token_or_a_certificate_reads_the_metrics() {
        let site = Site::new();
        for (certified, header) in [(true, ""), (false, "Authorization: Bearer alices-token\r\n")] {
            let header = format!("{header}Accept: application/openmetrics-text\r\n");
            let answer = site.ask(certified, "GET /metrics", &header).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            assert!(
                answer.contains("content-type: application/openmetrics-text; version=1.0.0;"),
                "{answer}"
            );
            assert!(answer.contains("\npostern_connections_active{door=\"metrics\"} "), "{answer}");
            assert!(answer.ends_with("# EOF\n"), "{answer}");
        }
        let ended = async {
            while site.door.metrics.ended_at("metrics") != 2 || site.door.metrics.active_at("metrics") != 0 {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, ended).await.expect("both are counted");
    }

    #[tokio::test]
    async fn a_client_that_sends_no_more_is_answered() {
        let mut stream = Site::new().connect(true).await;
        stream
            .write_all(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n")
            .await
            .unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        assert!(answer.contains(" 200 OK\r\n") && answer.ends_with("# EOF\n"), "{answer:?}");
    }

    #[tokio::test]
    async fn whoever_is_nobody_is_told_why() {
        let site = Site::new();
        for (line, header, status, reason) in [
            ("GET /metrics", "", 401, "a client certificate or a bearer token is needed"),
            ("GET /metrics", "Authorization: Bearer wrong-token\r\n", 401, "not in --token-auth-file"),
            ("GET /metrics", "Authorization: Basic YTpi\r\n", 401, "has no bearer token"),
            ("GET /status", "Authorization: Bearer alices-token\r\n", 404, "only /metrics is here"),
            ("POST /metrics", "Authorization: Bearer alices-token\r\n", 405, "use GET"),
        ] {
            let answer = site.ask(false, line, header).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line} {header}: {answer}");
            assert!(answer.contains(reason) && !answer.contains("postern_"), "{line} {header}: {answer}");
            assert_eq!(answer.contains("www-authenticate: Bearer "), status == 401, "{answer}");
        }
    }

    #[tokio::test]
    async fn a_kept_connection_ends_with_the_drain_and_with_a_successor() {
        for successor in [false, true] {
            let site = Site::new();
            let mut stream = site.connect(true).await;
            let head =
                "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n";
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"# EOF\n") {
                let read = timeout(PATIENCE, stream.read_buf(&mut answer)).await.expect("an answer").unwrap();
                assert_ne!(read, 0, "closed after its first answer");
            }
            assert_eq!(site.door.metrics.active_at("metrics"), 1);
            if successor {
                site.door.gate.set(false);
            } else {
                site.door.drain.shutdown().begin();
            }
            let rest = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it ends").unwrap();
            assert_eq!(rest, 0);
        }
    }

    #[tokio::test]
    async fn a_request_that_comes_with_a_successor_is_answered() {
        let site = Site::new();
        site.door.gate.set(false);
        let answer = site.ask(true, "GET /metrics", "").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let mut silent = site.connect(true).await;
        let read = timeout(PATIENCE, silent.read(&mut [0])).await.expect("it ends");
        assert!(!matches!(read, Ok(1..)), "{read:?}");
    }

    #[test]
    fn a_refusal_has_its_status_and_ends_the_connection() {
        for (refusal, status) in [
            (Refusal::Unauthenticated("because".to_owned()), 401),
            (Refusal::Forbidden("because".to_owned()), 403),
            (Refusal::Unavailable("because".to_owned()), 503),
        ] {
            let answer = refused(&refusal);
            assert_eq!(answer.status(), status);
            assert_eq!(answer.headers()[header::CONNECTION], "close");
            assert_eq!(answer.headers().contains_key(header::WWW_AUTHENTICATE), status == 401);
        }
    }
}

//! `/metrics` for other hosts, for authenticated callers. The admin port answers the same on loopback, without
//! authentication.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use prometheus_client::registry::Registry;
use tunnel_runtime::accept::Gate;
use tunnel_runtime::admin::exposition;

use super::body::Body;
use crate::listener::answer::Failure;

/// Path that the cluster's rules must allow the caller to read.
pub(super) const PATH: &str = "/metrics";

/// The page for scrapers.
pub(crate) struct MetricsPage {
    pub(crate) registry: Arc<Registry>,
    /// The listener's gate, which closes when a successor has taken over.
    pub(crate) gate: Gate,
}

impl MetricsPage {
    /// Answers a request, once its sender is `admitted`.
    pub(super) async fn answer(
        &self,
        head: &Parts,
        admitted: impl Future<Output = Result<(), Failure>>,
    ) -> Result<Response<Body>, Failure> {
        if head.uri.path() != PATH {
            return Err(Failure::new(StatusCode::NOT_FOUND, "only /metrics is here"));
        }
        if head.method != Method::GET {
            return Err(Failure::new(StatusCode::METHOD_NOT_ALLOWED, "use GET"));
        }
        admitted.await?;
        let (registry, headers) = (self.registry.clone(), head.headers.clone());
        // Encoding takes milliseconds, in which other listeners should not wait.
        let encoded = tokio::task::spawn_blocking(move || exposition(&registry, &headers)).await;
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("failed to encode the metrics: {error}"))
        };
        let (content_type, text) =
            encoded.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let mut answer =
            Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync());
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use rustls::{ClientConfig, RootCertStore};
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;
    use tunnel_pki::{ServerTls, TrustBundle};

    use tunnel_runtime::clock::Clock;

    use super::super::{Admission, Front};
    use super::*;
    use crate::admission::Shares;
    use crate::caller::{Authenticator, CallerTls, CallersCa, Tokens};
    use crate::listener::context::ListenerContext;
    use crate::metrics::Metrics;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A listener whose certificate, and those of its callers, are from one CA.
    struct Site {
        front: Arc<Front>,
        context: ListenerContext,
        gate: Gate,
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
            let tls = CallerTls::new(Arc::new(
                ServerTls::new(vec![certificate], &key, &roots, None, Clock::default()).unwrap(),
            ));
            let tls = tls.unwrap();
            tls.accept_roots(&roots).unwrap();
            let mut registry = Registry::default();
            let metrics = Metrics::new(registry.sub_registry_with_prefix("postern"));
            let tokens = Tokens::parse("alices-own-token,alice,1\n").unwrap();
            let gate = Gate::new(true);
            let page = MetricsPage { registry: Arc::new(registry), gate: gate.clone() };
            let front = Front {
                listener: "metrics",
                admission: Admission::Callers(Arc::new(Authenticator::new(tokens, None))),
                tls: Some(Arc::new(tls)),
                targets: None,
                pods: None,
                metrics: Some(page),
            };
            let context = ListenerContext { metrics, ..ListenerContext::without_nodes() };
            Self { front: Arc::new(front), context, gate, issuer, root }
        }

        /// Connects as a client that shows a certificate from the CA, or none.
        async fn connect(&self, certified: bool) -> TlsStream<TcpStream> {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (accepted, client) = listener.accept().await.unwrap();
            let (front, context) = (self.front.clone(), self.context.clone());
            tokio::spawn(async move {
                front.serve(accepted, Bytes::new(), client, &context, &Shares::new(10), None).await
            });
            let mut roots = RootCertStore::empty();
            roots.add(self.root.clone()).unwrap();
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
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

        /// Returns the answer to one request.
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
        for (certified, header) in [(true, ""), (false, "Authorization: Bearer alices-own-token\r\n")] {
            let header = format!("{header}Accept: application/openmetrics-text\r\n");
            let answer = site.ask(certified, "GET /metrics", &header).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            assert!(
                answer.contains("content-type: application/openmetrics-text; version=1.0.0;"),
                "{answer}"
            );
            assert!(answer.contains("\npostern_connections_active{listener=\"metrics\"} "), "{answer}");
            assert!(answer.ends_with("# EOF\n"), "{answer}");
        }
        let ended = async {
            let metrics = &site.context.metrics;
            while metrics.ended_at("metrics") != 2 || metrics.active_at("metrics") != 0 {
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
            ("GET /status", "Authorization: Bearer alices-own-token\r\n", 404, "only /metrics is here"),
            ("POST /metrics", "Authorization: Bearer alices-own-token\r\n", 405, "use GET"),
        ] {
            let answer = site.ask(false, line, header).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line} {header}: {answer}");
            assert!(answer.contains(reason) && !answer.contains("postern_"), "{line} {header}: {answer}");
            assert_eq!(answer.contains("www-authenticate: Bearer\r\n"), status == 401, "{answer}");
            assert!(answer.contains("connection: close\r\n"), "{answer}");
            assert_eq!(answer.contains("allow: GET\r\n"), status == 405, "{answer}");
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
            assert_eq!(site.context.metrics.active_at("metrics"), 1);
            if successor {
                site.gate.set(false);
            } else {
                site.context.drain.shutdown().begin();
            }
            let rest = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it ends").unwrap();
            assert_eq!(rest, 0);
        }
    }

    #[tokio::test]
    async fn a_kept_connection_ends_with_its_callers_certificate() {
        let site = Site::new();
        let mut kept = site.connect(true).await;
        kept.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = [0; 4096];
        let read = timeout(PATIENCE, kept.read(&mut answer)).await.expect("an answer").unwrap();
        assert!(
            answer[..read].starts_with(b"HTTP/1.1 200 "),
            "{:?}",
            String::from_utf8_lossy(&answer[..read])
        );
        site.front.tls.as_ref().unwrap().accept_roots(CallersCa::new().bundle()).unwrap();
        let rest = timeout(PATIENCE, kept.read_to_end(&mut Vec::new())).await.expect("it ends");
        assert!(rest.is_ok(), "{rest:?}");
    }

    #[tokio::test]
    async fn a_request_that_comes_with_a_successor_is_answered() {
        let site = Site::new();
        site.gate.set(false);
        let answer = site.ask(true, "GET /metrics", "").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let mut silent = site.connect(true).await;
        let read = timeout(PATIENCE, silent.read(&mut [0])).await.expect("it ends");
        assert!(!matches!(read, Ok(1..)), "{read:?}");
    }
}

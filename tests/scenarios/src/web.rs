//! A web server on an edge host, with and without TLS, and curl on the cloud host or an edge.
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use postern_testbed::{Testbed, client};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, SanType,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt as _;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Result of a request by curl.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
    /// Output with the headers of `--include` before the body if requested, and the messages of `--verbose`.
    pub(crate) said: String,
    pub(crate) ok: bool,
}

/// Runs the real curl on the cloud host.
pub(crate) async fn curl(testbed: &Testbed, args: &[&str]) -> Result<Answer> {
    answered(testbed.cloud.command("curl"), args).await
}

/// As [`curl`], on an edge host.
pub(crate) async fn curl_on_edge(testbed: &Testbed, n: usize, args: &[&str]) -> Result<Answer> {
    answered(testbed.on_edge(n).command(Path::new("curl")), args).await
}

async fn answered(mut command: Command, args: &[&str]) -> Result<Answer> {
    command
        .args(["--silent", "--show-error", "--max-time", "20", "--write-out", "\n%{http_code}"])
        .args(args);
    let output = tokio::task::spawn_blocking(move || command.output()).await?.context("running curl")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n').with_context(|| format!("curl printed {text:?}"))?;
    Ok(Answer {
        status: status.parse().with_context(|| format!("curl's status {status:?}"))?,
        body: body.to_owned(),
        said: String::from_utf8_lossy(&output.stderr).into_owned(),
        ok: output.status.success(),
    })
}

impl Answer {
    /// Checks the status, and that the body contains `part`.
    pub(crate) fn expect(&self, status: u16, part: &str) -> Result<()> {
        ensure!(
            self.status == status && self.body.contains(part),
            "expected {status} and {part:?}, got {self:?}"
        );
        Ok(())
    }
}

/// A CA and the certificates that it signs.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    dir: PathBuf,
    name: String,
}

impl Authority {
    /// Creates a CA whose files are in the testbed's folder.
    pub(crate) fn new(testbed: &Testbed, name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        let ca = Self {
            der: certificate.der().clone(),
            dir: testbed.dir().to_owned(),
            name: name.to_owned(),
            issuer: Issuer::new(params, key),
        };
        std::fs::write(ca.file(), certificate.pem())?;
        Ok(ca)
    }

    /// Returns the path of its certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.join(format!("{}.crt", self.name))
    }

    /// Issues a client certificate; returns the paths of certificate and key.
    pub(crate) fn client(&self, name: &str) -> Result<(PathBuf, PathBuf)> {
        self.issue(DistinguishedName::new(), name)
    }

    /// As [`Self::client`], for a member of an organization.
    pub(crate) fn member(&self, organization: &str, name: &str) -> Result<(PathBuf, PathBuf)> {
        let mut subject = DistinguishedName::new();
        subject.push(DnType::OrganizationName, organization);
        self.issue(subject, name)
    }

    fn issue(&self, mut subject: DistinguishedName, name: &str) -> Result<(PathBuf, PathBuf)> {
        subject.push(DnType::CommonName, name);
        let mut params = CertificateParams::default();
        params.distinguished_name = subject;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let file = |ending: &str| self.dir.join(format!("{name}.{ending}"));
        std::fs::write(file("crt"), certificate.pem())?;
        std::fs::write(file("key"), key.serialize_pem())?;
        Ok((file("crt"), file("key")))
    }

    /// Returns TLS for a server with these names that accepts client certificates of this CA.
    fn server(&self, names: &[SanType]) -> Result<TlsAcceptor> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.to_vec();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.der.clone())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()?;
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// Statistics of the requests so far.
#[derive(Debug, Default)]
struct Seen {
    connections: AtomicU64,
    /// Number of requests to `/wait` and `/half` that were given up.
    abandoned: AtomicU64,
    waiting: AtomicU64,
    /// Number of body bytes read.
    read: AtomicU64,
}

/// A running web server; ends when dropped.
pub(crate) struct Web {
    pub(crate) address: SocketAddr,
    seen: Arc<Seen>,
    task: AbortHandle,
}

impl Web {
    /// Starts a server without TLS on the edge host's address.
    pub(crate) fn start(testbed: &Testbed, n: usize, port: u16) -> Result<Self> {
        Self::listen(testbed, n, port, None)
    }

    /// Starts a server with TLS and a certificate for these names.
    pub(crate) fn with_tls(
        testbed: &Testbed,
        n: usize,
        port: u16,
        ca: &Authority,
        names: &[SanType],
    ) -> Result<Self> {
        Self::listen(testbed, n, port, Some(ca.server(names)?))
    }

    fn listen(testbed: &Testbed, n: usize, port: u16, tls: Option<TlsAcceptor>) -> Result<Self> {
        let edge = testbed.edge(n);
        let address = SocketAddr::new(edge.ip(), port);
        let listener = edge.ns.run(|| Ok(std::net::TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let seen = Arc::<Seen>::default();
        let counted = seen.clone();
        let task = tokio::spawn(async move {
            // Ends the connections when this task ends.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                counted.connections.fetch_add(1, Ordering::SeqCst);
                let (tls, seen) = (tls.clone(), counted.clone());
                connections.spawn(async move {
                    let Some(tls) = tls else { return serve(stream, false, "", seen).await };
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let session = stream.get_ref().1;
                    let h2 = session.alpn_protocol() == Some(b"h2");
                    let shown = if session.peer_certificates().is_some() { "certificate" } else { "none" };
                    serve(stream, h2, shown, seen).await;
                });
            }
        });
        Ok(Self { address, seen, task: task.abort_handle() })
    }

    pub(crate) fn connections(&self) -> u64 {
        self.seen.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn abandoned(&self) -> u64 {
        self.seen.abandoned.load(Ordering::SeqCst)
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.seen.waiting.load(Ordering::SeqCst)
    }

    pub(crate) fn read(&self) -> u64 {
        self.seen.read.load(Ordering::SeqCst)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    h2: bool,
    shown: &'static str,
    seen: Arc<Seen>,
) {
    let service = service_fn(move |request| {
        let seen = seen.clone();
        async move { Ok::<_, Infallible>(answer(request, shown, seen).await) }
    });
    let io = TokioIo::new(stream);
    // Errors are ignored: clients that leave are part of the tests.
    if h2 {
        let _ = http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await;
    } else {
        let _ = http1::Builder::new().serve_connection(io, service).with_upgrades().await;
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(text.into()).boxed_unsync());
    *response.status_mut() = status;
    response
}

/// Counts, when dropped, a request that is given up before the end of its answer.
struct Waiting(Arc<Seen>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.abandoned.fetch_add(1, Ordering::SeqCst);
    }
}

async fn answer(mut request: Request<Incoming>, shown: &str, seen: Arc<Seen>) -> Response<Body> {
    match request.uri().path() {
        "/wait" => {
            seen.waiting.fetch_add(1, Ordering::SeqCst);
            let _waiting = Waiting(seen);
            std::future::pending().await
        }
        // Later than the end of file of a client that half-closes.
        "/late" => {
            tokio::time::sleep(Duration::from_millis(300)).await;
            text(StatusCode::OK, "late\n")
        }
        "/refuse" => text(StatusCode::FORBIDDEN, "not for you\n"),
        // Without reading the body.
        "/unwanted" => text(StatusCode::EXPECTATION_FAILED, "keep it\n"),
        "/trailers" => {
            let mut trailers = HeaderMap::new();
            trailers.insert(HeaderName::from_static("x-sum"), HeaderValue::from_static("42"));
            let frames = [Ok(Frame::data(Bytes::from_static(b"data\n"))), Ok(Frame::trailers(trailers))];
            let mut response = Response::new(StreamBody::new(tokio_stream::iter(frames)).boxed_unsync());
            response.headers_mut().insert(header::TRAILER, HeaderValue::from_static("x-sum"));
            response
        }
        // An answer that never ends.
        "/half" => {
            let waiting = Waiting(seen);
            let half = tokio_stream::once(Ok(Frame::data(Bytes::from_static(b"half"))));
            let rest = tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>().map(move |frame| {
                // Dropped together with the answer.
                let _waiting = &waiting;
                frame
            });
            Response::new(StreamBody::new(half.chain(rest)).boxed_unsync())
        }
        "/large" => {
            let chunk = Bytes::from(vec![b'x'; 1 << 16]);
            let frames = (0..512).map(move |_| Ok(Frame::data(chunk.clone())));
            Response::new(StreamBody::new(tokio_stream::iter(frames)).boxed_unsync())
        }
        "/digest" => {
            let Ok(body) = request.into_body().collect().await else {
                return text(StatusCode::BAD_REQUEST, "the body broke off\n");
            };
            let body = body.to_bytes();
            let mut bytes = &body[..];
            match client::digest(&mut bytes).await {
                Ok((length, digest)) => text(StatusCode::OK, format!("{length} {digest}\n")),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")),
            }
        }
        path @ ("/echo-upgraded" | "/silent-upgraded") => {
            let silent = path == "/silent-upgraded";
            let protocol = request.headers().get(header::UPGRADE).cloned();
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let Ok(upgraded) = upgrade.await else { return };
                let mut stream = TokioIo::new(upgraded);
                let mut buffer = [0; 1024];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    if stream.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
                if silent {
                    // Keeps the connection, whatever the client does.
                    std::future::pending::<()>().await;
                }
                let _ = stream.shutdown().await;
            });
            let mut response = text(StatusCode::SWITCHING_PROTOCOLS, "");
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            if let Some(protocol) = protocol {
                response.headers_mut().insert(header::UPGRADE, protocol);
            }
            response
        }
        // An echo of the request as received.
        _ => {
            let (head, body) = request.into_parts();
            let mut told = format!("{} {} {:?} client={shown}\n", head.method, head.uri, head.version);
            for (name, value) in &head.headers {
                told.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
            }
            let mut body = body;
            let mut read = 0;
            while let Some(frame) = body.frame().await {
                let Ok(frame) = frame else { break };
                if let Some(data) = frame.data_ref() {
                    read += data.len() as u64;
                    seen.read.fetch_add(data.len() as u64, Ordering::SeqCst);
                }
                if let Some(trailers) = frame.trailers_ref() {
                    told.push_str(&format!("trailers={trailers:?}\n"));
                }
            }
            told.push_str(&format!("body={read}\n"));
            text(StatusCode::OK, told)
        }
    }
}

/// Returns the path as a program argument.
pub(crate) fn shown(path: &Path) -> String {
    path.display().to_string()
}

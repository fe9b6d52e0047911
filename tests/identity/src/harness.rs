//! A server built from the tunnel-server's parts: accept, TLS, then gRPC under `h2` and an echo under `postern/1` in
//! place of a session.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use postern_testbed::wait::wait_for;
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint};
use tower::Service;
use tunnel_agent::reach::Reach;
use tunnel_link::proto::enrollment_client::EnrollmentClient;
use tunnel_pki::enrol::{EnrollConfig, EnrollError, ensure_identity};
use tunnel_pki::{ALPN_GRPC, ALPN_TUNNEL, AgentIdentity, Holder, agent_tls, refusal, server_name};
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_server::pki::{
    Ca, EnrollPolicy, EnrollService, KnownNodes, Lifetimes, PkiMetrics, Revocation, Revocations,
    ServerCertificate, ServerNames, Standing, TokenStore,
};

/// Only a program that hangs takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

pub(crate) async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    wait_for(what, DEADLINE, async || Ok(condition().await)).await.unwrap()
}

/// Everything that all tests of this program have logged, at every level.
pub(crate) fn log() -> String {
    String::from_utf8_lossy(&log_buffer().lock().unwrap()).into_owned()
}

fn log_buffer() -> &'static Mutex<Vec<u8>> {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static INIT: OnceLock<()> = OnceLock::new();
    INIT.get_or_init(|| {
        struct Buffer;
        impl Write for Buffer {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                LOG.lock().unwrap().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
            .with_ansi(false)
            .with_writer(|| Buffer)
            .init();
    });
    &LOG
}

pub(crate) struct TestServer {
    pub(crate) revocations: watch::Sender<Arc<Revocations>>,
    /// None if the inventory is not known.
    pub(crate) nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) ca: Ca,
    pub(crate) certificate: ServerCertificate,
    pub(crate) metrics: PkiMetrics,
    pub(crate) address: String,
    /// Number of next answers that are lost on their way.
    pub(crate) lose_answers: Arc<AtomicUsize>,
    /// Errors of failed handshakes.
    pub(crate) refused: Arc<Mutex<Vec<String>>>,
    accept: tokio::task::JoinHandle<()>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        Self::with(Lifetimes::default()).await
    }

    pub(crate) async fn with(lifetimes: Lifetimes) -> Self {
        Self::build(lifetimes, true).await
    }

    /// `tokens`: true if tokens enrol.
    pub(crate) async fn build(lifetimes: Lifetimes, tokens: bool) -> Self {
        let _ = log_buffer();
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::load_or_create(&directory.path().join("server"), lifetimes).unwrap();
        let metrics = PkiMetrics::default();
        let certificate =
            ServerCertificate::start(ca.clone(), ServerNames::default(), "server-1", metrics.clone())
                .unwrap();
        let revocations = watch::Sender::<Arc<Revocations>>::default();
        let (nodes, known) = watch::channel(None);
        let policy = EnrollPolicy { standing: Standing::new(revocations.subscribe(), known, true), tokens };
        let service = EnrollService::new(certificate.ca.clone(), ca.state_dir(), policy, metrics.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (lose_answers, refused) = (Arc::new(AtomicUsize::new(0)), Arc::<Mutex<Vec<String>>>::default());
        let (tls, lose, refusals) =
            (certificate.tls.clone(), Arc::clone(&lose_answers), Arc::clone(&refused));
        let accept = tokio::spawn(async move {
            while let Ok((stream, peer)) = listener.accept().await {
                let acceptor = tls.acceptor();
                let (service, lose, refusals) = (service.clone(), Arc::clone(&lose), Arc::clone(&refusals));
                tokio::spawn(async move {
                    match acceptor.accept(stream).await {
                        Ok(stream) => serve(stream, peer, service, lose).await,
                        Err(error) => {
                            let reason = refusal(&error).map_or(error.to_string(), ToString::to_string);
                            refusals.lock().unwrap().push(reason);
                        }
                    }
                });
            }
        });
        Self {
            revocations,
            nodes,
            directory,
            ca,
            certificate,
            metrics,
            address,
            lose_answers,
            refused,
            accept,
        }
    }

    pub(crate) fn state_dir(&self) -> &Path {
        self.ca.state_dir()
    }

    pub(crate) fn tokens(&self) -> TokenStore {
        TokenStore::new(self.state_dir())
    }

    pub(crate) fn token(&self, name: &str) -> String {
        let ttl = Duration::from_secs(3600);
        self.tokens().create((Holder::Agent, &node(name)), ttl, Timestamp::now()).unwrap().0.expose()
    }

    pub(crate) fn ca_hash(&self) -> String {
        self.ca.state().unwrap().hash().to_owned()
    }

    /// An agent's configuration; its state is under the server's temporary directory.
    pub(crate) fn agent(&self, name: &str, state: &str, token: Option<&str>) -> EnrollConfig {
        EnrollConfig {
            servers: vec![self.address.clone()],
            holder: Holder::Agent,
            node: node(name),
            state_dir: self.directory.path().join(state),
            token: token.map(|token| (token.into(), self.ca_hash())),
            reach: Reach::default(),
            clock: Clock::default(),
        }
    }

    /// A new token and an agent that has enrolled with it.
    pub(crate) async fn enrolled(&self, name: &str) -> (EnrollConfig, AgentIdentity) {
        let config = self.agent(name, name, Some(&self.token(name)));
        let identity = enroll(&config).await.unwrap();
        (config, identity)
    }
}

/// Makes this record the only one that a server knows.
pub(crate) fn publish(revocations: &watch::Sender<Arc<Revocations>>, record: Revocation) {
    let records = [(record.subject.clone(), record)].into();
    revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
}

pub(crate) async fn enroll(config: &EnrollConfig) -> Result<AgentIdentity, EnrollError> {
    tokio::time::timeout(DEADLINE, ensure_identity(config)).await.expect("neither enrolled nor gave up")
}

async fn serve(
    mut stream: tokio_rustls::server::TlsStream<TcpStream>,
    peer: SocketAddr,
    service: EnrollService,
    lose: Arc<AtomicUsize>,
) {
    let session = stream.get_ref().1;
    let certificate = session.peer_certificates().and_then(|chain| chain.first()).cloned();
    if session.alpn_protocol() == Some(ALPN_TUNNEL) {
        let mut buffer = [0; 1024];
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            if stream.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
        return;
    }
    assert_eq!(session.alpn_protocol(), Some(ALPN_GRPC));
    let service = service.for_client(peer.ip(), certificate);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (mut service, lose) = (service.clone(), Arc::clone(&lose));
        async move {
            let answer = service.call(request).await;
            let lost =
                lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
            if lost { Err(std::io::Error::other("lost on its way")) } else { Ok(answer.unwrap()) }
        }
    });
    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    // A client that goes away is no failure of the test.
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

pub(crate) async fn connect(address: &str, tls: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(tls).connect(server_name(), stream).await
}

/// A session of an agent, and the chain that the server showed.
pub(crate) struct Session {
    stream: TlsStream<TcpStream>,
    pub(crate) server_chain: Vec<CertificateDer<'static>>,
}

impl Session {
    /// Fails also when the server refuses the agent's certificate, which in TLS 1.3 shows only after the handshake.
    pub(crate) async fn open(address: &str, identity: &AgentIdentity) -> std::io::Result<Self> {
        let mut tls = ClientConfig::clone(&agent_tls(identity, ALPN_TUNNEL).unwrap());
        // Only a full handshake shows the server's present certificate. The echo server checks nobody after it.
        tls.resumption = Resumption::disabled();
        let stream = connect(address, Arc::new(tls)).await?;
        let server_chain = stream.get_ref().1.peer_certificates().unwrap().to_vec();
        let mut session = Self { stream, server_chain };
        session.echo().await?;
        Ok(session)
    }

    pub(crate) async fn echo(&mut self) -> std::io::Result<()> {
        self.stream.write_all(b"ping").await?;
        let mut answer = [0; 4];
        self.stream.read_exact(&mut answer).await?;
        assert_eq!(&answer, b"ping");
        Ok(())
    }
}

/// A gRPC client with TLS settings of the test's choice.
pub(crate) async fn client(address: &str, tls: Arc<ClientConfig>) -> EnrollmentClient<Channel> {
    EnrollmentClient::new(channel(address, tls).await)
}

/// The same for any service.
pub(crate) async fn channel(address: &str, tls: Arc<ClientConfig>) -> Channel {
    let mut stream = Some(TokioIo::new(connect(address, tls).await.unwrap()));
    let connector = tower::service_fn(move |_: http::Uri| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| std::io::Error::other("once only")) }
    });
    Endpoint::from_static("http://test").connect_with_connector(connector).await.unwrap()
}

pub(crate) fn mode(path: &PathBuf) -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).unwrap().mode() & 0o777
}

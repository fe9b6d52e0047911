//! An agent written by hand, which breaks the rules that the real one keeps.
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tunnel_core::identity::SERVER_NAME;
use tunnel_core::proto::agent_event::Event;
use tunnel_core::proto::agent_server::{Agent, AgentServer};
use tunnel_core::proto::{AgentEvent, Hello, Load, Notice, NoticeAck, Segment, Welcome, notice};

use crate::client::{PATIENCE, connect_from};
use crate::testbed::netns::Namespace;

/// What an enrolled agent keeps in its state folder.
#[derive(Debug)]
pub struct Credentials {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: RootCertStore,
}

impl Credentials {
    /// Takes them from the state folder of a real agent.
    pub fn of_agent(dir: &Path) -> Result<Self> {
        let chain = pem(&dir.join("agent.crt"))?;
        let key = PrivateKeyDer::from_pem_file(dir.join("agent.key")).context("reading agent.key")?;
        Ok(Self { chain, key, roots: roots(dir)? })
    }
}

/// The roots that an enrolled agent trusts.
pub fn roots(dir: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for root in pem(&dir.join("ca.crt"))? {
        roots.add(root).context("a root of ca.crt")?;
    }
    Ok(roots)
}

fn pem(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let certificates = CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>();
    certificates.with_context(|| format!("certificates in {}", path.display()))
}

/// Dials the server's agent port as an agent does.
pub async fn dial(
    ns: &Namespace,
    server: SocketAddr,
    roots: RootCertStore,
    credentials: Option<&Credentials>,
    alpn: &[u8],
) -> Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.context("TLS versions")?.with_root_certificates(roots);
    let mut config = match credentials {
        Some(own) => builder
            .with_client_auth_cert(own.chain.clone(), own.key.clone_key())
            .context("own certificate")?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let stream = connect_from(ns, server, PATIENCE).with_context(|| format!("dialling {server}"))?;
    let name = ServerName::try_from(SERVER_NAME).context("the server's name")?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.context("TLS handshake")
}

impl Credentials {
    /// Dials with these.
    pub async fn dial(&self, ns: &Namespace, server: SocketAddr) -> Result<TlsStream<TcpStream>> {
        dial(ns, server, self.roots.clone(), Some(self), b"postern/1").await
    }
}

/// How the agent misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Says Hello and then nothing.
    Quiet,
    /// Says Hello and then sends load reports as fast as it can.
    FloodsEvents,
    /// Never says Hello.
    NeverGreets,
    /// Answers every Carry with bytes without end, whatever it is asked.
    FloodsCarry,
}

/// What the server did to it.
#[derive(Debug, Default)]
pub struct Told {
    /// Attach calls.
    pub attached: usize,
    /// Carry calls.
    pub carried: usize,
    /// Reasons of Refused notices.
    pub refused: Vec<String>,
    /// Replaced notices.
    pub replaced: usize,
}

/// A session of an evil agent.
#[derive(Debug)]
pub struct EvilAgent {
    told: Arc<Mutex<Told>>,
    connection: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Service {
    hello: Hello,
    manner: Manner,
    told: Arc<Mutex<Told>>,
}

impl EvilAgent {
    /// Serves the tunnel protocol on a dialled connection, claiming to be `node`.
    pub fn serve(stream: TlsStream<TcpStream>, node: &str, epoch: u64, manner: Manner) -> Self {
        let told = Arc::new(Mutex::new(Told::default()));
        let hello =
            Hello { node: node.to_owned(), epoch, agent_version: "evil".to_owned(), ..Hello::default() };
        let service = Service { hello, manner, told: Arc::clone(&told) };
        let routes = tonic::service::Routes::new(AgentServer::new(service)).prepare();
        let connection = tokio::spawn(async move {
            let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let served = http2.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)).await;
            println!("evil agent: connection ended: {served:?}");
        });
        Self { told, connection }
    }

    /// Whether the server has ended the connection.
    pub fn ended(&self) -> bool {
        self.connection.is_finished()
    }

    /// Looks at what the server did.
    pub fn told<T>(&self, look: impl FnOnce(&Told) -> T) -> T {
        look(&self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl Drop for EvilAgent {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Service {
    fn note(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<AgentEvent, Status>> + Send>>;
type Segments = Pin<Box<dyn Stream<Item = Result<Segment, Status>> + Send>>;

#[tonic::async_trait]
impl Agent for Service {
    type AttachStream = Events;
    type CarryStream = Segments;

    async fn attach(&self, _: Request<Welcome>) -> Result<Response<Events>, Status> {
        self.note(|told| told.attached += 1);
        let hello = tokio_stream::once(Ok(AgentEvent { event: Some(Event::Hello(self.hello.clone())) }));
        let silence = tokio_stream::pending();
        let events: Events = match self.manner {
            Manner::Quiet | Manner::FloodsCarry => Box::pin(hello.chain(silence)),
            Manner::NeverGreets => Box::pin(silence),
            Manner::FloodsEvents => {
                let load = || {
                    Ok(AgentEvent {
                        event: Some(Event::Load(Load { connections: u32::MAX, pending_dials: 1 })),
                    })
                };
                // Bounded, so that a forgotten one ends by itself.
                Box::pin(hello.chain(tokio_stream::iter((0..20_000_000).map(move |_| load()))))
            }
        };
        Ok(Response::new(events))
    }

    async fn carry(&self, _: Request<Streaming<Segment>>) -> Result<Response<Segments>, Status> {
        self.note(|told| told.carried += 1);
        if self.manner != Manner::FloodsCarry {
            return Err(Status::unavailable("evil agents dial nothing"));
        }
        let data = vec![b'x'; 64 * 1024];
        Ok(Response::new(Box::pin(tokio_stream::iter(
            (0..1_000_000).map(move |_| Ok(Segment { data: data.clone().into() })),
        ))))
    }

    async fn notify(&self, request: Request<Notice>) -> Result<Response<NoticeAck>, Status> {
        match request.into_inner().notice {
            Some(notice::Notice::Refused(refused)) => self.note(|told| told.refused.push(refused.reason)),
            Some(notice::Notice::Replaced(_)) => self.note(|told| told.replaced += 1),
            _ => {}
        }
        Ok(Response::new(NoticeAck {}))
    }
}

/// Floods with HTTP/2 frames that each ask for an answer, reading nothing: SETTINGS first, then PINGs, then resets of
/// streams that were never opened. Ends when the server has closed the connection or `limit` is over; returns the
/// bytes that could be written.
pub async fn flood_frames(mut stream: TlsStream<TcpStream>, limit: Duration) -> Result<u64> {
    use tokio::io::AsyncWriteExt as _;
    let mut frames = Vec::new();
    // length (3), type (1), flags (1), stream (4); RFC 9113 section 4.1.
    frames.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    for number in 0_u32..2_000 {
        frames.extend([0, 0, 8, 6, 0, 0, 0, 0, 0]);
        frames.extend(u64::from(number).to_be_bytes());
        frames.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    }
    let mut written = 0;
    let flood = async {
        while stream.write_all(&frames).await.is_ok() {
            written += frames.len() as u64;
        }
    };
    // Either end is fine: the server closed, or it lets the flood stand in the socket.
    tokio::time::timeout(limit, flood).await.ok();
    Ok(written)
}

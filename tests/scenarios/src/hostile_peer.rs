//! An agent that breaks the rules of the protocol.
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use postern_testbed::client::{PATIENCE, connect_from};
use postern_testbed::netns::Namespace;
use postern_testbed::tls::{self, Identity};
use postern_testbed::wait::wait_for;
use rustls::RootCertStore;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::proto::agent_event::Event;
use tunnel_link::proto::agent_server::{Agent, AgentServer};
use tunnel_link::proto::{AgentEvent, Hello, Load, Notice, NoticeAck, Segment, Welcome, notice};
use tunnel_pki::SERVER_NAME;

/// The contents of an enrolled agent's state folder.
#[derive(Debug)]
pub(crate) struct Credentials {
    identity: Identity,
    roots: RootCertStore,
}

impl Credentials {
    /// Reads the state folder of a real agent.
    pub(crate) fn of_agent(dir: &Path) -> Result<Self> {
        let identity = Identity::read(&dir.join("agent.crt"), &dir.join("agent.key"))?;
        Ok(Self { identity, roots: tls::roots(&dir.join("ca.crt"))? })
    }

    /// Reads the state folder of a real redirector.
    pub(crate) fn of_redirector(dir: &Path) -> Result<Self> {
        let identity = Identity::read(&dir.join("redirector.crt"), &dir.join("redirector.key"))?;
        Ok(Self { identity, roots: tls::roots(&dir.join("ca.crt"))? })
    }

    /// Dials the server's agent port with these credentials.
    pub(crate) async fn dial(&self, ns: &Namespace, server: SocketAddr) -> Result<TlsStream<TcpStream>> {
        self.dial_for(ns, server, b"postern/1").await
    }

    /// As [`Self::dial`], for another protocol.
    pub(crate) async fn dial_for(
        &self,
        ns: &Namespace,
        server: SocketAddr,
        alpn: &[u8],
    ) -> Result<TlsStream<TcpStream>> {
        dial(ns, server, self.roots.clone(), Some(&self.identity), alpn).await
    }
}

/// Dials the server's agent port as an agent does.
pub(crate) async fn dial(
    ns: &Namespace,
    server: SocketAddr,
    roots: RootCertStore,
    identity: Option<&Identity>,
    alpn: &[u8],
) -> Result<TlsStream<TcpStream>> {
    let stream = connect_from(ns, server, PATIENCE).await.with_context(|| format!("dialling {server}"))?;
    tls::handshake(stream, SERVER_NAME, roots, identity, Some(alpn)).await
}

/// The agent's misbehaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    /// Sends Hello and then nothing.
    Quiet,
    /// Sends Hello and then load reports as fast as it can.
    FloodsEvents,
    NoHello,
    /// Answers every Relay with endless bytes.
    FloodsRelay,
}

/// Messages that the server sent.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pub(crate) relayed: usize,
    /// Reasons in Refused notices.
    pub(crate) refused: Vec<String>,
    pub(crate) replaced: usize,
}

#[derive(Debug)]
pub(crate) struct HostileAgent {
    observed: Arc<Mutex<Observed>>,
    connection: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Service {
    hello: Hello,
    behaviour: Behaviour,
    observed: Arc<Mutex<Observed>>,
}

impl HostileAgent {
    /// Serves the tunnel protocol on a dialled connection, claiming to be `node`.
    pub(crate) fn serve(
        stream: TlsStream<TcpStream>,
        node: &str,
        (epoch, link): (u64, u32),
        behaviour: Behaviour,
    ) -> Self {
        let observed = Arc::new(Mutex::new(Observed::default()));
        let hello = Hello {
            node: node.to_owned(),
            epoch,
            link,
            agent_version: "hostile".to_owned(),
            ..Hello::default()
        };
        let service = Service { hello, behaviour, observed: Arc::clone(&observed) };
        let service = TowerToHyperService::new(AgentServer::new(service));
        let connection = tokio::spawn(async move {
            let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let served = http2.serve_connection(TokioIo::new(stream), service).await;
            println!("hostile agent: connection ended: {served:?}");
        });
        Self { observed, connection }
    }

    /// Waits until the server has ended the connection.
    pub(crate) async fn wait_ended(&self, what: &str, limit: Duration) -> Result<()> {
        wait_for(what, limit, async || Ok(self.connection.is_finished().then_some(()))).await
    }

    /// Reads what the server has sent so far.
    pub(crate) fn observed<T>(&self, read: impl FnOnce(&Observed) -> T) -> T {
        read(&self.observed.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl Drop for HostileAgent {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Service {
    fn note(&self, change: impl FnOnce(&mut Observed)) {
        change(&mut self.observed.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<AgentEvent, Status>> + Send>>;
type Segments = Pin<Box<dyn Stream<Item = Result<Segment, Status>> + Send>>;

#[tonic::async_trait]
impl Agent for Service {
    type AttachStream = Events;
    type RelayStream = Segments;

    async fn attach(&self, _: Request<Welcome>) -> Result<Response<Events>, Status> {
        let hello = tokio_stream::once(Ok(AgentEvent { event: Some(Event::Hello(self.hello.clone())) }));
        let silence = tokio_stream::pending();
        let events: Events = match self.behaviour {
            Behaviour::Quiet | Behaviour::FloodsRelay => Box::pin(hello.chain(silence)),
            Behaviour::NoHello => Box::pin(silence),
            Behaviour::FloodsEvents => {
                let load = || {
                    Ok(AgentEvent {
                        event: Some(Event::Load(Load { connections: u32::MAX, pending_dials: 1 })),
                    })
                };
                // Bounded, so that it ends even if forgotten.
                Box::pin(hello.chain(tokio_stream::iter((0..20_000_000).map(move |_| load()))))
            }
        };
        Ok(Response::new(events))
    }

    async fn relay(&self, _: Request<Streaming<Segment>>) -> Result<Response<Segments>, Status> {
        self.note(|seen| seen.relayed += 1);
        if self.behaviour != Behaviour::FloodsRelay {
            return Err(Status::unavailable("hostile agents dial nothing"));
        }
        let data = vec![b'x'; 64 * 1024];
        Ok(Response::new(Box::pin(tokio_stream::iter(
            (0..1_000_000).map(move |_| Ok(Segment { data: data.clone().into() })),
        ))))
    }

    async fn notify(&self, request: Request<Notice>) -> Result<Response<NoticeAck>, Status> {
        match request.into_inner().notice {
            Some(notice::Notice::Refused(refused)) => self.note(|seen| seen.refused.push(refused.reason)),
            Some(notice::Notice::Replaced(_)) => self.note(|seen| seen.replaced += 1),
            _ => {}
        }
        Ok(Response::new(NoticeAck {}))
    }
}

//! One session, from the TCP dial to its end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use h2::PingPong;
use h2::server::Connection;
use rustls_pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsConnector, rustls};
use tokio_util::sync::CancellationToken;
use tunnel_core::carry::CARRY_PATH;
use tunnel_core::grpc;
use tunnel_core::identity::server_name;
use tunnel_core::link::{self, HANDSHAKE_TIMEOUT};
use tunnel_core::proto::agent_server::AgentServer;
use tunnel_core::proto::{Addresses, AgentEvent, Draining, Load, agent_event};

use super::service::AgentService;
use super::{Notice, SessionState};
use crate::dial;

/// How long the server may take to hear the last frames of a session that failed.
const GOODBYE: Duration = Duration::from_secs(1);
/// The same after a drain: what was carried may still wait behind a slow link.
const LONG_GOODBYE: Duration = Duration::from_secs(10);
/// How long nothing must be carried for a drain to be over; on a slow link twice its round trip.
const QUIET: Duration = Duration::from_millis(100);
/// Time between two reports of load.
const LOAD_INTERVAL: Duration = Duration::from_secs(15);

/// How a session ended, or why there was none.
#[derive(Debug, thiserror::Error)]
pub enum SessionEnd {
    /// The name does not resolve or nothing accepts there.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// A step of the start took too long.
    #[error("no {step} within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Slow {
        /// Which.
        step: &'static str,
    },
    /// The server's certificate is not one of ours, or it refused ours.
    #[error("TLS failed: {0}")]
    Tls(#[source] io::Error),
    /// HTTP/2 failed: the link broke.
    #[error("link lost: {}", link::reason(.0))]
    Link(#[source] h2::Error),
    /// The link went silent.
    #[error("link lost: {0}")]
    Dead(#[from] link::LinkDead),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server said that it stops.
    #[error("the server is draining")]
    Draining,
    /// The server does not take this session.
    #[error("the server refused this session: {0}")]
    Refused(String),
    /// Another address of this agent leads to the same server.
    #[error("the same server is attached through {0}")]
    SameServer(String),
    /// Another agent took over.
    #[error(
        "a newer session of this node took over, from {0}: is a second agent running with this node's identity?"
    )]
    Replaced(String),
    /// This agent stops.
    #[error("this agent stops")]
    Stopping,
}

pub(super) type LinkConnection = Connection<TlsStream<TcpStream>, bytes::Bytes>;

type Chain = Arc<[CertificateDer<'static>]>;

/// TCP, TLS and HTTP/2 up to the first frames; also what the server showed in its handshake, leaf first.
pub(super) async fn connect(
    server: &str,
    tls: Arc<rustls::ClientConfig>,
) -> Result<(LinkConnection, Chain), SessionEnd> {
    let mut stream = handshake(server, tls).await?;
    link::tune_tls(stream.get_mut().1);
    let chain = shown(&stream);
    let link = within("HTTP/2 preface", link::server_builder().handshake(stream))
        .await?
        .map_err(SessionEnd::Link)?;
    Ok((link, chain))
}

/// What the server shows at present, leaf first: a session that is older than its certificate does not know.
///
/// # Errors
/// The server cannot be reached, or its certificate is refused.
pub async fn present_chain(server: &str, tls: Arc<rustls::ClientConfig>) -> Result<Chain, SessionEnd> {
    handshake(server, tls).await.map(|stream| shown(&stream))
}

async fn handshake(server: &str, tls: Arc<rustls::ClientConfig>) -> Result<TlsStream<TcpStream>, SessionEnd> {
    let socket = within("TCP connection", TcpStream::connect(server)).await?.map_err(SessionEnd::Connect)?;
    link::tune_link(&socket).map_err(SessionEnd::Connect)?;
    // Every server of ours proves this name, whatever address or load balancer leads to it.
    let handshake = TlsConnector::from(tls).connect(server_name(), socket);
    within("TLS handshake", handshake).await?.map_err(SessionEnd::Tls)
}

fn shown(stream: &TlsStream<TcpStream>) -> Chain {
    stream.get_ref().1.peer_certificates().unwrap_or_default().into()
}

async fn within<T>(step: &'static str, work: impl Future<Output = T>) -> Result<T, SessionEnd> {
    tokio::time::timeout(HANDSHAKE_TIMEOUT, work).await.map_err(|_| SessionEnd::Slow { step })
}

/// Serves one link until it ends. When the server drains, `on_draining` fires at once, and serving goes on until what
/// is carried has ended.
pub(super) async fn serve(
    session: Arc<SessionState>,
    mut link: LinkConnection,
    on_draining: CancellationToken,
) -> SessionEnd {
    let Some(pings) = link.ping_pong() else { return SessionEnd::Closed };
    let service = AgentServer::new(AgentService(session.clone()));
    // A task of its own: carried bytes wake this one, and nothing else then has to look.
    let mut watching = JoinSet::new();
    watching.spawn(watch(session.clone(), pings, session.notices.subscribe(), on_draining));
    let end = loop {
        tokio::select! {
            biased;
            Some(ended) = watching.join_next() => break ended.unwrap_or(SessionEnd::Closed),
            accepted = link.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    if request.uri().path() == CARRY_PATH {
                        tokio::spawn(dial::carry(session.clone(), request, respond));
                    } else {
                        tokio::spawn(grpc::serve(service.clone(), request, respond));
                    }
                }
                Some(Err(error)) => break SessionEnd::Link(error),
                None => break SessionEnd::Closed,
            },
        }
    };
    drop(watching);
    session.shared.attached.release(session.epoch);
    // Whatever is still carried is reset; the GOAWAY tells the server that this was on purpose.
    session.stop.cancel();
    link.graceful_shutdown();
    let goodbye = async { while let Some(Ok(_)) = link.accept().await {} };
    let patience = match end {
        SessionEnd::Draining | SessionEnd::Stopping if !session.shared.forced.is_cancelled() => LONG_GOODBYE,
        _ => GOODBYE,
    };
    if tokio::time::timeout(patience, goodbye).await.is_err() {
        tracing::debug!(server = %session.server, "the server did not close the link in time");
    }
    end
}

/// Everything that ends a session beside its link.
async fn watch(
    session: Arc<SessionState>,
    pings: PingPong,
    mut notices: Receiver<Notice>,
    on_draining: CancellationToken,
) -> SessionEnd {
    tokio::select! {
        end = never_attached(&session) => end,
        dead = link::keep_alive(pings, &session.rtt, || session.stalls.sweep()) => dead.into(),
        end = report(session.clone()) => end,
        end = told(&session, &mut notices, &on_draining) => end,
        end = drained(&session, &on_draining) => end,
        () = session.stop.cancelled() => SessionEnd::Stopping,
    }
}

/// Ends when the server has not attached in time.
async fn never_attached(session: &SessionState) -> SessionEnd {
    let mut notices = session.notices.subscribe();
    let attached = notices.wait_for(|notice| *notice != Notice::Connecting);
    match within("Attach from the server", async { attached.await.is_ok() }).await {
        Ok(_) => std::future::pending().await,
        Err(end) => end,
    }
}

/// Ends when the server says that this session is over; passes its drain on.
async fn told(
    session: &SessionState,
    notices: &mut Receiver<Notice>,
    on_draining: &CancellationToken,
) -> SessionEnd {
    loop {
        if notices.changed().await.is_err() {
            return SessionEnd::Closed;
        }
        match &*notices.borrow_and_update() {
            Notice::Draining => {
                // Its successor may be reached through the same address, or another.
                session.shared.attached.release(session.epoch);
                on_draining.cancel();
            }
            Notice::Refused(reason) => return SessionEnd::Refused(reason.clone()),
            Notice::SameServer { through } => return SessionEnd::SameServer(through.clone()),
            Notice::Replaced { peer } => return SessionEnd::Replaced(peer.clone()),
            Notice::Connecting | Notice::Attached { .. } => {}
        }
    }
}

/// Once this agent or the server drains, waits until nothing is carried any more.
async fn drained(session: &SessionState, server_draining: &CancellationToken) -> SessionEnd {
    let end = tokio::select! {
        () = session.shared.draining.cancelled() => {
            let event = AgentEvent { event: Some(agent_event::Event::Draining(Draining {})) };
            let _ = session.events.send(Ok(event)).await;
            SessionEnd::Stopping
        }
        () = server_draining.cancelled() => SessionEnd::Draining,
    };
    // The server may have opened a stream before it knew.
    let quiet = QUIET.max(session.rtt.last().unwrap_or_default() * 2);
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let mut since = Instant::now();
    while since.elapsed() < quiet {
        tick.tick().await;
        if session.connections() > 0 {
            since = Instant::now();
        }
    }
    end
}

/// Tells the server about this node's addresses and load as they change. Never ends by itself.
async fn report(session: Arc<SessionState>) -> SessionEnd {
    let mut addresses = session.shared.addresses.clone();
    let mut tick = tokio::time::interval(LOAD_INTERVAL);
    let mut told = Load::default();
    loop {
        let event = tokio::select! {
            changed = addresses.changed() => {
                if changed.is_err() { return std::future::pending().await }
                let now = addresses.borrow_and_update().iter().map(ToString::to_string).collect();
                agent_event::Event::Addresses(Addresses { addresses: now })
            }
            _ = tick.tick() => {
                let pending = super::PENDING_DIALS - session.pending.available_permits();
                let now = Load { connections: session.connections(), pending_dials: u32::try_from(pending).unwrap_or(u32::MAX) };
                if now == told { continue }
                told = now;
                agent_event::Event::Load(now)
            }
        };
        if *session.notices.borrow() == Notice::Connecting {
            continue;
        }
        // A full queue means that the server does not read its events; the next report says the same again.
        let _ = session.events.try_send(Ok(AgentEvent { event: Some(event) }));
    }
}

//! One agent's link, from the end of its TLS handshake to its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::PingPong;
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};
use tunnel_core::carry::{StallBound, Totals};
use tunnel_core::grpc::{self, Channel, origin};
use tunnel_core::identity::NodeName;
use tunnel_core::link::{self, HANDSHAKE_TIMEOUT, Rtt};
use tunnel_core::proto::agent_client::AgentClient;
use tunnel_core::proto::{
    AgentEvent, Hello, LoopbackPorts, Notice, Refused, Replaced, ServerDraining, TrustBundle, Welcome,
    agent_event, notice,
};
use tunnel_core::text::printable;

use super::Session;
use super::agent_port::AgentPort;
use super::registry::Fenced;
use crate::admission::Admitted;
use crate::settings::Settings;

/// The largest control message taken from an agent.
const MAX_MESSAGE: usize = 64 << 10;
/// How long an agent may take to acknowledge a notice.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(2);
/// Events that an agent may send in [`EVENT_SPAN`]; more is a flood.
const MAX_EVENTS: u32 = 200;
const EVENT_SPAN: Duration = Duration::from_secs(10);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("link lost: {}", link::reason(.0))]
    Link(#[from] h2::Error),
    #[error("the agent closed the connection")]
    Closed,
    #[error("the agent has left")]
    Left,
    #[error(transparent)]
    Dead(#[from] link::LinkDead),
    #[error("the agent did not answer Attach within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    NoHello,
    #[error("Attach failed: {}", printable(.0.message(), 200))]
    Attach(Box<Status>),
    #[error("link lost: {}", printable(&link::reason(&**.0), 200))]
    Lost(Box<Status>),
    #[error("the agent's first event is not Hello")]
    NotHello,
    #[error("the certificate names node {certified}, but Hello says {claimed:?}")]
    Impostor { certified: NodeName, claimed: String },
    #[error(transparent)]
    Fenced(#[from] Fenced),
    #[error("the agent sent more than {MAX_EVENTS} events in {} s", EVENT_SPAN.as_secs())]
    Flood,
    #[error("replaced by a newer session, or this server stops")]
    Ended,
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Attach(Box::new(status))
    }
}

/// Drives the link until it ends.
pub(super) async fn run(
    port: Arc<AgentPort>,
    stream: Box<TlsStream<TcpStream>>,
    peer: SocketAddr,
    node: NodeName,
    worker: Handle,
    admitted: Admitted,
) {
    let started = Instant::now();
    let end = drive(&port, stream, peer, node.clone(), worker, admitted).await;
    let lasted_s = started.elapsed().as_secs();
    match end {
        // It has another address of this server, and is attached through that.
        End::Attach(status) if status.code() == Code::AlreadyExists => {
            tracing::debug!(%node, %peer, "second link of an attached agent: {}", printable(status.message(), 200));
        }
        End::Ended | End::Left => tracing::info!(%node, %peer, lasted_s, "session ended: {end}"),
        End::Impostor { .. } | End::Flood | End::Fenced(_) => {
            port.config.metrics.session_refused(end.label());
            tracing::warn!(%node, %peer, lasted_s, "session refused: {end}");
        }
        End::NoHello | End::NotHello | End::Attach(_) => {
            port.config.metrics.handshake("failed");
            tracing::warn!(%node, %peer, lasted_s, "no session: {end}");
        }
        _ => tracing::warn!(%node, %peer, lasted_s, "session ended: {end}"),
    }
}

impl End {
    const fn label(&self) -> &'static str {
        match self {
            Self::Impostor { .. } => "impostor",
            Self::Flood => "flood",
            Self::Fenced(_) => "older",
            _ => "failed",
        }
    }
}

async fn drive(
    port: &Arc<AgentPort>,
    stream: Box<TlsStream<TcpStream>>,
    peer: SocketAddr,
    node: NodeName,
    worker: Handle,
    admitted: Admitted,
) -> End {
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, link::client_builder().handshake(stream)).await;
    let (send, mut connection) = match handshake {
        Ok(Ok(link)) => link,
        Ok(Err(error)) => return End::Link(error),
        Err(_) => return End::NoHello,
    };
    let Some(pings) = connection.ping_pong() else { return End::Closed };
    // A task of its own: carried bytes wake it, and nothing else then has to look.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    tokio::select! {
        biased;
        end = session(port, send, pings, peer, node, worker, admitted) => end,
        Some(ended) = driver.join_next() => match ended {
            Ok(Err(error)) => End::Link(error),
            _ => End::Closed,
        },
    }
}

/// Takes the session out of the registry, however its task ends.
struct Registered<'a> {
    port: &'a AgentPort,
    session: Arc<Session>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.port.config.sessions.ended(&self.session);
        self.session.closed.cancel();
    }
}

async fn session(
    port: &Arc<AgentPort>,
    send: SendRequest<Bytes>,
    pings: PingPong,
    peer: SocketAddr,
    node: NodeName,
    worker: Handle,
    admitted: Admitted,
) -> End {
    let mut client =
        AgentClient::with_origin(Channel::new(send.clone()), origin()).max_decoding_message_size(MAX_MESSAGE);
    let loopback = loopback_ports(&port.config.settings.borrow());
    // Its room is given back once the agent has answered.
    let greeting = Box::pin(greet(port, Channel::new(send.clone()), &loopback));
    let (hello, mut events) = match tokio::time::timeout(HANDSHAKE_TIMEOUT, greeting).await {
        Ok(Ok(greeting)) => greeting,
        Ok(Err(end)) => return end,
        Err(_) => return End::NoHello,
    };
    if hello.node != node.as_str() {
        let end = End::Impostor { certified: node, claimed: printable(&hello.node, 253) };
        tell(&mut client, notice::Notice::Refused(Refused { reason: end.to_string() })).await;
        return end;
    }
    let session = Arc::new(Session {
        id: port.config.sessions.next_id(),
        node,
        epoch: hello.epoch,
        peer,
        since: Instant::now(),
        agent_version: printable(&hello.agent_version, 64),
        rtt: Rtt::default(),
        stalls: StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize),
        connections: AtomicU32::new(0),
        carried: Totals::default(),
        closed: CancellationToken::new(),
        send,
        worker,
    });
    match port.config.sessions.register(session.clone()) {
        Ok(older) => retire(older, &session),
        Err(fenced) => {
            tell(&mut client, notice::Notice::Refused(Refused { reason: fenced.to_string() })).await;
            return fenced.into();
        }
    }
    let registered = Registered { port, session: session.clone() };
    drop(admitted);
    port.config.metrics.handshake("attached");
    tracing::info!(node = %session.node, %peer, epoch = session.epoch, version = %session.agent_version, "session attached");
    let end = follow(port, &session, &mut client, &mut events, pings, loopback).await;
    if matches!(end, End::Ended) && !port.config.draining.is_cancelled() {
        let reason = notice::Notice::Replaced(Replaced {
            epoch: session.epoch,
            peer: port
                .config
                .sessions
                .of(&session.node)
                .map_or_else(String::new, |newer| newer.peer.to_string()),
        });
        tell(&mut client, reason).await;
    }
    drop(registered);
    end
}

/// The older session of the same node has to go: its agent is gone, or is a second one with the same identity.
fn retire(older: Option<Arc<Session>>, newer: &Session) {
    if let Some(older) = older {
        tracing::warn!(
            node = %newer.node, old_peer = %older.peer, old_epoch = older.epoch,
            new_peer = %newer.peer, new_epoch = newer.epoch,
            "a newer session replaces the live one"
        );
        older.closed.cancel();
    }
}

async fn greet(
    port: &AgentPort,
    channel: Channel,
    loopback_ports: &[u32],
) -> Result<(Hello, Streaming<AgentEvent>), End> {
    let bundle = port.config.bundle.borrow().to_pem();
    let welcome = Welcome {
        server_id: port.config.server_id.clone(),
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        trust_bundle: bundle,
        loopback_ports: loopback_ports.to_vec(),
        ..Welcome::default()
    };
    let mut events = grpc::attach(channel, welcome, MAX_MESSAGE).await?;
    match events.message().await? {
        Some(AgentEvent { event: Some(agent_event::Event::Hello(hello)) }) => Ok((hello, events)),
        _ => Err(End::NotHello),
    }
}

/// Follows a registered session until it ends.
async fn follow(
    port: &AgentPort,
    session: &Arc<Session>,
    client: &mut AgentClient<Channel>,
    events: &mut Streaming<AgentEvent>,
    pings: PingPong,
    mut loopback: Vec<u32>,
) -> End {
    let mut bundle = port.config.bundle.clone();
    bundle.mark_unchanged();
    let mut settings = port.config.settings.clone();
    // They may have changed since the Welcome.
    settings.mark_changed();
    let mut alive = std::pin::pin!(link::keep_alive(pings, &session.rtt, || session.stalls.sweep()));
    let mut span = (Instant::now(), 0u32);
    let mut told_draining = false;
    loop {
        tokio::select! {
            event = events.message() => {
                let event = match event {
                    Ok(Some(event)) => event,
                    Ok(None) => {
                        port.config.sessions.leave(session);
                        finish(port, session).await;
                        return End::Left;
                    }
                    Err(status) => return End::Lost(Box::new(status)),
                };
                if span.0.elapsed() > EVENT_SPAN {
                    span = (Instant::now(), 0);
                }
                span.1 += 1;
                if span.1 > MAX_EVENTS {
                    return End::Flood;
                }
                match event.event {
                    Some(agent_event::Event::Draining(_)) => {
                        tracing::info!(node = %session.node, "the agent is draining");
                        port.config.sessions.leave(session);
                    }
                    Some(agent_event::Event::Hello(_)) => return End::NotHello,
                    // For an operator's eyes only: routes come from the inventory.
                    Some(agent_event::Event::Addresses(addresses)) => {
                        tracing::debug!(node = %session.node, addresses = ?addresses.addresses, "the node's addresses changed");
                    }
                    Some(agent_event::Event::Load(_)) | None => {}
                }
            }
            dead = &mut alive => return dead.into(),
            changed = bundle.changed(), if !told_draining => {
                if changed.is_err() { return End::Ended }
                let pem = bundle.borrow_and_update().to_pem();
                tell(client, notice::Notice::TrustBundle(TrustBundle { pem })).await;
            }
            changed = settings.changed(), if !told_draining => {
                if changed.is_err() { return End::Ended }
                let ports = loopback_ports(&settings.borrow_and_update());
                if ports != loopback {
                    loopback.clone_from(&ports);
                    tell(client, notice::Notice::LoopbackPorts(LoopbackPorts { ports })).await;
                }
            }
            () = port.config.draining.cancelled(), if !told_draining => {
                told_draining = true;
                let timeout_seconds = u32::try_from(port.config.drain_timeout.as_secs()).unwrap_or(u32::MAX);
                tell(client, notice::Notice::Draining(ServerDraining { timeout_seconds })).await;
            }
            () = session.closed.cancelled() => return End::Ended,
            () = port.config.stop.cancelled() => return End::Ended,
        }
    }
}

fn loopback_ports(settings: &Settings) -> Vec<u32> {
    settings.loopback.iter().map(|port| u32::from(*port)).collect()
}

/// The agent has left on purpose: callers that read slowly still get what was carried.
async fn finish(port: &AgentPort, session: &Session) {
    let idle = async {
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while session.connections.load(Ordering::Relaxed) > 0 {
            tick.tick().await;
        }
    };
    tokio::select! {
        () = idle => {}
        () = session.closed.cancelled() => {}
        () = port.config.stop.cancelled() => {}
        () = tokio::time::sleep(port.config.drain_timeout) => {}
    }
}

async fn tell(client: &mut AgentClient<Channel>, notice: notice::Notice) {
    let notice = Notice { notice: Some(notice) };
    match tokio::time::timeout(NOTICE_TIMEOUT, Box::pin(client.notify(notice))).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::debug!(%status, "a notice was not taken"),
        Err(_) => tracing::debug!("a notice was not acknowledged in time"),
    }
}

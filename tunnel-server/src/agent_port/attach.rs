//! An agent's link, from the end of its TLS handshake to its end: greeting, session, control messages.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use h2::PingPong;
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};
use tunnel_core::carry::{StallBound, Totals};
use tunnel_core::grpc::{self, Channel, origin};
use tunnel_core::identity::{NodeName, TrustBundle};
use tunnel_core::link::{self, Flow, HANDSHAKE_TIMEOUT, LinkIo};
use tunnel_core::proto::agent_client::AgentClient;
use tunnel_core::proto::{
    self, AgentEvent, Hello, LoopbackPorts, Notice, OpenLinks, Refused, Replaced, ServerDraining, Welcome,
    agent_event, notice,
};
use tunnel_core::text::printable;

use super::additional;
use super::gate::Certified;
use crate::metrics::Metrics;
use crate::pki::{Refusal, Standing};
use crate::session::{Fenced, Link, Links, Session, Sessions};
use crate::settings::Settings;

/// The largest control message accepted from an agent, in bytes.
const MAX_MESSAGE: usize = 64 << 10;
/// How long an agent may take to acknowledge a notice.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(2);
/// Events that an agent may send within [`EVENT_SPAN`]; more is a flood.
const MAX_EVENTS: u32 = 200;
const EVENT_SPAN: Duration = Duration::from_secs(10);

/// What all links work with.
pub struct LinkContext {
    pub server_id: String,
    /// The roots to announce to agents.
    pub bundle: watch::Receiver<Arc<TrustBundle>>,
    /// For the ports that agents dial on their node's loopback.
    pub settings: watch::Receiver<Arc<Settings>>,
    pub sessions: Arc<Sessions>,
    /// Whose agents may have sessions.
    pub standing: Standing,
    pub metrics: Metrics,
    /// Agents are notified; nothing new is accepted.
    pub draining: CancellationToken,
    /// Ends every connection: the time of the drain is up.
    pub forced: CancellationToken,
    /// Ends every link.
    pub stop: CancellationToken,
    /// How long the drain may take, for the agents to know.
    pub drain_timeout: Duration,
}

/// Whom the agent's certificate is for, and since when.
#[derive(Clone, Debug)]
pub(super) struct Presented {
    pub(super) node: NodeName,
    pub(super) issued: SystemTime,
}

/// Why a link has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
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
    #[error("it made room for another link before it was attached")]
    Evicted,
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
    #[error(transparent)]
    NotAdmitted(#[from] Refusal),
    #[error("the agent sent more than {MAX_EVENTS} events in {} s", EVENT_SPAN.as_secs())]
    Flood,
    #[error("replaced by a newer session, or this server stops")]
    Stopped,
    #[error("{0}")]
    NotJoined(String),
    #[error("an additional link sends no events")]
    Unasked,
    #[error("it was not needed any more")]
    Idle,
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Attach(Box::new(status))
    }
}

/// Serves the link until it ends, and logs why it did.
pub(super) async fn run(
    context: Arc<LinkContext>,
    stream: Box<TlsStream<TcpStream>>,
    peer: SocketAddr,
    presented: Presented,
    worker: Handle,
    place: Certified,
) {
    let started = Instant::now();
    let node = presented.node.clone();
    let additional = OnceLock::new();
    let end = drive(&context, stream, peer, presented, worker, place, &additional).await;
    let lasted_s = started.elapsed().as_secs();
    if let Some(link) = additional.get() {
        tracing::debug!(%node, %peer, lasted_s, link, "additional link ended: {end}");
        return;
    }
    match end {
        // The agent has two addresses of this server, and is attached through the other one.
        End::Attach(status) if status.code() == Code::AlreadyExists => {
            tracing::debug!(%node, %peer, "second link of an attached agent: {}", printable(status.message(), 200));
        }
        End::Stopped | End::Left => tracing::info!(%node, %peer, lasted_s, "session ended: {end}"),
        End::Impostor { .. } | End::Flood | End::Fenced(_) | End::NotAdmitted(_) => {
            context.metrics.session_refused(end.label());
            tracing::warn!(%node, %peer, lasted_s, "session refused: {end}");
        }
        End::NoHello | End::NotHello | End::Evicted | End::Attach(_) => {
            context.metrics.handshake("failed");
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
            Self::NotAdmitted(refusal) => refusal.label(),
            _ => "failed",
        }
    }
}

async fn drive(
    context: &LinkContext,
    stream: Box<TlsStream<TcpStream>>,
    peer: SocketAddr,
    presented: Presented,
    worker: Handle,
    place: Certified,
    additional: &OnceLock<u32>,
) -> End {
    let io = LinkIo::new(*stream);
    let flow = io.flow();
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, link::client_builder().handshake(io)).await;
    let (send, mut connection) = match handshake {
        Ok(Ok(link)) => link,
        Ok(Err(error)) => return End::Link(error),
        Err(_) => return End::NoHello,
    };
    let Some(pings) = connection.ping_pong() else { return End::Closed };
    // A task of its own, so that carried bytes wake only it.
    let mut driver = JoinSet::new();
    let shared = flow.clone();
    driver.spawn(poll_fn(move |cx| {
        shared.poll_window(cx.waker(), |window| connection.set_initial_window_size(window));
        Pin::new(&mut connection).poll(cx)
    }));
    tokio::select! {
        biased;
        end = session(context, Transport { send, pings, flow }, peer, presented, worker, place, additional) => end,
        Some(ended) = driver.join_next() => match ended {
            Ok(Err(error)) => End::Link(error),
            _ => End::Closed,
        },
    }
}

/// A link whose HTTP/2 connection is driven by another task.
pub(super) struct Transport {
    pub(super) send: SendRequest<Bytes>,
    pub(super) pings: PingPong,
    pub(super) flow: Arc<Flow>,
}

/// Removes the session from the registry, however its task ends.
struct Registered<'a> {
    context: &'a LinkContext,
    session: Arc<Session>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.context.sessions.forget(&self.session);
        self.session.close();
    }
}

async fn session(
    context: &LinkContext,
    transport: Transport,
    peer: SocketAddr,
    Presented { node, issued }: Presented,
    worker: Handle,
    place: Certified,
    additional: &OnceLock<u32>,
) -> End {
    let send = transport.send.clone();
    let mut client =
        AgentClient::with_origin(Channel::new(send.clone()), origin()).max_decoding_message_size(MAX_MESSAGE);
    let loopback = loopback_ports(&context.settings.borrow());
    // Boxed: its memory is freed once the agent has answered.
    let greeting = Box::pin(greet(context, Channel::new(send.clone()), &loopback));
    let greeting = tokio::select! {
        greeting = tokio::time::timeout(HANDSHAKE_TIMEOUT, greeting) => greeting,
        () = place.place.evicted() => return End::Evicted,
    };
    let (hello, mut events) = match greeting {
        Ok(Ok(greeting)) => greeting,
        Ok(Err(end)) => return end,
        Err(_) => return End::NoHello,
    };
    if hello.node != node.as_str() {
        let end = End::Impostor { certified: node, claimed: printable(&hello.node, 253) };
        notify(&mut client, refused(end.to_string())).await;
        return end;
    }
    if let Err(refusal) = context.standing.judge(&node, issued) {
        return not_admitted(&mut client, refusal).await;
    }
    if hello.link > 0 {
        let _ = additional.set(hello.link);
        let link = (&mut client, events);
        return additional::serve(context, transport, link, (&node, peer), &hello, worker, place).await;
    }
    let Transport { send, pings, flow } = transport;
    let over = context.forced.child_token();
    let first = Link::new(0, flow.clone(), over.child_token(), send, worker);
    let session = Arc::new(Session {
        id: context.sessions.next_id(),
        node,
        epoch: hello.epoch,
        issued,
        refusal: OnceLock::new(),
        peer,
        since: Instant::now(),
        agent_version: printable(&hello.agent_version, 64),
        links: Links::new(first, hello.max_links),
        stalls: StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize),
        carried: Totals::default(),
        closed: CancellationToken::new(),
        over,
    });
    match context.sessions.register(session.clone()) {
        Ok(older) => retire(older, &session),
        Err(fenced) => {
            notify(&mut client, refused(fenced.to_string())).await;
            return fenced.into();
        }
    }
    let registered = Registered { context, session: session.clone() };
    // Revoked between the judgement and the registration, when the one who ends sessions did not see this one.
    if let Err(refusal) = context.standing.judge(&session.node, issued) {
        session.refuse(refusal);
    }
    place.attached();
    context.metrics.handshake("attached");
    tracing::info!(node = %session.node, %peer, epoch = session.epoch, version = %session.agent_version, "session attached");
    let end = follow(context, &session, &flow, &mut client, &mut events, pings, loopback).await;
    if let Some(refusal) = session.refusal.get() {
        // No client gets there any more while the agent is notified.
        context.sessions.unregister(&session);
        return not_admitted(&mut client, refusal.clone()).await;
    }
    if matches!(end, End::Stopped) && !context.draining.is_cancelled() {
        let reason = notice::Notice::Replaced(Replaced {
            epoch: session.epoch,
            peer: context
                .sessions
                .get(&session.node)
                .map_or_else(String::new, |newer| newer.peer.to_string()),
        });
        notify(&mut client, reason).await;
    }
    drop(registered);
    end
}

pub(super) fn refused(reason: String) -> notice::Notice {
    notice::Notice::Refused(Refused { reason, ..Refused::default() })
}

async fn not_admitted(client: &mut AgentClient<Channel>, refusal: Refusal) -> End {
    let notice = Refused {
        reason: refusal.to_string(),
        enroll_again: refusal.wants_enrolment(),
        retry_soon: refusal.is_for_now(),
    };
    notify(client, notice::Notice::Refused(notice)).await;
    refusal.into()
}

/// Ends the older session of the same node: its agent is gone, or is a second one with the same identity.
fn retire(older: Option<Arc<Session>>, newer: &Session) {
    if let Some(older) = older {
        tracing::warn!(
            node = %newer.node, old_peer = %older.peer, old_epoch = older.epoch,
            new_peer = %newer.peer, new_epoch = newer.epoch,
            "a newer session replaces the live one"
        );
        older.close();
    }
}

async fn greet(
    context: &LinkContext,
    channel: Channel,
    loopback_ports: &[u32],
) -> Result<(Hello, Streaming<AgentEvent>), End> {
    let bundle = context.bundle.borrow().to_pem();
    let welcome = Welcome {
        server_id: context.server_id.clone(),
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
    context: &LinkContext,
    session: &Arc<Session>,
    flow: &Flow,
    client: &mut AgentClient<Channel>,
    events: &mut Streaming<AgentEvent>,
    pings: PingPong,
    mut loopback: Vec<u32>,
) -> End {
    let mut bundle = context.bundle.clone();
    bundle.mark_unchanged();
    let mut settings = context.settings.clone();
    // They may have changed after the Welcome was sent.
    settings.mark_changed();
    let mut alive = std::pin::pin!(link::keep_alive(pings, flow, || session.stalls.sweep()));
    let mut wanted = session.links.wanted();
    let mut span = (Instant::now(), 0u32);
    let mut draining_sent = false;
    loop {
        tokio::select! {
            event = events.message() => {
                let event = match event {
                    Ok(Some(event)) => event,
                    Ok(None) => {
                        context.sessions.leave(session);
                        finish(context, session, || session.links.connections()).await;
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
                        context.sessions.leave(session);
                    }
                    Some(agent_event::Event::Hello(_)) => return End::NotHello,
                    // Informational: routes come from the inventory.
                    Some(agent_event::Event::Addresses(addresses)) => {
                        tracing::debug!(node = %session.node, addresses = ?addresses.addresses, "the node's addresses changed");
                    }
                    Some(agent_event::Event::Load(_)) | None => {}
                }
            }
            dead = &mut alive => return dead.into(),
            changed = bundle.changed(), if !draining_sent => {
                if changed.is_err() { return End::Stopped }
                let pem = bundle.borrow_and_update().to_pem();
                notify(client, notice::Notice::TrustBundle(proto::TrustBundle { pem })).await;
            }
            changed = settings.changed(), if !draining_sent => {
                if changed.is_err() { return End::Stopped }
                let ports = loopback_ports(&settings.borrow_and_update());
                if ports != loopback {
                    loopback.clone_from(&ports);
                    notify(client, notice::Notice::LoopbackPorts(LoopbackPorts { ports })).await;
                }
            }
            // The session owns the sender.
            Ok(()) = wanted.changed(), if !draining_sent => {
                let links = session.links.missing(*wanted.borrow_and_update());
                tracing::debug!(node = %session.node, ?links, "asking for more links");
                notify(client, notice::Notice::OpenLinks(OpenLinks { links })).await;
            }
            () = context.draining.cancelled(), if !draining_sent => {
                draining_sent = true;
                let timeout_seconds = u32::try_from(context.drain_timeout.as_secs()).unwrap_or(u32::MAX);
                notify(client, notice::Notice::Draining(ServerDraining { timeout_seconds })).await;
            }
            () = session.closed.cancelled() => return End::Stopped,
            () = context.stop.cancelled() => return End::Stopped,
        }
    }
}

fn loopback_ports(settings: &Settings) -> Vec<u32> {
    settings.loopback.iter().map(|port| u32::from(*port)).collect()
}

/// After the agent has left on purpose: lets clients that read slowly receive what was carried.
pub(super) async fn finish(context: &LinkContext, session: &Session, connections: impl Fn() -> u32) {
    let idle = async {
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while connections() > 0 {
            tick.tick().await;
        }
    };
    tokio::select! {
        () = idle => {}
        () = session.closed.cancelled() => {}
        () = context.stop.cancelled() => {}
        () = tokio::time::sleep(context.drain_timeout) => {}
    }
}

pub(super) async fn notify(client: &mut AgentClient<Channel>, notice: notice::Notice) {
    let notice = Notice { notice: Some(notice) };
    match tokio::time::timeout(NOTICE_TIMEOUT, Box::pin(client.notify(notice))).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => tracing::debug!(%status, "a notice was refused"),
        Err(_) => tracing::debug!("a notice was not acknowledged in time"),
    }
}

//! An agent's link, from the end of its TLS handshake to its own end: greeting and session.

#[cfg(test)]
pub(super) mod tests;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};
use tunnel_link::grpc::{self, Channel, origin};
use tunnel_link::link::{self, BBR_FEATURE, BBR_LINKS, Congestion, Flow, HANDSHAKE_TIMEOUT};
use tunnel_link::proto::agent_client::AgentClient;
use tunnel_link::proto::{AgentEvent, Hello, Refused, Welcome, agent_event, notice};
use tunnel_link::relay::{StallBound, Totals};
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use super::additional;
use super::limits::CertifiedPlace;
use super::link::{End, LinkContext, Transport, end_after_last_bytes, notify, refused};
use super::notices::{follow, loopback_ports, replaced};
use crate::admission::Shares;
use crate::pki::{Credential, Refusal};
use crate::session::{Forgotten, Link, Links, Placing, Session, Streams};

/// Maximum size of a control message from an agent, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// Node of the agent's certificate, and what is kept of that.
#[derive(Clone, Debug)]
pub(super) struct Presented {
    pub(super) node: NodeName,
    pub(super) credential: Arc<Credential>,
}

/// Serves the link, given as byte stream and path state, until it ends, and logs the reason.
pub(super) async fn run<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    context: Arc<LinkContext>,
    link: (S, Arc<Flow>),
    peer: SocketAddr,
    presented: Presented,
    worker: Handle,
    place: CertifiedPlace,
) {
    let started = Instant::now();
    let node = presented.node.clone();
    let additional = OnceLock::new();
    let end = drive(&context, link, peer, presented, worker, place, &additional).await;
    let lasted_s = started.elapsed().as_secs();
    if let Some(link) = additional.get() {
        tracing::debug!(%node, %peer, lasted_s, link, reason = %end, "additional link ended");
        return;
    }
    match end {
        // The agent is attached to this server through another address, or leaves it.
        End::Attach(status) if status.code() == Code::AlreadyExists => {
            let reason = printable(status.message(), 200);
            tracing::debug!(%node, %peer, reason, "agent does not want this session");
        }
        End::Stopped | End::Left => {
            context.sessions.explain_end(&node, &end.to_string());
            tracing::info!(%node, %peer, lasted_s, reason = %end, "session ended");
        }
        End::Impostor { .. } | End::Flood | End::Fenced(_) | End::NotAdmitted(_) => {
            context.metrics.session_refused(end.label());
            tracing::warn!(%node, %peer, lasted_s, reason = %end, "session refused");
        }
        End::NoHello | End::NotHello | End::Evicted | End::Attach(_) => {
            context.metrics.handshake("failed");
            tracing::warn!(%node, %peer, lasted_s, reason = %end, "session not established");
        }
        _ => {
            context.sessions.explain_end(&node, &end.to_string());
            tracing::warn!(%node, %peer, lasted_s, reason = %end, "session ended");
        }
    }
}

async fn drive<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    context: &LinkContext,
    (io, flow): (S, Arc<Flow>),
    peer: SocketAddr,
    presented: Presented,
    worker: Handle,
    place: CertifiedPlace,
    additional: &OnceLock<u32>,
) -> End {
    // Boxed: otherwise each session would hold the memory of the handshake until its end.
    let (transport, mut driver) = match Box::pin(open(io, flow)).await {
        Ok(opened) => opened,
        Err(end) => return end,
    };
    tokio::select! {
        biased;
        end = session(context, transport, peer, presented, worker, place, additional) => end,
        Some(ended) = driver.join_next() => match ended {
            Ok(Err(error)) => End::Link(error),
            _ => End::Closed,
        },
    }
}

/// Starts HTTP/2 on the link. A separate task moves the bytes, so that they wake only that task.
async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    io: S,
    flow: Arc<Flow>,
) -> Result<(Transport, JoinSet<Result<(), h2::Error>>), End> {
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, link::client_builder().handshake(io)).await;
    let (send, mut connection) = handshake.map_err(|_| End::NoHello)?.map_err(End::Link)?;
    let pings = connection.ping_pong().ok_or(End::Closed)?;
    let mut driver = JoinSet::new();
    driver.spawn(link::drive(connection, flow.clone()));
    Ok((Transport { send, pings, flow }, driver))
}

/// Removes the session from the registry when its task ends for any reason.
struct Registered<'a> {
    context: &'a LinkContext,
    session: Arc<Session>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let session = self.session.clone();
        if self.context.sessions.forget(&session) != Forgotten::Leaving {
            return session.close();
        }
        // The last bytes of additional links are still in flight.
        let (counted, ended) = (session.clone(), session.clone());
        end_after_last_bytes(&session, move || counted.links.connections(), move || ended.close());
    }
}

async fn session(
    context: &LinkContext,
    transport: Transport,
    peer: SocketAddr,
    Presented { node, credential }: Presented,
    worker: Handle,
    place: CertifiedPlace,
    additional: &OnceLock<u32>,
) -> End {
    let mut client = AgentClient::with_origin(Channel::new(transport.send.clone()), origin())
        .max_decoding_message_size(MAX_MESSAGE);
    let loopback = loopback_ports(&context.settings.borrow());
    // The bundle of the Welcome; changes during the greeting are sent afterwards.
    let mut bundle = context.bundle.clone();
    let welcome = welcome(context, bundle.borrow_and_update().to_pem(), &loopback);
    // Boxed: its memory is freed once the agent has answered.
    let greeting = Box::pin(greet(Channel::new(transport.send.clone()), welcome, &place));
    let (hello, mut events) = match greeting.await {
        Ok(greeting) => greeting,
        Err(end) => return end,
    };
    if hello.node != node.as_str() {
        let end = End::Impostor { certified: node, claimed: printable(&hello.node, 253) };
        notify(&mut client, refused(end.to_string())).await;
        return end;
    }
    if let Err(refusal) = context.judge_agent(&node, &credential) {
        return not_admitted(&mut client, refusal).await;
    }
    if hello.link > 0 {
        let _ = additional.set(hello.link);
        let link = (&mut client, events);
        // Boxed: most links are not additional ones.
        let link = additional::serve(context, transport, link, (&node, peer), &hello, worker, place);
        return Box::pin(link).await;
    }
    let Transport { send, pings, flow } = transport;
    let over = context.forced.child_token();
    let streams = Streams::new(context.most_streams);
    let first = Link::new(0, flow.clone(), over.child_token(), send, worker, streams);
    let session = Arc::new(Session {
        id: context.sessions.next_id(),
        node,
        router: context.sessions.router.clone(),
        epoch: hello.epoch,
        credential: ArcSwap::from(credential),
        refusal: OnceLock::new(),
        moving: AtomicBool::new(false),
        replaced: CancellationToken::new(),
        succeeded: AtomicBool::new(false),
        peer,
        since: Instant::now(),
        agent_version: printable(&hello.agent_version, 64),
        links: links(first, &hello, &context.congestion),
        stalls: StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize),
        places: Shares::new(0),
        relayed: Totals::default(),
        closed: CancellationToken::new(),
        over,
        ending: AtomicBool::new(false),
        forgotten: AtomicBool::new(false),
    });
    match context.sessions.register(session.clone()) {
        Ok(older) => retire(context, older, &session, hello.successor),
        Err(fenced) => {
            notify(&mut client, refused(fenced.to_string())).await;
            return fenced.into();
        }
    }
    let registered = Registered { context, session: session.clone() };
    vouch(context, &session, &hello.finishing);
    // The node may have been revoked after the first check and before the registration, unseen by `shut_out`.
    if let Err(refusal) = context.judge_agent(&session.node, &session.credential.load()) {
        session.refuse(refusal);
    }
    place.attached();
    context.metrics.handshake("attached");
    tracing::info!(node = %session.node, %peer, epoch = session.epoch, version = %session.agent_version, "session attached");
    // Beside everything else: no end waits for a notice that a dead agent does not acknowledge. One that has left comes first.
    let end = tokio::select! {
        biased;
        dead = link::keep_alive(pings, &flow, || session.stalls.sweep()) => dead.into(),
        end = follow(context, &session, &mut client, &mut events, (bundle, loopback)) => end,
        () = session.closed.cancelled() => End::Stopped,
    };
    if let Some(refusal) = session.refusal.get() {
        // Clients must not reach it while the agent is notified.
        context.sessions.unregister(&session);
        context.sessions.explain_end(&session.node, &refusal.to_string());
        return not_admitted(&mut client, refusal.clone()).await;
    }
    // Only if there is a newer session: a replaced agent waits for minutes, but one closed for another reason must come
    // back at once.
    let newer = context.sessions.get(&session.node).filter(|newer| newer.id != session.id);
    if matches!(end, End::Stopped) && newer.is_some() && !context.draining.is_cancelled() {
        notify(&mut client, replaced(context, &session, false)).await;
    }
    drop(registered);
    context.sessions.explain_end(&session.node, &end.to_string());
    end
}

fn links(first: Arc<Link>, hello: &Hello, own: &Congestion) -> Links {
    let bbr = hello.features.iter().any(|feature| feature == BBR_FEATURE) && own.is_bbr();
    if bbr {
        Links::new(first, hello.max_links.min(BBR_LINKS), Placing::Together)
    } else {
        Links::new(first, hello.max_links, Placing::Apart)
    }
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

/// Ends the older session of the same node, whose agent is gone or is a second one with the same identity. The older
/// session finishes its connections instead if its agent was told to look for another server and has come back because
/// that one died, or if its agent has a successor. In the latter case that agent is told, so that it does not take the
/// successor for an intruder; in the former it is told that this server, which goes on, does not use the older link.
fn retire(context: &LinkContext, older: Option<Arc<Session>>, newer: &Session, successor: bool) {
    let Some(older) = older else { return };
    if successor || older.moving.load(Ordering::Relaxed) {
        context.sessions.leave(&older, true);
        if successor {
            tracing::info!(node = %newer.node, old_epoch = older.epoch, new_epoch = newer.epoch, "session moved to the successor of its agent");
            older.succeeded.store(true, Ordering::Relaxed);
        }
        older.replaced.cancel();
        return;
    }
    tracing::warn!(
        node = %newer.node, old_peer = %older.peer, old_epoch = older.epoch,
        new_peer = %newer.peer, new_epoch = newer.epoch,
        "session replaced by a newer one"
    );
    older.close();
}

/// The agent says by its present certificate which of its earlier sessions are its own: they finish their connections
/// although their certificate's root was retired, or the certificate has expired.
fn vouch(context: &LinkContext, session: &Session, epochs: &[u64]) {
    for earlier in context.sessions.leaving_of(&session.node) {
        if epochs.contains(&earlier.epoch) {
            earlier.credential.store(session.credential.load_full());
        }
    }
}

fn welcome(context: &LinkContext, trust_bundle: String, loopback_ports: &[u32]) -> Welcome {
    Welcome {
        server_id: context.server_id.clone(),
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        trust_bundle,
        loopback_ports: loopback_ports.to_vec(),
        ..Welcome::default()
    }
}

/// Greets the agent and waits for its Hello.
async fn greet(
    channel: Channel,
    welcome: Welcome,
    place: &CertifiedPlace,
) -> Result<(Hello, Streaming<AgentEvent>), End> {
    let greeting = async {
        let mut events = grpc::attach(channel, welcome, MAX_MESSAGE).await?;
        match events.message().await? {
            Some(AgentEvent { event: Some(agent_event::Event::Hello(hello)) }) => Ok((hello, events)),
            _ => Err(End::NotHello),
        }
    };
    tokio::select! {
        greeting = tokio::time::timeout(HANDSHAKE_TIMEOUT, greeting) => greeting.map_err(|_| End::NoHello)?,
        () = place.place.evicted() => Err(End::Evicted),
    }
}

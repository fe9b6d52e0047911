//! Notices to an attached agent while its session lasts, and the events that it sends.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};
use tonic::Streaming;
use tunnel_link::grpc::Channel;
use tunnel_link::proto::agent_client::AgentClient;
use tunnel_link::proto::{
    self, AgentEvent, LoopbackPorts, OpenLinks, Replaced, ServerDraining, agent_event, notice,
};
use tunnel_pki::TrustBundle;
use tunnel_runtime::backoff::jittered;

use super::link::{EVENT_SPAN, End, Handover, LinkContext, MAX_EVENTS, finish, notify};
use crate::runtime::settings::Settings;
use crate::session::{Session, spread, told_within};

/// Pause before an unacknowledged notice is repeated.
const AGAIN: Duration = Duration::from_secs(1);

/// Notices that were not sent yet, or not acknowledged because the agent's line was down for a moment or is slow.
#[derive(Default)]
struct Unheard {
    roots: bool,
    ports: bool,
    /// Set if this server stops; true if it still serves.
    leaving: Option<bool>,
    /// Delay before the next attempt. Boxed: few sessions ever have one.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Unheard {
    /// Schedules the notice that this server stops; `serving` is true if it still serves.
    fn tell(&mut self, serving: bool, after: Duration) {
        self.leaving = Some(serving);
        self.pause = Some(Box::pin(sleep(after)));
    }

    /// Call when the pause is over: marks the notices that the agent has not acknowledged for repetition.
    fn repeat(
        &mut self,
        bundle: &mut watch::Receiver<Arc<TrustBundle>>,
        settings: &mut watch::Receiver<Arc<Settings>>,
    ) {
        if self.roots {
            bundle.mark_changed();
        }
        if self.ports {
            settings.mark_changed();
        }
        self.pause = None;
        if self.leaving.is_some() {
            self.wait();
        }
    }

    /// Call after any other change. A scheduled stop notice keeps its time.
    fn wait(&mut self) {
        if self.leaving.is_some() && self.pause.is_some() {
            return;
        }
        let any = self.roots || self.ports || self.leaving.is_some();
        self.pause = any.then(|| Box::pin(sleep(AGAIN)));
    }
}

/// Follows a registered session until it ends. `bundle` reports changes since the Welcome, which had these `loopback` ports.
pub(super) async fn follow(
    context: &LinkContext,
    session: &Arc<Session>,
    client: &mut AgentClient<Channel>,
    events: &mut Streaming<AgentEvent>,
    (mut bundle, mut loopback): (watch::Receiver<Arc<TrustBundle>>, Vec<u32>),
) -> End {
    let mut settings = context.settings.clone();
    // May have changed after the Welcome was sent.
    settings.mark_changed();
    let mut wanted = session.links.wanted();
    let mut span = (Instant::now(), 0u32);
    let mut handover = context.handover.clone();
    // May have begun while the agent was greeted.
    handover.mark_changed();
    let (mut draining_sent, mut is_replaced, mut used_up) = (false, false, false);
    let mut unheard = Unheard::default();
    loop {
        tokio::select! {
            event = events.message() => match event {
                Ok(Some(event)) => {
                    if let Err(end) = take(context, session, event, &mut span) {
                        return end;
                    }
                }
                Ok(None) => {
                    context.sessions.leave(session, true);
                    finish(context, session, || session.links.connections()).await;
                    return End::Left;
                }
                Err(status) => return End::Lost(Box::new(status)),
            },
            changed = bundle.changed(), if !draining_sent => {
                if changed.is_err() { return End::Stopped }
                let pem = bundle.borrow_and_update().to_pem();
                unheard.roots = !notify(client, notice::Notice::TrustBundle(proto::TrustBundle { pem })).await;
                unheard.wait();
            }
            changed = settings.changed(), if !draining_sent => {
                if changed.is_err() { return End::Stopped }
                let ports = loopback_ports(&settings.borrow_and_update());
                if unheard.ports || ports != loopback {
                    loopback.clone_from(&ports);
                    unheard.ports = !notify(client, notice::Notice::LoopbackPorts(LoopbackPorts { ports })).await;
                    unheard.wait();
                }
            }
            // The session owns the sender.
            Ok(()) = wanted.changed(), if !draining_sent && !used_up => {
                if session.links.are_used_up() {
                    // With many sessions the notice waits for minutes. Until then other notices go out, except OpenLinks.
                    used_up = true;
                    unheard.tell(false, attach_again_within(context, session));
                    continue;
                }
                let links = session.links.missing();
                tracing::debug!(node = %session.node, ?links, "requesting more links");
                notify(client, notice::Notice::OpenLinks(OpenLinks { links })).await;
            }
            Ok(()) = handover.changed(), if !draining_sent => {
                let now = *handover.borrow_and_update();
                match now {
                    Handover::Nothing if used_up => unheard.tell(false, attach_again_within(context, session)),
                    // The notice that a successor gets this server's agents is dropped.
                    Handover::Nothing => {
                        unheard.leaving = None;
                        unheard.wait();
                    }
                    Handover::Agents { over } => unheard.tell(true, jittered(over, 1.0)),
                    Handover::All => unheard.tell(false, time_of_farewell(context)),
                }
            }
            () = session.replaced.cancelled(), if !is_replaced => {
                is_replaced = true;
                if session.succeeded.load(Ordering::Relaxed) {
                    notify(client, replaced(context, session, true)).await;
                } else if !draining_sent && !used_up {
                    draining_sent = true;
                    unheard.tell(false, Duration::ZERO);
                }
            }
            () = context.draining.cancelled(), if !draining_sent => {
                draining_sent = true;
                unheard.tell(false, time_of_farewell(context));
            }
            () = async { if let Some(pause) = &mut unheard.pause { pause.await } }, if unheard.pause.is_some() => {
                if let Some(serving) = unheard.leaving {
                    session.moving.store(true, Ordering::Relaxed);
                    let heard = notify(client, leaving(context, serving)).await;
                    unheard.leaving = (!heard).then_some(serving);
                    // The handover may have gone on while the agent was told of its beginning.
                    draining_sent |= !serving && *handover.borrow() == Handover::All;
                }
                unheard.repeat(&mut bundle, &mut settings);
            }
            () = context.stop.cancelled() => return End::Stopped,
        }
    }
}

/// Time after which the agent of a link that is used up is asked to attach again; this session then finishes its connections.
/// When a root is retired, those of many agents are used up at once.
fn attach_again_within(context: &LinkContext, session: &Session) -> Duration {
    tracing::debug!(
        node = %session.node,
        "agent must reconnect: its certificate is no longer accepted, or the link is out of stream numbers"
    );
    jittered(spread(context.sessions.count(), context.drain_timeout), 1.0)
}

/// Random delay before telling an agent that this server stops, so that thousands do not reconnect at once and delay open
/// connections.
fn time_of_farewell(context: &LinkContext) -> Duration {
    jittered(told_within(context.sessions.count(), context.drain_timeout), 1.0)
}

/// Takes an event of the agent. `span` counts the latest ones.
fn take(
    context: &LinkContext,
    session: &Arc<Session>,
    AgentEvent { event }: AgentEvent,
    span: &mut (Instant, u32),
) -> Result<(), End> {
    if span.0.elapsed() > EVENT_SPAN {
        *span = (Instant::now(), 0);
    }
    span.1 += 1;
    if span.1 > MAX_EVENTS {
        return Err(End::Flood);
    }
    match event {
        Some(agent_event::Event::Draining(draining)) => {
            if !draining.ending {
                tracing::info!(node = %session.node, "agent is draining");
            } else if !session.ending.swap(true, Ordering::Relaxed) {
                let links: Vec<_> = session.links.all().iter().map(|link| link.flow.clone()).collect();
                let metrics = context.metrics.clone();
                tokio::spawn(async move { metrics.end_quiet_on(&links).await });
            }
            context.sessions.leave(session, false);
        }
        Some(agent_event::Event::Hello(_)) => return Err(End::HelloAgain),
        // Of earlier agents, or to get traffic on the link.
        Some(agent_event::Event::Addresses(_) | agent_event::Event::Load(_)) | None => {}
    }
    Ok(())
}

pub(super) fn replaced(context: &LinkContext, session: &Session, by_successor: bool) -> notice::Notice {
    let newer = context.sessions.get(&session.node);
    let peer = newer.map_or_else(String::new, |newer| newer.peer.to_string());
    notice::Notice::Replaced(Replaced { epoch: session.epoch, peer, by_successor })
}

fn leaving(context: &LinkContext, serving: bool) -> notice::Notice {
    let timeout_seconds = u32::try_from(context.drain_timeout.as_secs()).unwrap_or(u32::MAX);
    notice::Notice::Draining(ServerDraining { timeout_seconds, serving })
}

pub(super) fn loopback_ports(settings: &Settings) -> Vec<u32> {
    settings.loopback.iter().map(|port| u32::from(*port)).collect()
}

//! Serves one session on a connected link until it ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use h2::PingPong;
use tokio::sync::oneshot;
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tunnel_link::bench::BENCH_PATH;
use tunnel_link::proto::agent_server::AgentServer;
use tunnel_link::proto::{AgentEvent, Draining, agent_event};
use tunnel_link::relay::RELAY_PATH;
use tunnel_link::{grpc, link};

use super::bench::bench;
use super::connect::{LinkConnection, within};
use super::control::AgentService;
use super::relay::relay;
use super::session_end::SessionEnd;
use super::state::{SessionPhase, SessionState};

/// Maximum time for the server to read the last frames of a session that failed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The same after a drain, when data may still wait for a slow link.
const DRAIN_CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to keep a session with a stopping server while there is no new one.
const SUCCESSOR: Duration = Duration::from_secs(30);
/// Time without connections after which a drain is over. On a slow link twice its round trip.
const QUIET: Duration = Duration::from_millis(100);

/// Serves one link until it ends. When the server drains, cancels `on_draining` immediately and serves until there are
/// no connections left.
pub(super) async fn serve(
    session: Arc<SessionState>,
    mut link: LinkConnection,
    on_draining: CancellationToken,
) -> SessionEnd {
    let Some(pings) = link.ping_pong() else { return SessionEnd::Closed };
    let service = AgentServer::new(AgentService(session.clone()));
    // A task of its own: relayed data wakes this one, which must not poll everything else each time.
    let mut watching = JoinSet::new();
    let (ends, mut ended) = oneshot::channel();
    watching.spawn(watch(session.clone(), pings, session.phase.subscribe(), on_draining, ends));
    let end = loop {
        tokio::select! {
            biased;
            ended = &mut ended => break ended.unwrap_or(SessionEnd::Closed),
            accepted = accept(&session, &service, &mut link) => if let Err(end) = accepted { break end },
        }
    };
    let on_purpose = matches!(end, SessionEnd::Draining | SessionEnd::Stopping);
    let mut patience = if on_purpose { DRAIN_CLOSE_TIMEOUT } else { CLOSE_TIMEOUT };
    if on_purpose && !session.stop.is_cancelled() {
        // The server opens no more streams then. Those that it has just opened are served, and it closes the link behind them.
        session.farewell.cancel();
        let served = async { while accept(&session, &service, &mut link).await.is_ok() {} };
        tokio::select! {
            () = served => {}
            () = session.common.connections.quiet(patience) => {}
            () = session.stop.cancelled() => {}
            _ = watching.join_next() => {}
        }
        patience = CLOSE_TIMEOUT;
    }
    // Resets all open connections. The GOAWAY says that this was on purpose.
    session.stop.cancel();
    session.release();
    if session.shared.runtime.shutdown.is_forced() {
        patience = CLOSE_TIMEOUT;
    }
    tokio::select! {
        () = close(&session, &mut link, patience) => {}
        // A server that has gone silent is not waited for. Returns at once if that was noticed before.
        _ = watching.join_next() => {}
    }
    end
}

/// Serves the next stream in a task of its own.
///
/// # Errors
/// The link has ended.
async fn accept(
    session: &Arc<SessionState>,
    service: &AgentServer<AgentService>,
    link: &mut LinkConnection,
) -> Result<(), SessionEnd> {
    let accepted = link::accept(link, &session.path.flow).await.ok_or(SessionEnd::Closed)?;
    let (request, respond) = accepted.map_err(SessionEnd::Link)?;
    match request.uri().path() {
        RELAY_PATH => drop(tokio::spawn(relay(session.clone(), request, respond))),
        BENCH_PATH => drop(tokio::spawn(bench(session.clone(), request, respond))),
        _ => drop(tokio::spawn(grpc::serve(service.clone(), request, respond))),
    }
    Ok(())
}

/// Waits until the server has read everything, for `patience` at most, and has closed the link.
async fn close(session: &SessionState, link: &mut LinkConnection, patience: Duration) {
    if session.link == 0 {
        // The session ends with this link, and with it unsent data of additional ones.
        let others = async {
            let mut tick = tokio::time::interval(Duration::from_millis(20));
            while session.links() > 1 {
                tick.tick().await;
            }
        };
        tokio::select! {
            _ = tokio::time::timeout(patience, others) => {}
            () = closed(link) => {}
        }
    }
    link.graceful_shutdown();
    if tokio::time::timeout(patience, closed(link)).await.is_err() {
        tracing::debug!(server = %session.server, "server did not close the link in time");
    }
}

/// Waits until the server has closed the link. Drops new streams.
async fn closed(link: &mut LinkConnection) {
    while let Some(Ok(_)) = link.accept().await {}
}

/// Sends the reason to `ends` once anything but the link's own end ends the session. Returns only when the link is dead: until
/// then its last data may still be on its way.
async fn watch(
    session: Arc<SessionState>,
    pings: PingPong,
    mut phase: Receiver<SessionPhase>,
    on_draining: CancellationToken,
    ends: oneshot::Sender<SessionEnd>,
) {
    let mut dead = pin!(link::keep_alive(pings, &session.path.flow, || session.common.stalls.sweep()));
    let end = tokio::select! {
        end = never_attached(&session) => end,
        dead = &mut dead => {
            let _ = ends.send(dead.into());
            return;
        }
        end = ended_by_server(&session, &mut phase, &on_draining) => end,
        // An additional link ends with the first.
        end = drained(&session, &on_draining), if session.link == 0 => end,
        () = session.stop.cancelled() => SessionEnd::Stopping,
    };
    let _ = ends.send(end);
    dead.await;
}

/// Returns when the server has not attached in time.
async fn never_attached(session: &SessionState) -> SessionEnd {
    let mut phase = session.phase.subscribe();
    let attached = phase.wait_for(|phase| *phase != SessionPhase::Connecting);
    match within("Attach from the server", async { attached.await.is_ok() }).await {
        Ok(_) => std::future::pending().await,
        Err(end) => end,
    }
}

/// Returns when the server ends this session. Reports the server's drain by `on_draining`.
async fn ended_by_server(
    session: &SessionState,
    phase: &mut Receiver<SessionPhase>,
    on_draining: &CancellationToken,
) -> SessionEnd {
    loop {
        if phase.changed().await.is_err() {
            return SessionEnd::Closed;
        }
        match &*phase.borrow_and_update() {
            SessionPhase::Draining | SessionPhase::Succeeded => {
                // The server's successor may be reached through the same address or another.
                session.release();
                on_draining.cancel();
            }
            SessionPhase::Refused(refusal) => return refusal.clone().into(),
            SessionPhase::Connecting | SessionPhase::Attached { .. } => {}
        }
    }
}

/// Once this agent leaves the server or the server drains, waits until there are no connections left.
async fn drained(session: &SessionState, server_draining: &CancellationToken) -> SessionEnd {
    let mut left = pin!(async {
        session.leaving.cancelled().await;
        // Both ends are being replaced. The session of this agent's successor is with the server's successor, and until
        // that one has the listeners, connections come through here.
        if server_draining.is_cancelled() && session.shared.runtime.handover.has_passed() {
            let _ = tokio::time::timeout(SUCCESSOR, session.served.cancelled()).await;
        }
        send_draining(session, false).await;
        // Another address may lead to the same server.
        session.release();
    });
    let replaced = async {
        server_draining.cancelled().await;
        session.served.cancelled().await;
        // Until then other servers may forward connections through this one: no other has a session.
        let _ = tokio::time::timeout(SUCCESSOR, session.superseded.cancelled()).await;
    };
    // The server may have opened a stream before it knew.
    let quiet =
        || session.common.connections.quiet(QUIET.max(session.path.flow.rtt.last().unwrap_or_default() * 2));
    let ended = async {
        tokio::select! {
            () = &mut left => {}
            () = replaced => tokio::select! {
                () = quiet() => return SessionEnd::Draining,
                // The server may go on, as its successor has died, and would open connections here.
                () = &mut left => {}
            },
        }
        quiet().await;
        SessionEnd::Stopping
    };
    let ending = async {
        session.shared.runtime.ending.cancelled().await;
        send_draining(session, true).await;
        std::future::pending().await
    };
    tokio::select! {
        end = ended => end,
        end = ending => end,
    }
}

/// Tells the server that this agent takes no new connections, or that those which are left are to end.
async fn send_draining(session: &SessionState, ending: bool) {
    let draining = agent_event::Event::Draining(Draining { ending });
    // Fails if the session has ended.
    let _ = session.events.send(Ok(AgentEvent { event: Some(draining) })).await;
}

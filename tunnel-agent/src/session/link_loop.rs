//! Keeps a session with one server: connects, serves, waits, and connects again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_link::link::MAX_LINKS;
use tunnel_pki::enrol::{Refusals, Refused};
use tunnel_pki::{ALPN_TUNNEL, AgentIdentity, agent_tls};
use tunnel_runtime::backoff::{Backoff, jittered};
use tunnel_runtime::live::Live;
use tunnel_runtime::log_once::LogOnce;

use super::additional;
use super::choice::Use;
use super::connect::{Connected, connect};
use super::idle_cuts::{Idle, IdleCuts, LOOK};
use super::serve::serve;
use super::session_end::{Refusal, SessionEnd};
use super::shared::Shared;
use super::state::{SessionPhase, SessionState};
use super::successor;
use crate::reach::Server;

/// Minimum pause after a failure.
const SHORTEST_PAUSE: Duration = Duration::from_millis(250);
/// Maximum pause after a refusal.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Maximum pause after any other end: a server that all its agents come back to at once has had no place. With the jitter, a
/// fleet of 10,000 agents makes about 4,000 attempts a second.
const BUSY_PAUSE: Duration = Duration::from_secs(5);
/// Maximum pause while nothing answers, which causes no load on any server.
const SILENT_PAUSE: Duration = Duration::from_millis(500);
/// Pause after another agent took this node over: two agents with one identity must not replace each other in turns.
const REPLACED_PAUSE: Duration = Duration::from_secs(120);
/// Retry interval for an address of a server that is attached through another address. It may lead elsewhere by now.
/// When the other link fails it is retried immediately.
const STANDBY_PAUSE: Duration = Duration::from_secs(60);
/// Maximum time until a server says that another agent of this node has a session there.
const REPLACED: Duration = Duration::from_secs(2);
/// Time for which a server whose host refuses connections may be restarting.
const RESTARTS: Duration = Duration::from_secs(1);
/// A session that lasted this long was good: the next failure starts with the shortest pause.
const GOOD_SESSION: Duration = Duration::from_secs(30);

/// State of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkPhase {
    /// Dialling, or in a handshake.
    Connecting,
    /// In use by the server.
    Attached,
    /// Waiting before the next attempt.
    Waiting,
}

/// State of the session with one server, for the operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The address as configured.
    pub address: String,
    pub phase: LinkPhase,
    /// The server's own name for itself.
    pub server_id: Option<String>,
    /// Seconds since the server attached.
    pub attached_for_s: Option<u64>,
    pub epoch: u64,
    /// Round-trip time in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Number of TCP connections, connected or connecting.
    pub links: usize,
    /// Number of connections relayed now.
    pub connections: u32,
    /// Bytes a second that the path of the first link took when this agent last sent something. None before that.
    pub delivery_rate: Option<u64>,
    /// Number of TCP segments that this agent has retransmitted on the first link.
    pub retransmits: Option<u32>,
    /// Share (0 to 1) of the last 10 to 20 s of sending on the first link in which the server's TCP receive window was
    /// full. None before this agent sent anything, or before Linux 4.10.
    pub window_limited: Option<f64>,
    /// The same for this agent's TCP send buffer.
    pub buffer_limited: Option<f64>,
    /// Reason why the last session or attempt ended.
    pub last_error: Option<String>,
    /// Seconds since then.
    pub last_error_s: Option<u64>,
}

#[derive(Default)]
struct Observed {
    session: Option<Arc<SessionState>>,
    waiting: bool,
    /// Reason and time of the end of the last session or attempt.
    last_end: Option<(String, Instant)>,
    /// Waiting because the server is attached through another address.
    standby: bool,
    /// The server stops, and no other has taken over from it.
    stops: bool,
    /// Time since when its host refuses connections.
    absent: Option<Instant>,
    /// True if there is a working session, and the time of the last change.
    since: Option<(bool, Instant)>,
    refusals: Refusals,
    cuts: IdleCuts,
}

/// Keeps a session with one server.
pub struct LinkLoop {
    shared: Arc<Shared>,
    server: String,
    observed: Mutex<Observed>,
    /// Epoch of a session that a newer one has replaced. The server accepts it again only once the newer session is
    /// gone; a fresh epoch would replace that session in turn.
    yielded: Mutex<Option<u64>>,
    /// [`SessionState::superseded`] of the session with a stopping server, until the next session is in use.
    outgoing: Mutex<Option<CancellationToken>>,
    /// Epochs of the sessions that have not ended.
    unended: Arc<Live<u64>>,
    /// Cancelled when the agent drains or leaves the server.
    leaving: CancellationToken,
}

impl LinkLoop {
    /// `server` is `host:port`.
    pub fn new(shared: Arc<Shared>, server: String) -> Arc<Self> {
        let leaving = shared.runtime.shutdown.draining_token().child_token();
        Arc::new(Self {
            shared,
            server,
            observed: Mutex::default(),
            yielded: Mutex::default(),
            outgoing: Mutex::default(),
            unended: Arc::default(),
            leaving,
        })
    }

    /// Ends the loop like a drain, but for this server only: accepts nothing new, and lets open connections finish.
    pub fn leave(&self) {
        self.leaving.cancel();
    }

    /// The address as configured or discovered.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// True if the loop waits because the server is attached through another address.
    pub fn stands_by(&self) -> bool {
        self.observed.lock().standby
    }

    /// Present usefulness of the server.
    pub(super) fn usefulness(&self) -> Use {
        let now = Instant::now();
        let mut observed = self.observed.lock();
        let session = observed.session.as_deref();
        let attached =
            session.is_some_and(|session| matches!(*session.phase.borrow(), SessionPhase::Attached { .. }));
        let silent = attached && session.is_some_and(|session| session.silent.load(Ordering::Relaxed));
        let serves = attached && !silent;
        if observed.since.is_none_or(|(served, _)| served != serves) {
            observed.since = Some((serves, now));
        }
        let time = observed.since.map_or(Duration::ZERO, |(_, since)| now - since);
        if serves {
            observed.absent = None;
        }
        let absent = observed.absent.is_some_and(|since| now - since >= RESTARTS);
        if serves {
            Use::Serves(time)
        } else if silent || absent || observed.standby || observed.stops {
            Use::Passed
        } else {
            Use::Awaited(time)
        }
    }

    /// Refusals between this agent and the server, if any.
    pub fn refused(&self) -> Option<Refused> {
        self.observed.lock().refusals.strongest()
    }

    /// Runs until the agent drains or the server's address is gone. A session of a draining server may continue while
    /// the next one is already connected.
    pub async fn run(self: Arc<Self>) {
        let runtime = &self.shared.runtime;
        let mut identity = self.shared.identity.clone();
        let mut resumed = self.shared.resumed.subscribe();
        let mut releases = self.shared.attached.releases();
        let mut addresses = runtime.addresses.subscribe();
        let mut backoff = Backoff::full_jitter(SHORTEST_PAUSE, LONGEST_PAUSE);
        let leftovers = TaskTracker::new();
        let mut out = LogOnce::default();
        // The link of the next session, if it is already connected.
        let mut successor = None;
        loop {
            tokio::select! {
                () = runtime.handover.ours(&self.server, self.stands_by()) => {}
                () = self.leaving.cancelled() => break,
            }
            let started = Instant::now();
            // A server that is released from now on may be the one at this address.
            releases.mark_unchanged();
            addresses.mark_unchanged();
            let end = tokio::select! {
                end = self.session(&mut identity, &leftovers, &mut successor) => end,
                () = runtime.shutdown.forced() => break,
            };
            let standby = end.stands_by();
            self.note_end(&end);
            if self.leaving.is_cancelled() {
                break;
            }
            if matches!(end, SessionEnd::Succeeded) {
                runtime.metrics.sessions_ended.inc();
                tracing::info!(server = %self.server, reason = %end, "session finishes what it relays");
                tokio::select! {
                    // The successor has died.
                    () = runtime.handover.alone() => {}
                    () = self.leaving.cancelled() => break,
                }
                self.observed.lock().waiting = false;
                backoff.reset();
                continue;
            }
            if started.elapsed() >= GOOD_SESSION || matches!(end, SessionEnd::Draining) {
                backoff.reset();
            }
            let refused = end.yields();
            // Called in any case: every end in a row makes the next pause longer.
            let delay = backoff.next_delay();
            let pause = match end {
                // A successor has the right to the node's place, and the previous agent may have dialled again.
                _ if refused && runtime.handover.is_successor() => delay,
                _ if refused => jittered(REPLACED_PAUSE, 0.5),
                _ if standby => jittered(STANDBY_PAUSE, 0.5),
                SessionEnd::Overtaken => Duration::ZERO,
                _ => shortened(&end, delay),
            };
            runtime.metrics.sessions_ended.inc();
            let retry_in_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            if standby {
                tracing::debug!(server = %self.server, reason = %end, retry_in_ms, "standing by");
            } else if end.is_news(&mut out) {
                tracing::warn!(server = %self.server, error = %end, retry_in_ms, "session ended");
            } else {
                tracing::debug!(server = %self.server, error = %end, retry_in_ms, "session ended again");
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Ok(()) = releases.changed(), if standby => {}
                // The server may accept the new identity. `changed` has marked it as seen, by which `session` would not
                // forget the refusals of the other certificate.
                Ok(()) = identity.changed() => identity.mark_changed(),
                // Failures before or during the suspension mean nothing now.
                Ok(()) = resumed.changed(), if !refused => backoff.reset(),
                // The node is in another network, maybe with other name servers.
                Ok(()) = addresses.changed(), if !refused && !standby => backoff.reset(),
                () = self.leaving.cancelled() => break,
            }
            self.observed.lock().waiting = false;
        }
        leftovers.close();
        // A forced end leaves them the moment that they take to close.
        leftovers.wait().await;
    }

    fn note_end(&self, end: &SessionEnd) {
        let standby = end.stands_by();
        let mut observed = self.observed.lock();
        let session = observed.session.take();
        let attached = session.as_ref().is_some_and(|session| session.was_attached());
        observed.stops = matches!(end, SessionEnd::Draining)
            && session.is_some_and(|session| session.served.is_cancelled());
        let refused =
            matches!(end, SessionEnd::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused);
        observed.absent = refused.then(|| observed.absent.unwrap_or_else(Instant::now));
        // A server that attaches first and then refuses the certificate has not accepted it.
        if (attached && !end.concerns_identity()) || standby {
            observed.refusals = Refusals::default();
        }
        if end.concerns_identity() {
            observed.refusals.add(Instant::now());
        }
        observed.refusals.enroll_again |= matches!(end, SessionEnd::Refused(Refusal::Certificate(_)));
        if !end.is_cut() {
            observed.cuts = IdleCuts::default();
        }
        observed.waiting = true;
        observed.standby = standby;
        observed.last_end = Some((end.to_string(), Instant::now()));
    }

    /// Runs one session. Returns early when the server drains, with the session in `leftovers`.
    async fn session(
        self: &Arc<Self>,
        identity: &mut watch::Receiver<Arc<AgentIdentity>>,
        leftovers: &TaskTracker,
        successor: &mut Option<Connected>,
    ) -> SessionEnd {
        let tls = {
            if identity.has_changed().unwrap_or(false) {
                // Those refusals were of another certificate.
                self.observed.lock().refusals = Refusals::default();
            }
            let identity = identity.borrow_and_update().clone();
            match agent_tls(&identity, ALPN_TUNNEL) {
                Ok(tls) => tls,
                Err(error) => return SessionEnd::tls(error),
            }
        };
        let named = Server::Named(self.server.clone());
        let connected = match successor.take() {
            Some(connected) => Ok(connected),
            None => tokio::select! {
                connected = connect(&self.shared.runtime, &named, tls) => connected,
                () = self.leaving.cancelled() => return SessionEnd::Stopping,
            },
        };
        let Connected { link, path, proxy } = match connected {
            Ok(connected) => connected,
            Err(end) => return end,
        };
        // The disk may be slow.
        let epoch = tokio::select! {
            epoch = self.epoch() => epoch,
            () = self.leaving.cancelled() => return SessionEnd::Stopping,
        };
        let epoch = match epoch {
            Ok(epoch) => epoch,
            Err(error) => return SessionEnd::Connect(error),
        };
        let (asked, mut wanted) = mpsc::channel(MAX_LINKS as usize);
        let epochs = (epoch, self.unended.all().iter().map(|earlier| **earlier).collect());
        let unended = self.unended.enter(epoch);
        let leaving = self.leaving.child_token();
        let state = SessionState::first(self.shared.clone(), &self.server, epochs, path, asked, leaving);
        let state = Arc::new(state);
        self.observed.lock().session = Some(state.clone());
        let server_drains = CancellationToken::new();
        let in_use = self.supersede(&state);
        let mut in_use = std::pin::pin!(in_use);
        let serving = serve(state.clone(), link, server_drains.clone());
        let mut serving = leftovers.spawn(async move {
            let _unended = unended;
            serving.await
        });
        let mut passed = std::pin::pin!(self.shared.runtime.handover.passed());
        let silence = async {
            match state.leaving.run_until_cancelled(successor::find(&state)).await {
                Some(found) => found,
                None => std::future::pending().await,
            }
        };
        let mut silence = std::pin::pin!(silence);
        let mut idle = Idle::new();
        let mut look = tokio::time::interval(LOOK);
        let end = loop {
            tokio::select! {
                ended = &mut serving => break ended.unwrap_or(SessionEnd::Closed),
                () = server_drains.cancelled() => {
                    if *state.phase.borrow() == SessionPhase::Succeeded {
                        break SessionEnd::Succeeded;
                    }
                    let earlier = self.outgoing.lock().replace(state.superseded.clone());
                    // Two servers in a row stop, so the older session is of no use any more.
                    earlier.iter().for_each(CancellationToken::cancel);
                    break SessionEnd::Draining;
                }
                () = &mut in_use => {}
                () = &mut passed => {
                    leave_to_successor(&state, &server_drains).await;
                    break SessionEnd::Succeeded;
                }
                found = &mut silence => {
                    *successor = Some(found);
                    state.stop.cancel();
                    break SessionEnd::Overtaken;
                }
                Some(number) = wanted.recv() => {
                    if !state.leaving.is_cancelled() {
                        additional::open(&state, number, leftovers);
                    }
                }
                _ = look.tick(), if proxy.is_some() => idle.look(state.path.flow.received()),
            }
        };
        idle.look(state.path.flow.received());
        let end = match proxy {
            Some(proxy) => self.observed.lock().cuts.judge(end, &proxy, idle.lasts()),
            None => end,
        };
        *self.yielded.lock() = end.yields().then_some(epoch);
        end
    }

    /// Ends the session with the stopping server once `session` is in use. Never returns.
    async fn supersede(&self, session: &SessionState) {
        let mut phase = session.phase.subscribe();
        if phase.wait_for(|phase| matches!(phase, SessionPhase::Attached { .. })).await.is_ok()
            && let Some(outgoing) = self.outgoing.lock().take()
        {
            outgoing.cancel();
        }
        std::future::pending::<()>().await;
    }

    /// Returns the next session's epoch. Called once the server is reached, because it is synced to disk.
    async fn epoch(&self) -> std::io::Result<u64> {
        if let Some(yielded) = *self.yielded.lock()
            && !self.shared.runtime.handover.is_successor()
        {
            return Ok(yielded);
        }
        self.shared.epochs.next().await
    }

    /// True if a server has this session in use.
    pub fn attached(&self) -> bool {
        self.status().phase == LinkPhase::Attached
    }

    pub fn status(&self) -> LinkStatus {
        let observed = self.observed.lock();
        let session = observed.session.as_deref();
        let session_phase = session.map(|session| session.phase.borrow().clone());
        let (server_id, since) = match session_phase {
            Some(SessionPhase::Attached { server_id, since }) => (Some(server_id), Some(since)),
            _ => (None, None),
        };
        let phase = match (observed.waiting, since) {
            (true, _) => LinkPhase::Waiting,
            (false, Some(_)) => LinkPhase::Attached,
            (false, None) => LinkPhase::Connecting,
        };
        let limits = session.and_then(|session| session.path.flow.limits());
        LinkStatus {
            address: self.server.clone(),
            phase,
            server_id,
            attached_for_s: since.map(|since| since.elapsed().as_secs()),
            epoch: session.map_or(0, |session| session.epoch),
            rtt_ms: session
                .and_then(|session| session.path.flow.rtt.last())
                .map(|rtt| rtt.as_secs_f64() * 1e3),
            links: session.map_or(0, SessionState::links),
            connections: session.map_or(0, SessionState::connections),
            delivery_rate: session.map(|session| session.path.flow.rate()).filter(|rate| *rate > 0),
            retransmits: session.map(|session| session.path.flow.retransmits()),
            window_limited: limits.map(|limits| limits.receive_window),
            buffer_limited: limits.map(|limits| limits.send_buffer),
            last_error: observed.last_end.as_ref().map(|(reason, _)| reason.clone()),
            last_error_s: observed.last_end.as_ref().map(|(_, at)| at.elapsed().as_secs()),
        }
    }
}

/// The back-off's pause after an attempt that was not refused for good.
fn shortened(end: &SessionEnd, delay: Duration) -> Duration {
    if end.line_is_out() {
        delay.min(SILENT_PAUSE)
    } else if matches!(end, SessionEnd::Refused(_)) || end.concerns_identity() || end.has_no_such_name() {
        delay
    } else {
        delay.min(jittered(BUSY_PAUSE, 1.0))
    }
}

/// Leaves a server once it has the session of this agent's successor, which it says. It may not have it yet, though the
/// successor knows of it: without this session the node would have none until then.
async fn leave_to_successor(state: &SessionState, server_drains: &CancellationToken) {
    let _ = tokio::time::timeout(REPLACED, server_drains.cancelled()).await;
    if *state.phase.borrow() != SessionPhase::Succeeded {
        // The successor's sessions are with other servers than this one.
        state.leaving.cancel();
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::{AlertDescription, Error};

    use super::*;

    #[test]
    fn agents_of_a_busy_server_come_back_soon_and_refused_ones_do_not() {
        let pauses = |end: SessionEnd| {
            let pauses: Vec<_> = (0..100).map(|_| shortened(&end, LONGEST_PAUSE)).collect();
            (*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap())
        };
        let (shortest, longest) = pauses(SessionEnd::Closed);
        assert!(shortest < BUSY_PAUSE / 4 && longest <= BUSY_PAUSE, "{shortest:?} to {longest:?}");
        let refused = Refusal::ForNow("not in the inventory".into());
        assert_eq!(pauses(refused.into()), (LONGEST_PAUSE, LONGEST_PAUSE));
        let untrusted = SessionEnd::tls(Error::AlertReceived(AlertDescription::UnknownCA));
        assert_eq!(pauses(untrusted), (LONGEST_PAUSE, LONGEST_PAUSE));
        let no_such_name = SessionEnd::Connect(io::ErrorKind::NotFound.into());
        assert_eq!(pauses(no_such_name), (LONGEST_PAUSE, LONGEST_PAUSE));
        let unreachable = SessionEnd::Connect(io::ErrorKind::NetworkUnreachable.into());
        assert_eq!(pauses(unreachable), (SILENT_PAUSE, SILENT_PAUSE));
    }
}

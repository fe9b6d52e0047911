//! Keeps one session with one server, for as long as the agent lives.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::identity::{ALPN_TUNNEL, AgentIdentity, agent_tls};

use super::serve::{SessionEnd, connect, serve};
use super::{Notice, SessionState, Shared};

/// The first pause after a failure.
const SHORTEST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause between two attempts. With the jitter, a fleet of 10,000 agents comes back at about 1,300 a second.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// The pause after another agent took this node over: two agents with one identity must not replace each other in turns.
const REPLACED_PAUSE: Duration = Duration::from_secs(120);
/// How often an address that leads to a server which is attached through another one is tried again, lest it leads
/// elsewhere now. When the other one fails it is tried at once.
const STANDBY_PAUSE: Duration = Duration::from_secs(60);
/// A session that lived this long was a good one: the next failure starts with the shortest pause.
const GOOD_SESSION: Duration = Duration::from_secs(30);

/// Where the loop stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Dialling, or in a handshake.
    Connecting,
    /// In use by the server.
    Attached,
    /// Waiting before the next attempt.
    Waiting,
}

/// What an operator sees of one server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The address as configured.
    pub address: String,
    /// Where the loop stands.
    pub phase: Phase,
    /// The server's own name for itself.
    pub server_id: Option<String>,
    /// Seconds since the server attached.
    pub attached_for_s: Option<u64>,
    /// The session's number.
    pub epoch: u64,
    /// Round-trip time in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Connections carried now.
    pub connections: u32,
    /// Why the last session, or attempt, ended.
    pub last_error: Option<String>,
}

#[derive(Default)]
struct Observed {
    session: Option<Arc<SessionState>>,
    waiting: bool,
    last_error: Option<String>,
    /// Standing by because the server is attached through another address.
    standby: bool,
    refusals: Refusals,
}

/// When this agent and the server have not taken each other's certificate, for the first and for the last time since they
/// last did. Other failures in between do not count: a server that refuses a certificate may reset the connection before
/// its reason has arrived. Nor does the time since the last one: a server that is away refuses nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Refusals(Option<(Instant, Instant)>);

impl Refusals {
    fn add(&mut self, at: Instant) {
        self.0.get_or_insert((at, at)).1 = at;
    }

    fn span(self) -> Option<Duration> {
        self.0.map(|(first, last)| last - first)
    }
}

/// Keeps the sessions with one server.
pub struct LinkLoop {
    shared: Arc<Shared>,
    server: String,
    observed: Mutex<Observed>,
    /// The number of a session that a newer one has replaced. With it the server takes this agent again only once the
    /// newer session is gone; a fresh number would replace that one in turn.
    yielded: Mutex<Option<u64>>,
    /// Cancelled when the agent drains, or when the server's address has gone.
    leaving: CancellationToken,
}

impl LinkLoop {
    /// A loop for the server at `server` (`host:port`).
    pub fn new(shared: Arc<Shared>, server: String) -> Arc<Self> {
        let leaving = shared.draining.child_token();
        Arc::new(Self { shared, server, observed: Mutex::default(), yielded: Mutex::default(), leaving })
    }

    /// Ends the loop as if the agent drained, for this server only: nothing new, and what is carried may finish.
    pub fn leave(&self) {
        self.leaving.cancel();
    }

    /// The address as configured or found.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Whether the loop holds back because the server is attached through another address.
    pub fn stands_by(&self) -> bool {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner).standby
    }

    /// How long this agent and the server have not taken each other's certificate: from the first refusal to the last.
    pub fn refused_for(&self) -> Option<Duration> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner).refusals.span()
    }

    /// Runs until the agent drains or the server's address has gone. Sessions that outlive their turn (the server drains, its successor is dialled
    /// already) end on their own.
    pub async fn run(self: Arc<Self>, mut identity: watch::Receiver<Arc<AgentIdentity>>) {
        let mut failures = 0u32;
        let leftovers = TaskTracker::new();
        loop {
            let started = Instant::now();
            let end = tokio::select! {
                end = self.session(&mut identity, &leftovers) => end,
                () = self.shared.forced.cancelled() => break,
            };
            if self.leaving.is_cancelled() {
                break;
            }
            let standby = matches!(end, SessionEnd::SameServer(_));
            self.observe(|observed| {
                let attached = observed.session.take().is_some_and(|session| session.was_attached());
                if attached || standby {
                    observed.refusals = Refusals::default();
                }
                if end.concerns_identity() {
                    observed.refusals.add(Instant::now());
                }
                observed.waiting = true;
                observed.standby = standby;
                observed.last_error = Some(end.to_string());
            });
            if started.elapsed() >= GOOD_SESSION || matches!(end, SessionEnd::Draining) {
                failures = 0;
            }
            failures = failures.saturating_add(1);
            let pause = match end {
                SessionEnd::Replaced(_) | SessionEnd::Refused(_) => jittered(REPLACED_PAUSE, 0.5),
                SessionEnd::SameServer(_) => jittered(STANDBY_PAUSE, 0.5),
                _ => jittered(pause_after(failures), 1.0),
            };
            self.shared.metrics.sessions_ended.inc();
            let retry_in_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            if standby {
                tracing::debug!(server = %self.server, reason = %end, retry_in_ms, "standing by");
            } else {
                tracing::warn!(server = %self.server, error = %end, retry_in_ms, "session ended");
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.shared.attached.released(), if standby => {}
                () = self.leaving.cancelled() => break,
            }
            self.observe(|observed| observed.waiting = false);
        }
        leftovers.close();
        tokio::select! {
            () = leftovers.wait() => {}
            () = self.shared.forced.cancelled() => {}
        }
    }

    /// One session. Returns early, with the session still at work, when the server drains.
    async fn session(
        self: &Arc<Self>,
        identity: &mut watch::Receiver<Arc<AgentIdentity>>,
        leftovers: &TaskTracker,
    ) -> SessionEnd {
        let tls = {
            let identity = identity.borrow_and_update().clone();
            match agent_tls(&identity, ALPN_TUNNEL) {
                Ok(tls) => tls,
                Err(error) => return SessionEnd::Tls(std::io::Error::other(error)),
            }
        };
        let connected = tokio::select! {
            connected = connect(&self.server, tls) => connected,
            () = self.leaving.cancelled() => return SessionEnd::Stopping,
        };
        let (link, chain) = match connected {
            Ok(connected) => connected,
            Err(end) => return end,
        };
        let epoch = match self.epoch().await {
            Ok(epoch) => epoch,
            Err(error) => return SessionEnd::Connect(error),
        };
        let state = Arc::new(SessionState::new(self.shared.clone(), self.server.clone(), epoch, chain));
        self.observe(|observed| observed.session = Some(state.clone()));
        let server_drains = CancellationToken::new();
        let mut serving = leftovers.spawn(serve(state.clone(), link, server_drains.clone()));
        let left = async {
            self.leaving.cancelled().await;
            if self.shared.draining.is_cancelled() {
                // The session sees that by itself.
                std::future::pending::<()>().await;
            }
        };
        let end = tokio::select! {
            ended = &mut serving => ended.unwrap_or(SessionEnd::Closed),
            () = server_drains.cancelled() => SessionEnd::Draining,
            () = left => {
                state.leave();
                SessionEnd::Stopping
            }
        };
        let yields = matches!(end, SessionEnd::Replaced(_) | SessionEnd::Refused(_));
        *self.yielded() = yields.then_some(epoch);
        end
    }

    /// The next session's number. Taken once the server is reached, and off this thread: the number is synced to disk.
    async fn epoch(&self) -> std::io::Result<u64> {
        if let Some(yielded) = *self.yielded() {
            return Ok(yielded);
        }
        let shared = self.shared.clone();
        let next = tokio::task::spawn_blocking(move || shared.epochs.next()).await;
        next.map_err(std::io::Error::other)?.map_err(std::io::Error::other)
    }

    fn yielded(&self) -> MutexGuard<'_, Option<u64>> {
        self.yielded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a server has this session in use.
    pub fn attached(&self) -> bool {
        self.status().phase == Phase::Attached
    }

    /// What an operator sees.
    pub fn status(&self) -> LinkStatus {
        let observed = self.observed.lock().unwrap_or_else(PoisonError::into_inner);
        let session = observed.session.as_deref();
        let notice = session.map(|session| session.notices.borrow().clone());
        let (server_id, since) = match notice {
            Some(Notice::Attached { server_id, since }) => (Some(server_id), Some(since)),
            _ => (None, None),
        };
        let phase = match (observed.waiting, since) {
            (true, _) => Phase::Waiting,
            (false, Some(_)) => Phase::Attached,
            (false, None) => Phase::Connecting,
        };
        LinkStatus {
            address: self.server.clone(),
            phase,
            server_id,
            attached_for_s: since.map(|since| since.elapsed().unwrap_or_default().as_secs()),
            epoch: session.map_or(0, |session| session.epoch),
            rtt_ms: session.and_then(|session| session.rtt.last()).map(|rtt| rtt.as_secs_f64() * 1e3),
            connections: session.map_or(0, SessionState::connections),
            last_error: observed.last_error.clone(),
        }
    }

    fn observe(&self, change: impl FnOnce(&mut Observed)) {
        change(&mut self.observed.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The pause after the n-th failure in a row, before jitter.
fn pause_after(failures: u32) -> Duration {
    SHORTEST_PAUSE
        .saturating_mul(1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX))
        .min(LONGEST_PAUSE)
}

/// A random time of up to `pause`, of which `share` is random: agents that lost one server do not return in step.
fn jittered(pause: Duration, share: f64) -> Duration {
    pause.mul_f64(1.0 - share * rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_refusal_and_an_outage_are_not_a_time_of_refusals() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.span(), None);
        let first = Instant::now();
        refusals.add(first);
        assert_eq!(refusals.span(), Some(Duration::ZERO), "however long ago it was");
        refusals.add(first + Duration::from_secs(61));
        assert_eq!(refusals.span(), Some(Duration::from_secs(61)));
    }

    #[test]
    fn pauses_grow_to_a_limit() {
        assert_eq!(pause_after(1), SHORTEST_PAUSE);
        assert_eq!(pause_after(2), SHORTEST_PAUSE * 2);
        assert_eq!(pause_after(40), LONGEST_PAUSE);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
        for _ in 0..100 {
            assert!(jittered(LONGEST_PAUSE, 1.0) <= LONGEST_PAUSE);
            assert!(jittered(LONGEST_PAUSE, 0.5) >= LONGEST_PAUSE / 2);
        }
    }
}

//! The streams with all servers. They share one address, so an attempt may reach any of them. The agent tries until it
//! has found as many as they report.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::backoff::{Backoff, jittered};
use tunnel_runtime::lifecycle::ReadyGuard;
use tunnel_runtime::live::Live;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::text::printable;

use super::shared::Shared;
use super::status::{KonnectivityServer, KonnectivityStatus};
use super::stream::Stream;
use crate::busy::Busy;

/// Interval of looking for more servers than were reported. The number may have grown without notice.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Maximum number of streams, including those being left, whatever servers report: each may hold memory.
const MOST: usize = 32;
/// Text of `/readyz` without a server.
const PENDING: &str = "a konnectivity server";
/// Attempts that may lead to known servers before the pause between them grows: a load balancer leads to any server, and one that
/// is missing is to be found soon.
const FOUND_AGAIN: u32 = 20;
/// A stream that has lasted this long was a success.
const LASTING: Duration = Duration::from_secs(10);

/// The streams with all servers.
pub struct Set {
    shared: Arc<Shared>,
    attached: Arc<Live<Attached>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    server_count: Option<usize>,
    last_error: Option<(String, Instant)>,
    /// Set while there is no server. konnectivity's own agent is not ready then either, even after it was.
    unready: Option<ReadyGuard>,
}

#[derive(Debug)]
struct Attached {
    server_id: String,
    /// Number of servers that this one has reported last.
    server_count: AtomicUsize,
    since: Instant,
    busy: Arc<Busy>,
    leave: CancellationToken,
}

impl Attached {
    fn is_left(&self) -> bool {
        self.leave.is_cancelled()
    }
}

/// The search for one more server.
struct Search {
    /// Number of attempts in a row that have led to known servers.
    found_again: u32,
    backoff: Backoff,
}

impl Search {
    fn reset(&mut self) {
        self.found_again = 0;
        self.backoff.reset();
    }

    /// Returns the pause after an attempt that has led to a known server.
    fn pause(&mut self, interval: Duration) -> Duration {
        self.found_again = self.found_again.saturating_add(1);
        if self.found_again > FOUND_AGAIN { self.backoff.next_delay() } else { jittered(interval, 0.5) }
    }
}

/// Returns the servers that are not being left.
fn kept(mut attached: Vec<Arc<Attached>>) -> Vec<Arc<Attached>> {
    attached.retain(|attached| !attached.is_left());
    attached
}

/// Returns the largest number of servers that one of them has reported: one that has just started may not know the others yet.
fn count_of(kept: &[Arc<Attached>]) -> Option<usize> {
    kept.iter().map(|attached| attached.server_count.load(Ordering::Relaxed)).max()
}

impl Set {
    /// The agent is ready while there is a server.
    pub fn new(shared: Shared) -> Arc<Self> {
        let unready = Some(shared.runtime.readiness.pending(PENDING));
        let state = State { unready, ..State::default() };
        Arc::new(Self { shared: Arc::new(shared), attached: Arc::default(), state: Mutex::new(state) })
    }

    /// Keeps the streams until the drain, and then until their connections have ended.
    pub async fn run(self: Arc<Self>) {
        let config = &self.shared.config;
        let mut backoff = Backoff::new(config.sync_interval, config.sync_interval_cap);
        let mut search = Search { found_again: 0, backoff: backoff.clone() };
        let mut streams = JoinSet::new();
        let mut failing = LogOnce::default();
        let mut next = Instant::now();
        loop {
            tokio::select! {
                biased;
                () = self.shared.runtime.shutdown.draining() => break,
                Some(ended) = streams.join_next() => {
                    // A stream that has panicked counts as one that failed at once.
                    self.count();
                    if let Some(lasted) = ended.unwrap_or(Some(Duration::ZERO)) {
                        if lasted >= LASTING {
                            backoff.reset();
                        }
                        search.reset();
                        next = next.min(Instant::now() + backoff.next_delay());
                    }
                    continue;
                }
                () = tokio::time::sleep_until(next) => {}
            }
            let opened = tokio::select! {
                opened = Stream::open(&self.shared) => opened,
                () = self.shared.runtime.shutdown.draining() => break,
            };
            let pause = match opened.map(|stream| self.take(stream, &mut streams)) {
                Ok(true) => {
                    failing.clear();
                    search.reset();
                    jittered(config.sync_interval, 0.1)
                }
                Ok(false) => {
                    failing.clear();
                    search.pause(config.sync_interval)
                }
                Err(reason) => {
                    if failing.is_new(&reason) {
                        tracing::warn!(server = %config.server, reason, "failed to attach to a konnectivity server, retrying");
                    }
                    self.state.lock().last_error = Some((reason, Instant::now()));
                    backoff.next_delay()
                }
            };
            let pause = if self.is_complete() {
                search.reset();
                jittered(LOOK_AGAIN, 0.5)
            } else {
                pause
            };
            next = Instant::now() + pause;
        }
        while streams.join_next().await.is_some() {}
    }

    pub fn status(&self) -> KonnectivityStatus {
        let state = self.state.lock();
        let mut attached = self.attached.all();
        attached.sort_by_key(|attached| attached.since);
        let attached = attached.iter().map(|attached| KonnectivityServer {
            server_id: attached.server_id.clone(),
            attached_for_s: attached.since.elapsed().as_secs(),
            connections: attached.busy.count(),
            draining: attached.is_left(),
        });
        KonnectivityStatus {
            server: self.shared.config.server.to_string(),
            agent_id: self.shared.config.agent_id.clone(),
            identifiers: self.shared.identifiers(),
            server_count: state.server_count,
            attached: attached.collect(),
            last_error: state.last_error.as_ref().map(|(error, _)| error.clone()),
            last_error_s: state.last_error.as_ref().map(|(_, at)| at.elapsed().as_secs()),
        }
    }

    /// Runs an opened stream. Returns true if its server is new and not one too many. The task returns how long a stream
    /// with a new server lasted. A stream with a server that this agent already has ends by itself, once the connections
    /// that it got meanwhile have ended.
    fn take(self: &Arc<Self>, stream: Stream, streams: &mut JoinSet<Option<Duration>>) -> bool {
        let attached = self.attached.all();
        if attached.len() >= MOST {
            return false;
        }
        let leave = self.shared.runtime.shutdown.draining_token().child_token();
        let busy = Arc::<Busy>::default();
        let server_id = printable(&stream.server_id, 100);
        let known = attached.iter().find(|other| other.server_id == server_id && !other.is_left());
        if let Some(known) = known {
            known.server_count.store(stream.server_count, Ordering::Relaxed);
            leave.cancel();
        }
        let new = known.is_none();
        let entry = Attached {
            server_id: server_id.clone(),
            server_count: stream.server_count.into(),
            since: Instant::now(),
            busy: busy.clone(),
            leave: leave.clone(),
        };
        // Removed with the stream, however that ends.
        let listed = self.attached.enter(entry);
        self.count();
        if new {
            tracing::info!(
                server = server_id,
                servers = stream.server_count,
                "attached to a konnectivity server"
            );
            self.shared.runtime.metrics.sessions_started.inc();
        }
        let (set, shared) = (self.clone(), self.shared.clone());
        streams.spawn(async move {
            let started = Instant::now();
            let ended = stream.run(shared, busy, leave.clone()).await;
            if new {
                set.shared.runtime.metrics.sessions_ended.inc();
                set.ended(&server_id, ended, &leave);
            }
            drop(listed);
            set.count();
            new.then(|| started.elapsed())
        });
        new
    }

    fn ended(&self, server_id: &str, ended: Result<(), tonic::Status>, leave: &CancellationToken) {
        if leave.is_cancelled() {
            tracing::info!(server = server_id, "left a konnectivity server");
            return;
        }
        let reason = match ended {
            Ok(()) => "the server ended the stream".to_owned(),
            Err(status) => format!("{:?}: {}", status.code(), printable(status.message(), 300)),
        };
        tracing::warn!(server = server_id, reason, "lost a konnectivity server");
        self.state.lock().last_error = Some((format!("{server_id}: {reason}"), Instant::now()));
    }

    /// True if this agent has streams with as many servers as there are, or as it may have.
    fn is_complete(&self) -> bool {
        let kept = kept(self.attached.all()).len();
        self.state.lock().server_count.is_some_and(|count| kept > 0 && kept >= count.min(MOST))
    }

    /// Updates the metrics, the number of servers and the readiness after a stream has begun or ended.
    fn count(&self) {
        let kept = kept(self.attached.all());
        self.shared.metrics.servers.set(i64::try_from(kept.len()).unwrap_or(i64::MAX));
        let mut state = self.state.lock();
        // Without one the last number stays.
        if let Some(count) = count_of(&kept) {
            state.server_count = Some(count);
            self.shared.metrics.server_count.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        if kept.is_empty() {
            state.unready.get_or_insert_with(|| self.shared.runtime.readiness.pending(PENDING));
        } else {
            state.unready = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attached(server_count: usize) -> Arc<Attached> {
        Arc::new(Attached {
            server_id: format!("one of {server_count}"),
            server_count: server_count.into(),
            since: Instant::now(),
            busy: Arc::default(),
            leave: CancellationToken::new(),
        })
    }

    #[test]
    fn a_server_that_knows_fewer_ends_no_search() {
        let (older, newer) = (attached(2), attached(6));
        assert_eq!(count_of(&[]), None);
        assert_eq!(count_of(&[older.clone(), newer.clone()]), Some(6));
        assert_eq!(count_of(&[newer.clone(), older.clone()]), Some(6));
        newer.leave.cancel();
        assert_eq!(count_of(&kept(vec![older, newer])), Some(2));
    }

    #[test]
    fn a_missing_server_is_looked_for_without_growing_pauses_at_first() {
        let (interval, cap) = (Duration::from_secs(1), Duration::from_secs(10));
        let mut search = Search { found_again: 0, backoff: Backoff::new(interval, cap) };
        for _ in 0..2 {
            let first = (0..FOUND_AGAIN).map(|_| search.pause(interval));
            assert!(first.max().is_some_and(|longest| longest <= interval * 3 / 2));
            let later = (0..FOUND_AGAIN).map(|_| search.pause(interval));
            assert!(later.max().is_some_and(|longest| longest > cap / 2));
            search.reset();
        }
    }
}

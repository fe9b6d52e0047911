//! The streams with all servers. They share one address, so that each attempt leads to any of them: the agent tries until it has
//! found as many as they say that there are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tunnel_core::backoff::{Backoff, jittered};
use tunnel_core::lifecycle::{Readiness, ReadyGuard};
use tunnel_core::log_once::LogOnce;
use tunnel_core::text::printable;

use super::shared::{Busy, Shared};
use super::status::{KonnectivityServer, KonnectivityStatus};
use super::stream::Stream;

/// How often to look for more servers than there were said to be: the number may have grown, and nobody says so.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Streams at most, those that are left included, whatever servers say: each may hold memory.
const MOST: usize = 32;
/// What `/readyz` shows without a server.
const PENDING: &str = "a konnectivity server";
/// A stream that has lasted so long was a success.
const LASTING: Duration = Duration::from_secs(10);

/// The streams with all servers.
pub(crate) struct Set {
    shared: Arc<Shared>,
    readiness: Readiness,
    state: Mutex<State>,
    last_number: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    attached: Vec<Attached>,
    server_count: Option<usize>,
    last_error: Option<(String, Instant)>,
    /// While there is no server: konnectivity's own agent is not ready then either, whatever was before.
    unready: Option<ReadyGuard>,
}

#[derive(Debug)]
struct Attached {
    number: u64,
    server_id: String,
    since: Instant,
    busy: Arc<Busy>,
    leave: CancellationToken,
}

/// What became of an attempt.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    New,
    /// A server that this agent is attached to, or one too many.
    Known,
}

impl Set {
    /// `readiness` follows whether there is a server.
    pub(crate) fn new(shared: Arc<Shared>, readiness: Readiness) -> Arc<Self> {
        let state = State { unready: Some(readiness.pending(PENDING)), ..State::default() };
        Arc::new(Self { shared, readiness, state: Mutex::new(state), last_number: AtomicU64::new(0) })
    }

    /// Keeps the streams until the drain, and then until what they carry has ended.
    pub(crate) async fn run(self: Arc<Self>) {
        let config = &self.shared.config;
        let mut backoff = Backoff::new(config.sync_interval, config.sync_interval_cap);
        // While attempts lead to known servers.
        let mut search = backoff.clone();
        let mut streams = JoinSet::new();
        let mut failing = LogOnce::default();
        let mut next = tokio::time::Instant::now();
        loop {
            tokio::select! {
                biased;
                () = self.shared.draining.cancelled() => break,
                Some(ended) = streams.join_next() => {
                    // One that has panicked counts as one that has failed at once.
                    if let Some(lasted) = ended.unwrap_or(Some(Duration::ZERO)) {
                        if lasted >= LASTING {
                            backoff.reset();
                        }
                        search.reset();
                        next = next.min(tokio::time::Instant::now() + backoff.next_delay());
                    }
                    continue;
                }
                () = tokio::time::sleep_until(next) => {}
            }
            let opened = tokio::select! {
                opened = Stream::open(&self.shared) => opened,
                () = self.shared.draining.cancelled() => break,
            };
            let found = opened.map(|stream| self.take(stream, &mut streams));
            let pause = match found {
                Ok(Found::New) => {
                    failing.clear();
                    search.reset();
                    jittered(config.sync_interval, 0.1)
                }
                Ok(Found::Known) => {
                    failing.clear();
                    search.next_delay()
                }
                Err(reason) => {
                    if failing.is_new(&reason) {
                        tracing::warn!(server = %config.server, reason, "cannot attach to a konnectivity server; trying again");
                    }
                    self.state.lock().last_error = Some((reason, Instant::now()));
                    backoff.next_delay()
                }
            };
            let pause = if self.is_complete() { jittered(LOOK_AGAIN, 0.5) } else { pause };
            next = tokio::time::Instant::now() + pause;
        }
        while streams.join_next().await.is_some() {}
    }

    pub(crate) fn status(&self) -> KonnectivityStatus {
        let state = self.state.lock();
        let attached = state.attached.iter().map(|attached| KonnectivityServer {
            server_id: attached.server_id.clone(),
            attached_for_s: attached.since.elapsed().as_secs(),
            connections: attached.busy.count(),
            draining: attached.leave.is_cancelled(),
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

    /// Runs a stream that was opened; its task returns how long one with a new server has lasted. One with a server that this agent
    /// has already ends by itself, once what it has been sent meanwhile has ended.
    fn take(self: &Arc<Self>, stream: Stream, streams: &mut JoinSet<Option<Duration>>) -> Found {
        if self.state.lock().attached.len() >= MOST {
            return Found::Known;
        }
        let leave = self.shared.draining.child_token();
        let busy = Arc::<Busy>::default();
        let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let server_id = printable(&stream.server_id, 100);
        let found = {
            let mut state = self.state.lock();
            // Newer than what another one has said before.
            state.server_count = Some(stream.server_count);
            self.shared.own_metrics.server_count.set(i64::try_from(stream.server_count).unwrap_or(i64::MAX));
            let known = state
                .attached
                .iter()
                .any(|attached| attached.server_id == server_id && !attached.leave.is_cancelled());
            if known {
                leave.cancel();
            }
            let since = Instant::now();
            state.attached.push(Attached {
                number,
                server_id: server_id.clone(),
                since,
                busy: busy.clone(),
                leave: leave.clone(),
            });
            self.count(&mut state);
            if known { Found::Known } else { Found::New }
        };
        if found == Found::New {
            tracing::info!(
                server = server_id,
                servers = stream.server_count,
                "attached to a konnectivity server"
            );
            self.shared.metrics.sessions_started.inc();
        }
        let listed = Listed(self.clone(), number);
        let shared = self.shared.clone();
        let counts = found == Found::New;
        streams.spawn(async move {
            let started = Instant::now();
            let ended = stream.run(shared, busy, leave.clone()).await;
            if counts {
                listed.0.shared.metrics.sessions_ended.inc();
                listed.0.ended(&server_id, ended, &leave);
            }
            drop(listed);
            counts.then(|| started.elapsed())
        });
        found
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
        tracing::warn!(server = server_id, reason, "a konnectivity server is gone");
        self.state.lock().last_error = Some((format!("{server_id}: {reason}"), Instant::now()));
    }

    /// Whether there is a stream with as many servers as there are, or may be.
    fn is_complete(&self) -> bool {
        let state = self.state.lock();
        let attached = state.attached.iter().filter(|attached| !attached.leave.is_cancelled()).count();
        state.server_count.is_some_and(|count| attached > 0 && attached >= count.min(MOST))
    }

    fn count(&self, state: &mut State) {
        let attached = state.attached.iter().filter(|attached| !attached.leave.is_cancelled()).count();
        self.shared.own_metrics.servers.set(i64::try_from(attached).unwrap_or(i64::MAX));
        if attached > 0 {
            state.unready = None;
        } else {
            state.unready.get_or_insert_with(|| self.readiness.pending(PENDING));
        }
    }
}

/// The entry of a stream. Goes with it, however it ends.
struct Listed(Arc<Set>, u64);

impl Drop for Listed {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.attached.retain(|attached| attached.number != self.1);
        self.0.count(&mut state);
    }
}

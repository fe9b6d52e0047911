//! The streams with all servers. They share one address, so that each attempt leads to any of them: the agent tries until it has
//! found as many as they say that there are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tunnel_core::backoff::{Backoff, jittered};
use tunnel_core::lifecycle::{Readiness, ReadyGuard};
use tunnel_core::live::Live;
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
    attached: Arc<Live<Attached>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    server_count: Option<usize>,
    last_error: Option<(String, Instant)>,
    /// While there is no server: konnectivity's own agent is not ready then either, whatever was before.
    unready: Option<ReadyGuard>,
}

#[derive(Debug)]
struct Attached {
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
        Arc::new(Self { shared, readiness, attached: Arc::default(), state: Mutex::new(state) })
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
                    self.count();
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
        let mut attached = self.attached.all();
        attached.sort_by_key(|attached| attached.since);
        let attached = attached.iter().map(|attached| KonnectivityServer {
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
        let attached = self.attached.all();
        if attached.len() >= MOST {
            return Found::Known;
        }
        let leave = self.shared.draining.child_token();
        let busy = Arc::<Busy>::default();
        let server_id = printable(&stream.server_id, 100);
        let known = attached.iter().any(|other| other.server_id == server_id && !other.leave.is_cancelled());
        let found = if known { Found::Known } else { Found::New };
        if known {
            leave.cancel();
        }
        // Newer than what another one has said before.
        self.state.lock().server_count = Some(stream.server_count);
        self.shared.own_metrics.server_count.set(i64::try_from(stream.server_count).unwrap_or(i64::MAX));
        let entry = Attached {
            server_id: server_id.clone(),
            since: Instant::now(),
            busy: busy.clone(),
            leave: leave.clone(),
        };
        // Goes with the stream, however that ends.
        let listed = self.attached.enter(entry);
        self.count();
        if found == Found::New {
            tracing::info!(
                server = server_id,
                servers = stream.server_count,
                "attached to a konnectivity server"
            );
            self.shared.metrics.sessions_started.inc();
        }
        let (set, shared) = (self.clone(), self.shared.clone());
        let counts = found == Found::New;
        streams.spawn(async move {
            let started = Instant::now();
            let ended = stream.run(shared, busy, leave.clone()).await;
            if counts {
                set.shared.metrics.sessions_ended.inc();
                set.ended(&server_id, ended, &leave);
            }
            drop(listed);
            set.count();
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
        let attached = self.serving();
        self.state.lock().server_count.is_some_and(|count| attached > 0 && attached >= count.min(MOST))
    }

    /// Servers that are not being left.
    fn serving(&self) -> usize {
        self.attached.all().iter().filter(|attached| !attached.leave.is_cancelled()).count()
    }

    /// Brings the metric and the readiness up to date after a stream has begun or ended.
    fn count(&self) {
        let serving = self.serving();
        self.shared.own_metrics.servers.set(i64::try_from(serving).unwrap_or(i64::MAX));
        let mut state = self.state.lock();
        if serving > 0 {
            state.unready = None;
        } else {
            state.unready.get_or_insert_with(|| self.readiness.pending(PENDING));
        }
    }
}

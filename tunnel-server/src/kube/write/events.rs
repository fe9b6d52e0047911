//! Events in the cluster, shown by `kubectl describe`.
//!
//! An Event may be lost. Publishing one never blocks, and the load that a burst of them puts on the API server is
//! bounded.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Attempts, FIELD_MANAGER, RequestError, request};

use crate::kube::context::WRITE_DEADLINE;

/// Maximum number of Events that wait, and the pause after each that is published.
const WAITING: usize = 100;
const PAUSE: Duration = Duration::from_millis(200);
/// Time after which an Event that could not be published is dropped.
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
/// Number of different notes for which repetitions are counted in one Event.
const NOTES: usize = 64;
/// Minimum interval between log messages about dropped Events.
const REPORT_DROPPED: Duration = Duration::from_secs(60);
/// Maximum length of a note in bytes, a limit of the API server.
const MAX_NOTE: usize = 1024;

/// Publishes Events. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
    /// Events for which the queue had no room, not reported yet.
    dropped: Arc<AtomicU64>,
}

struct Queued {
    regarding: ObjectReference,
    event: Event,
    at: Instant,
}

impl Events {
    /// Starts publishing as controller `postern`, instance `identity`, until `stop`. Needs a tokio runtime.
    pub fn start(client: kube::Client, identity: &str, stop: CancellationToken) -> Self {
        let (queue, queued) = mpsc::channel(WAITING);
        let dropped = Arc::<AtomicU64>::default();
        let reporter = Reporter { controller: FIELD_MANAGER.into(), instance: Some(identity.into()) };
        let publisher = Publisher { client, reporter, recorders: HashMap::new(), dropped: dropped.clone() };
        tokio::spawn(async move {
            let _ = stop.run_until_cancelled(publisher.run(queued)).await;
        });
        Self { queue, dropped }
    }

    /// Queues an Event, or drops it if there are too many.
    pub fn publish(&self, regarding: ObjectReference, kind: EventType, reason: &str, mut note: String) {
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let event = Event {
            type_: kind,
            reason: reason.into(),
            note: Some(note),
            action: reason.into(),
            secondary: None,
        };
        if self.queue.try_send(Queued { regarding, event, at: Instant::now() }).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A reference to a Node that `kubectl describe node` finds: with the name as UID, as the kubelet sets it.
pub fn node(name: &str) -> ObjectReference {
    ObjectReference { namespace: None, uid: Some(name.into()), ..object("Node", "", name) }
}

/// A reference to an object of the core group that may not exist, or whose UID is not known.
pub fn object(kind: &str, namespace: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some(kind.into()),
        namespace: Some(namespace.into()),
        name: Some(name.into()),
        ..ObjectReference::default()
    }
}

struct Publisher {
    client: kube::Client,
    reporter: Reporter,
    /// Recorders by note: a recorder counts Events that differ only in the note as one, with the first one's note.
    recorders: HashMap<Option<String>, Recorder>,
    dropped: Arc<AtomicU64>,
}

impl Publisher {
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>) {
        let mut attempts = Attempts::new("publishing Events in the cluster");
        let mut reported: Option<Instant> = None;
        while let Some(queued) = queue.recv().await {
            if reported.is_none_or(|last| last.elapsed() >= REPORT_DROPPED) {
                let dropped = self.dropped.swap(0, Ordering::Relaxed);
                if dropped > 0 {
                    tracing::warn!(dropped, "dropped Events, too many at once");
                    reported = Some(Instant::now());
                }
            }
            loop {
                let Err(error) = self.publish(&queued).await else {
                    attempts.succeeded();
                    break;
                };
                attempts.report(&error);
                // A refusal is final; without an answer, or after "too many requests", a retry may succeed.
                let refused = error.code.is_some_and(|code| (400..500).contains(&code) && code != 429);
                if refused || queued.at.elapsed() > GIVE_UP_AFTER {
                    break;
                }
                tokio::time::sleep(attempts.next_delay()).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn publish(&mut self, queued: &Queued) -> Result<(), RequestError> {
        if self.recorders.len() >= NOTES && !self.recorders.contains_key(&queued.event.note) {
            self.recorders.clear();
        }
        let fresh = || Recorder::new(self.client.clone(), self.reporter.clone());
        let publish = async |recorder: &Recorder| {
            let object = queued.regarding.name.as_deref().unwrap_or_default();
            let publish = recorder.publish(&queued.event, &queued.regarding);
            request(WRITE_DEADLINE, "publishing an Event about", object, publish).await
        };
        let recorder = self.recorders.entry(queued.event.note.clone()).or_insert_with(fresh);
        let published = publish(recorder).await;
        // The Event with the counted repetitions was deleted: start a new one.
        if published.as_ref().is_err_and(RequestError::is_not_found) {
            *recorder = fresh();
            return publish(recorder).await;
        }
        published
    }
}

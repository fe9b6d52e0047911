//! Events in the cluster, shown by `kubectl describe`.
//!
//! An Event may be lost. Publishing one never blocks, and the load that a burst of them puts on the API server is
//! bounded.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Attempts, FIELD_MANAGER, RequestError, request};

use crate::kube::context::WRITE_DEADLINE;

/// Maximum burst of Events, and the rate per second after it.
const BURST: u32 = 50;
const PER_SECOND: u32 = 5;
/// Time after which an Event that could not be published is dropped.
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
/// Number of different notes for which repetitions are counted in one Event.
const NOTES: usize = 64;
/// Minimum interval between log messages about dropped Events.
const REPORT_DROPPED: Duration = Duration::from_secs(60);
/// Maximum length of a note in bytes, a limit of the API server.
const MAX_NOTE: usize = 1024;

/// Publishes Events. Clones share one queue and one rate limit.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
    bucket: Arc<Mutex<Bucket>>,
}

struct Queued {
    regarding: ObjectReference,
    event: Event,
    at: Instant,
}

impl Events {
    /// Starts publishing as controller `postern`, instance `identity`, until `stop`. Needs a tokio runtime.
    pub fn start(client: kube::Client, identity: &str, stop: CancellationToken) -> Self {
        // Room for every burst that the bucket allows, so that Events are dropped only if the API server does not
        // answer.
        let (queue, queued) = mpsc::channel(2 * BURST as usize);
        let reporter = Reporter { controller: FIELD_MANAGER.into(), instance: Some(identity.into()) };
        let publisher = Publisher { client, reporter, recorders: HashMap::new() };
        tokio::spawn(async move {
            let _ = stop.run_until_cancelled(publisher.run(queued)).await;
        });
        Self { queue, bucket: Arc::new(Mutex::new(Bucket::new(Instant::now()))) }
    }

    /// Queues an Event, or drops it if there are too many.
    pub fn publish(&self, regarding: ObjectReference, kind: EventType, reason: &str, mut note: String) {
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let now = Instant::now();
        let event = Event {
            type_: kind,
            reason: reason.into(),
            note: Some(note),
            action: reason.into(),
            secondary: None,
        };
        let mut bucket = self.bucket.lock();
        if !bucket.take(now) || self.queue.try_send(Queued { regarding, event, at: now }).is_err() {
            bucket.dropped += 1;
        }
        if let Some(dropped) = bucket.report(now) {
            tracing::warn!(dropped, "dropped Events, too many at once");
        }
    }
}

/// A reference to a Node that `kubectl describe node` finds: with the name as UID, as the kubelet sets it.
pub fn node(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(name.into()),
        uid: Some(name.into()),
        ..ObjectReference::default()
    }
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

/// A token bucket that counts rejected Events.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled: Instant,
    dropped: u64,
    reported: Option<Instant>,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { tokens: f64::from(BURST), filled: now, dropped: 0, reported: None }
    }

    fn take(&mut self, now: Instant) -> bool {
        let gained = now.saturating_duration_since(self.filled).as_secs_f64() * f64::from(PER_SECOND);
        self.tokens = (self.tokens + gained).min(f64::from(BURST));
        self.filled = now;
        let taken = self.tokens >= 1.0;
        if taken {
            self.tokens -= 1.0;
        }
        taken
    }

    /// Returns the number of dropped Events when it is time to report it.
    fn report(&mut self, now: Instant) -> Option<u64> {
        let due = self.reported.is_none_or(|last| now.saturating_duration_since(last) >= REPORT_DROPPED);
        (self.dropped > 0 && due).then(|| {
            self.reported = Some(now);
            std::mem::take(&mut self.dropped)
        })
    }
}

struct Publisher {
    client: kube::Client,
    reporter: Reporter,
    /// Recorders by note: a recorder counts Events that differ only in the note as one, with the first one's note.
    recorders: HashMap<Option<String>, Recorder>,
}

impl Publisher {
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>) {
        let mut attempts = Attempts::new("publishing Events in the cluster");
        while let Some(queued) = queue.recv().await {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_a_rate_get_through() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert_eq!((0..1000).filter(|_| bucket.take(start)).count(), BURST as usize);
        let later = start + Duration::from_secs(2);
        assert_eq!((0..1000).filter(|_| bucket.take(later)).count(), 2 * PER_SECOND as usize);
        let much_later = later + Duration::from_secs(3600);
        assert_eq!((0..1000).filter(|_| bucket.take(much_later)).count(), BURST as usize);
    }

    #[test]
    fn dropped_events_are_reported_once_a_minute() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert_eq!(bucket.report(start), None);
        bucket.dropped = 3;
        assert_eq!(bucket.report(start), Some(3));
        bucket.dropped = 4;
        assert_eq!(bucket.report(start + REPORT_DROPPED / 2), None);
        assert_eq!(bucket.report(start + REPORT_DROPPED), Some(4));
        assert_eq!(bucket.report(start + REPORT_DROPPED * 3), None);
    }
}

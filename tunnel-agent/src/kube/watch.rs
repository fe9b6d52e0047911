//! List and watch of a few objects, at a pace that ten thousand agents may have.
//!
//! [`kube::runtime::watcher`] opens a watch that was ended at once again without a pause, and lists again whenever it is
//! started anew. Here what fails is followed by a pause that grows until a watch has worked, whatever lists do meanwhile.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use kube::api::{Api, ListParams, VersionMatch, WatchEvent, WatchParams};
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};
use tunnel_core::backoff::Backoff;

use super::client::reason;

const RETRIES: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(60));
/// A list, or the beginning of a watch.
const ANSWER: Duration = Duration::from_secs(30);
/// A watch that has stood for so long, or has told something, works.
const SETTLED: Duration = Duration::from_secs(60);
/// Where watches do not work at all, the objects are listed this often: changes are seen late then, but are seen. It also
/// helps where the API server was restored from a backup and does not know the version yet.
const LIST_AGAIN: Duration = Duration::from_secs(300);
/// The longest wait that the API server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(300);
/// How long a watch runs, in seconds, before the API server ends it; at random, so that a fleet's do not end together.
const WATCH_S: std::ops::RangeInclusive<u32> = 200..=290;

/// What there is to tell.
#[derive(Debug)]
pub(super) enum News<K> {
    /// Of the objects. What lies between `Init` and `InitDone` is never cut short.
    Event(Event<K>),
    /// It is tried again.
    Failed {
        reason: String,
        /// It may be no more than the end of a connection: a watch that was lost and is open again tells nothing of that.
        passing: bool,
    },
    /// A watch works, after failures.
    Works,
}

/// Which objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Which {
    pub(super) fields: Option<String>,
    pub(super) labels: Option<String>,
}

/// Follows these objects for ever. `api` is asked before each request.
pub(super) fn follow<K, A, F>(api: A, which: Which) -> impl Stream<Item = News<K>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    A: Fn() -> F + Send + Sync,
    F: Future<Output = Result<Api<K>, String>> + Send,
{
    let follower = Follower {
        api,
        which,
        state: State::Unknown,
        backoff: RETRIES,
        failures: 0,
        pause: None,
        listed: None,
    };
    stream::unfold(follower, |mut follower| async move { Some((follower.next().await, follower)) })
}

struct Follower<K, A> {
    api: A,
    which: Which,
    state: State<K>,
    backoff: Backoff,
    /// In a row.
    failures: u32,
    /// Nothing is asked before.
    pause: Option<Instant>,
    /// When the objects were listed last.
    listed: Option<Instant>,
}

enum State<K> {
    Unknown,
    /// The list is handed on; a watch follows from its version.
    Listed {
        items: std::vec::IntoIter<K>,
        version: String,
    },
    /// All is known until this version.
    Known {
        version: String,
    },
    Watching {
        version: String,
        events: BoxStream<'static, Result<WatchEvent<K>, kube::Error>>,
        opened: Instant,
        settled: bool,
    },
}

/// Why something came to nothing.
struct Failure {
    reason: String,
    /// The version is too old: only a list helps.
    gone: bool,
    asked: Option<Duration>,
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { reason, gone: false, asked: None }
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        let reason = reason(&error);
        let kube::Error::Api(status) = error else { return Self::from(reason) };
        let seconds = status.details.map_or(0, |details| details.retry_after_seconds);
        let asked = (seconds > 0).then(|| Duration::from_secs(seconds.into()).min(LONGEST_ASKED));
        Self { reason, gone: status.code == 410, asked }
    }
}

impl<K, A, F> Follower<K, A>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    A: Fn() -> F + Send + Sync,
    F: Future<Output = Result<Api<K>, String>> + Send,
{
    async fn next(&mut self) -> News<K> {
        loop {
            if let Some(until) = self.pause {
                tokio::time::sleep_until(until).await;
                self.pause = None;
            }
            let news = match std::mem::replace(&mut self.state, State::Unknown) {
                State::Unknown => match self.list().await {
                    Ok((items, version)) => {
                        self.listed = Some(Instant::now());
                        self.state = State::Listed { items: items.into_iter(), version };
                        Some(News::Event(Event::Init))
                    }
                    Err(failure) => Some(self.failed(failure, false)),
                },
                State::Listed { mut items, version } => Some(News::Event(match items.next() {
                    Some(item) => {
                        self.state = State::Listed { items, version };
                        Event::InitApply(item)
                    }
                    None => {
                        self.state = State::Known { version };
                        Event::InitDone
                    }
                })),
                State::Known { version } => match self.open(&version).await {
                    Ok(events) => {
                        self.state =
                            State::Watching { version, events, opened: Instant::now(), settled: false };
                        None
                    }
                    Err(failure) => Some(self.lost(version, failure)),
                },
                State::Watching { version, events, opened, settled } => {
                    self.watch(version, events, opened, settled).await
                }
            };
            if let Some(news) = news {
                return news;
            }
        }
    }

    /// Takes the watch one step further.
    async fn watch(
        &mut self,
        version: String,
        mut events: BoxStream<'static, Result<WatchEvent<K>, kube::Error>>,
        opened: Instant,
        settled: bool,
    ) -> Option<News<K>> {
        let event = if settled {
            events.next().await
        } else {
            match tokio::time::timeout_at(opened + SETTLED, events.next()).await {
                Ok(event) => event,
                Err(_) => {
                    self.state = State::Watching { version, events, opened, settled: true };
                    return self.works();
                }
            }
        };
        let (version, event) = match event {
            None if settled => {
                self.state = State::Known { version };
                return None;
            }
            None => return Some(self.lost(version, "the watch was ended at once".to_owned().into())),
            Some(Err(error)) => return Some(self.lost(version, error.into())),
            Some(Ok(WatchEvent::Error(status))) => {
                return Some(self.lost(version, kube::Error::Api(status).into()));
            }
            Some(Ok(WatchEvent::Bookmark(bookmark))) => (bookmark.metadata.resource_version, None),
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                (object.resource_version().unwrap_or(version), Some(Event::Apply(object)))
            }
            Some(Ok(WatchEvent::Deleted(object))) => {
                (object.resource_version().unwrap_or(version), Some(Event::Delete(object)))
            }
        };
        self.state = State::Watching { version, events, opened, settled: true };
        let Some(event) = event else { return if settled { None } else { self.works() } };
        // The event itself says that the watch works.
        (self.failures, self.backoff) = (0, RETRIES);
        Some(News::Event(event))
    }

    fn works(&mut self) -> Option<News<K>> {
        let failed = std::mem::take(&mut self.failures) > 0;
        self.backoff = RETRIES;
        failed.then_some(News::Works)
    }

    /// After a failure that leaves what is known to be known, unless the API server has forgotten it.
    fn lost(&mut self, version: String, failure: Failure) -> News<K> {
        let old = self.listed.is_none_or(|listed| listed.elapsed() >= LIST_AGAIN);
        // A watch that was lost after hours is opened again first.
        let list = failure.gone || (self.failures > 0 && old);
        self.state = if list { State::Unknown } else { State::Known { version } };
        let passing = self.failures == 0;
        self.failed(failure, passing)
    }

    fn failed(&mut self, failure: Failure, passing: bool) -> News<K> {
        self.failures = self.failures.saturating_add(1);
        let pause = self.backoff.next_delay();
        // As much more again at random: whoever is asked to wait is not alone.
        let pause = failure.asked.map_or(pause, |asked| asked + pause);
        self.pause = Some(Instant::now() + pause);
        News::Failed { reason: failure.reason, passing }
    }

    async fn list(&mut self) -> Result<(Vec<K>, String), Failure> {
        // The answer may come from the API server's cache: a fleet asks when it comes back.
        let params = ListParams {
            label_selector: self.which.labels.clone(),
            field_selector: self.which.fields.clone(),
            resource_version: Some("0".to_owned()),
            version_match: Some(VersionMatch::NotOlderThan),
            ..ListParams::default()
        };
        let api = (self.api)().await?;
        let list = in_time(api.list(&params)).await?;
        let version = list.metadata.resource_version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| "the list has no resourceVersion".to_owned())?;
        Ok((list.items, version))
    }

    async fn open(
        &mut self,
        version: &str,
    ) -> Result<BoxStream<'static, Result<WatchEvent<K>, kube::Error>>, Failure> {
        let params = WatchParams {
            label_selector: self.which.labels.clone(),
            field_selector: self.which.fields.clone(),
            timeout: Some(rand::random_range(WATCH_S)),
            bookmarks: true,
            send_initial_events: false,
        };
        let api = (self.api)().await?;
        Ok(in_time(api.watch(&params, version)).await?.boxed())
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    match timeout(ANSWER, work).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs()).into()),
    }
}

#[cfg(test)]
#[path = "watch/tests.rs"]
mod tests;

//! Following objects of the API server through its outages.
//!
//! This is the list and watch of [`kube::runtime::watcher`] with what that one keeps to itself: when a lost watch is back
//! (it would say so with the next event, which for a quiet object may be never), and a pause before a watch that ended
//! at once is opened again.

mod health;

pub use health::{Health, WatchHealth};

use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use kube::api::{Api, ListParams, VersionMatch, WatchEvent, WatchParams};
use kube::runtime::watcher::{Config, Event, ListSemantic};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};

use super::client::reason;

/// How long a watch runs when its configuration does not say. The API server ends it then, and a new one goes on where it
/// stopped; one that has become silent is noticed this soon.
const WATCH: Duration = Duration::from_secs(50);
/// What an end may be late.
const LATE: Duration = Duration::from_secs(5);
/// After this long without an answer the resource counts as lost, though the request goes on.
const SLOW: Duration = Duration::from_secs(5);
/// A request that takes longer is given up.
const REQUEST: Duration = Duration::from_secs(60);
/// A watch that has been open for so long, or has told something, works.
const SETTLED: Duration = Duration::from_secs(1);
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// After so many failures in a row the objects are listed: an API server whose data was restored from a backup does not
/// know the version yet, and says so with an error like any other.
const FORGIVEN: u32 = 3;
/// The longest wait that the API server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(60);

/// The objects of `api`, for ever: after [`Event::Init`] each with [`Event::InitApply`], then [`Event::InitDone`], then
/// the changes. An `Init` is only told when the whole list is there, so that what lies between is never cut short. After
/// an outage the changes go on, or there is an `Init` again; objects that are then missing are gone.
///
/// Errors go into `health` and the log under the name `resource`, one line when the objects are lost and one when they
/// are back, and are followed by a pause of 0.5 s to 10 s.
pub fn follow<K>(
    api: Api<K>,
    config: Config,
    resource: &'static str,
    health: Health,
) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    health.add(resource);
    let follower = Follower { api, config, resource, health, state: State::Unknown, failures: 0, lost: None };
    stream::unfold(follower, |mut follower| async move { Some((follower.next().await, follower)) })
}

struct Follower<K> {
    api: Api<K>,
    config: Config,
    resource: &'static str,
    health: Health,
    state: State<K>,
    /// In a row.
    failures: u32,
    lost: Option<Instant>,
}

impl<K> Drop for Follower<K> {
    fn drop(&mut self) {
        self.health.ended(self.resource);
    }
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

impl Failure {
    fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), gone: false, asked: None }
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        let reason = reason(&error);
        let kube::Error::Api(status) = error else { return Self::new(reason) };
        let seconds = status.details.map_or(0, |details| details.retry_after_seconds);
        let asked = (seconds > 0).then(|| Duration::from_secs(seconds.into()).min(LONGEST_ASKED));
        Self { reason, gone: status.code == 410, asked }
    }
}

impl<K> Follower<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    async fn next(&mut self) -> Event<K> {
        loop {
            // What fails is tried again from what was known before.
            match std::mem::replace(&mut self.state, State::Unknown) {
                State::Unknown => match self.list().await {
                    Ok((items, version)) => {
                        self.state = State::Listed { items: items.into_iter(), version };
                        return Event::Init;
                    }
                    Err(failure) => self.pause(failure).await,
                },
                State::Listed { mut items, version } => {
                    if let Some(item) = items.next() {
                        self.state = State::Listed { items, version };
                        return Event::InitApply(item);
                    }
                    self.state = State::Known { version };
                    return Event::InitDone;
                }
                State::Known { version } => match self.open(&version).await {
                    Ok(events) => {
                        let (opened, settled) = (Instant::now(), false);
                        self.state = State::Watching { version, events, opened, settled };
                    }
                    Err(failure) => self.resume(version, failure).await,
                },
                State::Watching { version, events, opened, settled } => {
                    if let Some(event) = self.watch(version, events, opened, settled).await {
                        return event;
                    }
                }
            }
        }
    }

    /// Takes the watch one step further.
    async fn watch(
        &mut self,
        mut version: String,
        mut events: BoxStream<'static, Result<WatchEvent<K>, kube::Error>>,
        opened: Instant,
        settled: bool,
    ) -> Option<Event<K>> {
        let patience = if settled { self.duration() + LATE } else { SETTLED };
        let event = match timeout(patience, events.next()).await {
            Err(_) if settled => {
                let reason = format!("the watch has been silent for {} s", patience.as_secs());
                self.resume(version, Failure::new(reason)).await;
                return None;
            }
            // Silence is what a watch of a quiet object is like.
            Err(_) => {
                self.works();
                self.state = State::Watching { version, events, opened, settled: true };
                return None;
            }
            Ok(None) if settled || opened.elapsed() >= SETTLED => {
                self.state = State::Known { version };
                return None;
            }
            Ok(None) => {
                self.resume(version, Failure::new("the watch was ended at once")).await;
                return None;
            }
            Ok(Some(Err(error))) => {
                self.resume(version, error.into()).await;
                return None;
            }
            Ok(Some(Ok(WatchEvent::Error(status)))) => {
                self.resume(version, kube::Error::Api(status).into()).await;
                return None;
            }
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => {
                version = bookmark.metadata.resource_version;
                None
            }
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                version = object.resource_version().unwrap_or(version);
                Some(Event::Apply(object))
            }
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                version = object.resource_version().unwrap_or(version);
                Some(Event::Delete(object))
            }
        };
        if !settled {
            self.works();
        }
        self.state = State::Watching { version, events, opened, settled: true };
        event
    }

    async fn list(&mut self) -> Result<(Vec<K>, String), Failure> {
        let mut params = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            limit: self.config.page_size,
            ..ListParams::default()
        };
        if self.config.list_semantic == ListSemantic::Any {
            params.resource_version = Some("0".to_owned());
            params.version_match = Some(VersionMatch::NotOlderThan);
        }
        let api = self.api.clone();
        let mut items = Vec::new();
        loop {
            let page = self.request(api.list(&params)).await?;
            items.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => {
                    params.continue_token = Some(token);
                    // The token knows the version.
                    (params.resource_version, params.version_match) = (None, None);
                }
                None => {
                    let version = page.metadata.resource_version.filter(|version| !version.is_empty());
                    let version = version.ok_or_else(|| Failure::new("the list has no resourceVersion"))?;
                    return Ok((items, version));
                }
            }
        }
    }

    async fn open(
        &mut self,
        version: &str,
    ) -> Result<BoxStream<'static, Result<WatchEvent<K>, kube::Error>>, Failure> {
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: u32::try_from(self.duration().as_secs()).ok(),
            bookmarks: self.config.bookmarks,
            send_initial_events: false,
        };
        let api = self.api.clone();
        let events = self.request(api.watch(&params, version)).await?;
        Ok(events.boxed())
    }

    fn duration(&self) -> Duration {
        self.config.timeout.map_or(WATCH, |seconds| Duration::from_secs(seconds.into()))
    }

    /// One request. A slow one counts as an outage before it is given up.
    async fn request<T>(&mut self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
        let mut request = std::pin::pin!(request);
        if let Ok(result) = timeout(SLOW, &mut request).await {
            return result.map_err(Failure::from);
        }
        self.lost(&format!("no answer for {} s; still waiting", SLOW.as_secs()));
        match timeout(REQUEST - SLOW, request).await {
            Ok(result) => result.map_err(Failure::from),
            Err(_) => Err(Failure::new(format!("no answer within {} s", REQUEST.as_secs()))),
        }
    }

    /// After a failure that leaves what is known to be known, unless the API server has forgotten it.
    async fn resume(&mut self, version: String, failure: Failure) {
        let list = failure.gone || self.failures >= FORGIVEN;
        self.state = if list { State::Unknown } else { State::Known { version } };
        self.pause(failure).await;
    }

    async fn pause(&mut self, failure: Failure) {
        self.health.failed(self.resource);
        self.lost(&failure.reason);
        let ceiling = SHORTEST_PAUSE.saturating_mul(2 << self.failures.min(8)).min(LONGEST_PAUSE);
        self.failures += 1;
        let pause = rand::random_range(SHORTEST_PAUSE..=ceiling);
        tokio::time::sleep(pause.max(failure.asked.unwrap_or_default())).await;
    }

    fn lost(&mut self, reason: &str) {
        self.health.lost(self.resource, reason);
        if self.lost.is_none() {
            self.lost = Some(Instant::now());
            tracing::warn!(
                resource = self.resource,
                reason,
                "what the API server last said stays in effect; it is asked again until it answers"
            );
        }
    }

    fn works(&mut self) {
        self.failures = 0;
        self.health.works(self.resource);
        if let Some(since) = self.lost.take() {
            let after =
                tunnel_core::config::duration_text(Duration::from_millis(since.elapsed().as_millis() as u64));
            tracing::info!(resource = self.resource, after, "the API server answers again");
        }
    }
}

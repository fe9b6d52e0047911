//! Follows objects of the API server through its outages.
//!
//! This is the list and watch of [`kube::runtime::watcher`] with two additions: it reports when a lost watch works
//! again (a quiet object may never send another event), and it pauses before it reopens a watch that ended immediately.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use kube::api::{Api, ListParams, VersionMatch, WatchEvent, WatchParams};
use kube::core::Status;
use kube::runtime::watcher::{Config, Event, ListSemantic};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use tunnel_runtime::backoff::Backoff;

use crate::client::reason;

/// Part of the message of an API server that has not reached the version yet.
const NOT_REACHED: &str = "Too large resource version";
/// Where watches have failed for this long, in whatever way, the path may pass none: the objects are listed again.
const WITHOUT_WATCH: Duration = Duration::from_secs(600);
/// Time past the requested end of a watch before it counts as silent.
const END_GRACE: Duration = Duration::from_secs(5);

/// Timing of lists and watches: a few servers need changes soon, ten thousand agents must not overload the API server.
#[derive(Clone, Debug)]
pub struct FollowSettings {
    /// Length of a watch in seconds, after which the API server ends it, unless the watch's [`Config`] gives one.
    /// Random, so that a fleet's watches do not end together. Also the time after which a silent watch is noticed.
    pub watch_seconds: RangeInclusive<u32>,
    /// A watch works once it has been open for this long or has sent something. Behind a proxy that cuts streams no
    /// watch gets that far, and the pauses have to keep growing.
    pub settled: Duration,
    /// A request without an answer for this long is reported but continues.
    pub slow: Option<Duration>,
    /// Maximum time for a request.
    pub deadline: Duration,
    /// Pauses after failures.
    pub backoff: Backoff,
    /// Maximum Retry-After that is respected.
    pub longest_retry_after: Duration,
    /// After this many failed watches in a row, and one more, the objects are listed again: an API server whose data was
    /// restored from a backup does not know the version yet, and may report that like any other error. Failures of the
    /// connection and of an overloaded API server do not count: lists would add to its load.
    pub relist_after: u32,
    /// Minimum time between two such lists. Where watches never work, changes are seen this late.
    pub relist_every: Duration,
    /// After a watch that ends, the objects are listed again if nothing was heard for so long, not even a bookmark: a restored API
    /// server takes a watch from a version that it has not reached yet, and sends nothing (kubernetes#107457).
    pub deaf_after: Duration,
}

impl FollowSettings {
    pub const SERVER: Self = Self {
        watch_seconds: 50..=50,
        settled: Duration::from_secs(1),
        slow: Some(Duration::from_secs(5)),
        deadline: Duration::from_secs(60),
        backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)),
        longest_retry_after: Duration::from_secs(60),
        relist_after: 3,
        relist_every: Duration::ZERO,
        // Without etcd's progress notifications, quiet objects have no bookmarks.
        deaf_after: Duration::from_secs(300),
    };

    /// With 10,000 agents that watch two kinds of objects, eleven watches end and are reopened each second. The API
    /// server sends a bookmark each minute, so a watch that is silent for [`ClientSettings::read_timeout`] is broken,
    /// whatever its length.
    ///
    /// [`ClientSettings::read_timeout`]: crate::ClientSettings::read_timeout
    pub const AGENT: Self = Self {
        watch_seconds: 1500..=2100,
        settled: Duration::from_secs(60),
        slow: None,
        deadline: Duration::from_secs(30),
        // All watches of a fleet are lost at once when the API server restarts. They come back over at least five
        // seconds.
        backoff: Backoff::new(Duration::from_secs(10), Duration::from_secs(60)),
        longest_retry_after: Duration::from_secs(300),
        relist_after: 1,
        relist_every: Duration::from_secs(300),
        deaf_after: Duration::from_secs(6 * 3600),
    };
}

/// State of the requests, as opposed to the objects.
#[derive(Clone, Copy, Debug)]
pub enum Signal<'a> {
    /// A request has no answer yet. This counts as an outage.
    Slow { reason: &'a str },
    /// A request failed or a watch was lost. Another attempt follows after a pause.
    Failed {
        reason: &'a str,
        /// True for the first failure of a watch that worked: maybe only its connection has ended.
        passing: bool,
    },
    /// A watch is open and works.
    Works,
}

/// Configuration to follow the one object of this name.
pub fn named(name: &str) -> Config {
    Config::default().fields(&format!("metadata.name={name}"))
}

/// An endless stream of the objects: after [`Event::Init`] each object as [`Event::InitApply`], then
/// [`Event::InitDone`], then the changes. `Init` is sent only once the whole list has arrived, so a list is never cut
/// short. After an outage the changes go on, or another `Init` follows; objects that are then missing are gone.
///
/// Calls `report` with the state of the requests.
pub fn follow<K, R>(
    api: Api<K>,
    config: Config,
    settings: FollowSettings,
    report: R,
) -> impl Stream<Item = Event<K>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    R: FnMut(Signal<'_>) + Send,
{
    let backoff = settings.backoff.clone();
    let (state, failures, doubts, listed) = (State::Unknown, 0, 0, None);
    let (failing, heard) = (Instant::now(), Instant::now());
    let follower =
        Follower { api, config, settings, report, state, backoff, failures, failing, doubts, listed, heard };
    stream::unfold(follower, |mut follower| async move { Some((follower.next().await, follower)) })
}

struct Follower<K, R> {
    api: Api<K>,
    config: Config,
    settings: FollowSettings,
    report: R,
    state: State<K>,
    backoff: Backoff,
    /// Failures in a row.
    failures: u32,
    /// Time of the first of them.
    failing: Instant,
    /// Those of them with [`Remedy::Doubt`].
    doubts: u32,
    /// Time of the last list.
    listed: Option<Instant>,
    /// Time of the last list, change or bookmark.
    heard: Instant,
}

enum State<K> {
    Unknown,
    /// A list has arrived and its items are being returned. A watch follows from its version.
    Listed {
        items: std::vec::IntoIter<K>,
        version: String,
    },
    /// Everything is known up to this version.
    Known {
        version: String,
    },
    Watching(Watch<K>),
}

type Changes<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

struct Watch<K> {
    version: String,
    changes: Changes<K>,
    length: Duration,
    opened: Instant,
    settled: bool,
}

/// The way on after a failed watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    /// The same watch again: the connection failed or the API server is overloaded, which says nothing about the version.
    Watch,
    /// The same watch again, but a list once this has happened often: the version may be unusable.
    Doubt,
    /// The version is too old (410 Gone): only a new list helps.
    List,
}

impl Remedy {
    fn of(status: &Status) -> Self {
        match status.code {
            410 => Self::List,
            // With code 504.
            _ if status.message.contains(NOT_REACHED) => Self::Doubt,
            429 | 500.. => Self::Watch,
            _ => Self::Doubt,
        }
    }
}

/// A failed request or watch.
struct FollowError {
    reason: String,
    remedy: Remedy,
    retry_after: Option<Duration>,
}

impl FollowError {
    /// The error as an event of an open watch. The API server is not overloaded then, and an object that it cannot
    /// decode comes again with each watch from this version.
    fn of_event(error: kube::Error) -> Self {
        let error = Self::from(error);
        let remedy = if error.remedy == Remedy::Watch { Remedy::Doubt } else { error.remedy };
        Self { remedy, ..error }
    }
}

/// An error that says nothing about the version of a watch, such as no answer in time.
impl From<String> for FollowError {
    fn from(reason: String) -> Self {
        Self { reason, remedy: Remedy::Watch, retry_after: None }
    }
}

impl From<kube::Error> for FollowError {
    fn from(error: kube::Error) -> Self {
        let reason = reason(&error);
        let status = match error {
            kube::Error::Api(status) => status,
            // An answer or an event that cannot be read.
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => {
                return Self { reason, remedy: Remedy::Doubt, retry_after: None };
            }
            _ => return Self { reason, remedy: Remedy::Watch, retry_after: None },
        };
        let remedy = Remedy::of(&status);
        let seconds = status.details.map_or(0, |details| details.retry_after_seconds);
        let retry_after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
        Self { reason, remedy, retry_after }
    }
}

impl<K, R> Follower<K, R>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    R: FnMut(Signal<'_>) + Send,
{
    async fn next(&mut self) -> Event<K> {
        loop {
            // A failed list leaves `Unknown`. `lost` sets the state itself.
            match std::mem::replace(&mut self.state, State::Unknown) {
                State::Unknown => match self.list().await {
                    Ok((items, version)) => {
                        self.heard = Instant::now();
                        self.listed = Some(self.heard);
                        self.state = State::Listed { items: items.into_iter(), version };
                        return Event::Init;
                    }
                    Err(error) => self.pause(error, false).await,
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
                    Ok((changes, length)) => {
                        let (opened, settled) = (Instant::now(), false);
                        self.state = State::Watching(Watch { version, changes, length, opened, settled });
                    }
                    Err(error) => self.lost(version, error).await,
                },
                State::Watching(watch) => {
                    if let Some(event) = self.watch(watch).await {
                        return event;
                    }
                }
            }
        }
    }

    /// Waits for one change, or for the watch to settle or end.
    async fn watch(&mut self, mut watch: Watch<K>) -> Option<Event<K>> {
        let open = watch.opened.elapsed();
        let patience =
            if watch.settled { watch.length + END_GRACE } else { self.settings.settled.saturating_sub(open) };
        let error = match timeout(patience, watch.changes.next()).await {
            Ok(Some(Ok(WatchEvent::Error(status)))) => FollowError::of_event(kube::Error::Api(status)),
            Ok(Some(Ok(change))) => {
                self.heard = Instant::now();
                self.settle(&mut watch);
                let event = match change {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        watch.version = object.resource_version().unwrap_or(watch.version);
                        Some(Event::Apply(object))
                    }
                    WatchEvent::Deleted(object) => {
                        watch.version = object.resource_version().unwrap_or(watch.version);
                        Some(Event::Delete(object))
                    }
                    WatchEvent::Bookmark(bookmark) => {
                        watch.version = bookmark.metadata.resource_version;
                        None
                    }
                    WatchEvent::Error(_) => None,
                };
                self.state = State::Watching(watch);
                return event;
            }
            Ok(Some(Err(error))) => error.into(),
            // The normal end of a watch.
            Ok(None) if watch.settled || watch.opened.elapsed() >= self.settings.settled => {
                self.state =
                    if self.is_deaf() { State::Unknown } else { State::Known { version: watch.version } };
                return None;
            }
            // If every watch ends like this, only lists show changes.
            Ok(None) => {
                let reason = "the watch ended immediately".to_owned();
                FollowError { reason, remedy: Remedy::Doubt, retry_after: None }
            }
            Err(_) if watch.settled => {
                format!("the watch has been silent for {} s", patience.as_secs()).into()
            }
            // A watch of a quiet object is silent.
            Err(_) => {
                self.settle(&mut watch);
                self.state = State::Watching(watch);
                return None;
            }
        };
        self.lost(watch.version, error).await;
        None
    }

    fn settle(&mut self, watch: &mut Watch<K>) {
        if !std::mem::replace(&mut watch.settled, true) {
            (self.failures, self.doubts) = (0, 0);
            self.backoff.reset();
            (self.report)(Signal::Works);
        }
    }

    async fn list(&mut self) -> Result<(Vec<K>, String), FollowError> {
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
        let (api, mut items) = (self.api.clone(), Vec::new());
        loop {
            let page = self.request(api.list(&params)).await?;
            items.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => {
                    params.continue_token = Some(token);
                    // The continue token includes the version.
                    (params.resource_version, params.version_match) = (None, None);
                }
                None => {
                    let version = page.metadata.resource_version.filter(|version| !version.is_empty());
                    let version = version.ok_or_else(|| "the list has no resourceVersion".to_owned())?;
                    return Ok((items, version));
                }
            }
        }
    }

    async fn open(&mut self, version: &str) -> Result<(Changes<K>, Duration), FollowError> {
        let random = || rand::random_range(self.settings.watch_seconds.clone());
        let seconds = self.config.timeout.unwrap_or_else(random);
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: self.config.bookmarks,
            send_initial_events: false,
        };
        let api = self.api.clone();
        let changes = self.request(api.watch(&params, version)).await?;
        Ok((changes.boxed(), Duration::from_secs(seconds.into())))
    }

    async fn request<T>(&mut self, request: impl Future<Output = kube::Result<T>>) -> Result<T, FollowError> {
        let mut request = std::pin::pin!(request);
        let mut left = self.settings.deadline;
        if let Some(slow) = self.settings.slow {
            if let Ok(answer) = timeout(slow, &mut request).await {
                return Ok(answer?);
            }
            (self.report)(Signal::Slow {
                reason: &format!("no answer for {} s; still waiting", slow.as_secs()),
            });
            left = left.saturating_sub(slow);
        }
        match timeout(left, request).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(format!("no answer within {} s", self.settings.deadline.as_secs()).into()),
        }
    }

    fn is_deaf(&self) -> bool {
        self.heard.elapsed() >= self.settings.deaf_after
    }

    /// Handles a lost watch. The version stays known unless the API server has forgotten it, or may not know it.
    async fn lost(&mut self, version: String, error: FollowError) {
        let old = self.listed.is_none_or(|listed| listed.elapsed() >= self.settings.relist_every);
        let doubt = error.remedy == Remedy::Doubt;
        let doubted = doubt && self.doubts >= self.settings.relist_after && old;
        let fails = self.failures > 0 && self.failing.elapsed() >= WITHOUT_WATCH;
        let without_watch = old && fails && self.heard.elapsed() >= WITHOUT_WATCH;
        let list = error.remedy == Remedy::List || self.is_deaf() || doubted || without_watch;
        self.doubts = self.doubts.saturating_add(u32::from(doubt));
        self.state = if list { State::Unknown } else { State::Known { version } };
        self.pause(error, self.failures == 0).await;
    }

    async fn pause(&mut self, error: FollowError, passing: bool) {
        (self.report)(Signal::Failed { reason: &error.reason, passing });
        if self.failures == 0 {
            self.failing = Instant::now();
        }
        self.failures = self.failures.saturating_add(1);
        let retry_after = error.retry_after.unwrap_or_default().min(self.settings.longest_retry_after);
        // Adds jitter, because other clients got the same Retry-After.
        sleep(retry_after + self.backoff.next_delay()).await;
    }
}

#[cfg(test)]
mod tests;

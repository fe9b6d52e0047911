//! Rate of requests while lists or watches fail, on a paused clock.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use k8s_openapi::api::core::v1::Service;
use kube::Client;
use kube::client::Body;
use tower::util::MapResponse;

use super::*;
use crate::client::keep_retry_after;

type ApiResponse = Response<UnsyncBoxBody<Bytes, Infallible>>;

fn answer(code: u16, body: &str) -> ApiResponse {
    Response::builder().status(code).body(Full::from(body.to_owned()).boxed_unsync()).unwrap()
}

fn failure(code: u16) -> ApiResponse {
    failure_with(code, "services is forbidden: cannot watch")
}

fn failure_with(code: u16, message: &str) -> ApiResponse {
    answer(
        code,
        &format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"R","code":{code}}}"#
        ),
    )
}

/// A watch that sends this text and then stays open for an agent's full length.
fn standing(text: &str) -> ApiResponse {
    standing_for(text, *FollowSettings::AGENT.watch_seconds.start())
}

fn standing_for(text: &str, seconds: u32) -> ApiResponse {
    let text = Some(text).filter(|text| !text.is_empty()).map(|text| Bytes::from(format!("{text}\n")));
    let end = Duration::from_secs(seconds.into());
    let silence = stream::once(sleep(end)).filter_map(|()| std::future::ready(None));
    let frames = stream::iter(text.map(|text| Ok(Frame::data(text)))).chain(silence);
    Response::new(StreamBody::new(frames).boxed_unsync())
}

const MODIFIED: &str = r#"{"type":"MODIFIED","object":{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","resourceVersion":"6"}}}"#;
const BOOKMARK: &str =
    r#"{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Service","metadata":{"resourceVersion":"7"}}}"#;
const GONE: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old","reason":"Expired","code":410}}"#;
const UNDECODABLE: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"unable to decode","reason":"InternalError","code":500}}"#;

/// Times at which lists and watches were requested.
#[derive(Clone, Default)]
struct Requests(Arc<Mutex<(Vec<Instant>, Vec<Instant>)>>);

impl Requests {
    fn lists(&self) -> Vec<Instant> {
        self.0.lock().unwrap().0.clone()
    }

    fn watches(&self) -> Vec<Instant> {
        self.0.lock().unwrap().1.clone()
    }
}

/// An API server whose lists always work, and whose n-th watch is answered by `watch(n)`.
fn server(watch: impl Fn(usize) -> ApiResponse + Send + 'static) -> (Client, Requests) {
    unsteady_server(move |number| Ok(watch(number)))
}

/// The same, but the connection of a watch may fail.
fn unsteady_server(watch: impl Fn(usize) -> io::Result<ApiResponse> + Send + 'static) -> (Client, Requests) {
    let requests = Requests::default();
    let noted = requests.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let mut noted = noted.0.lock().unwrap();
        let answer = if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
            noted.1.push(Instant::now());
            watch(noted.1.len())
        } else {
            noted.0.push(Instant::now());
            let list = r#"{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[{"metadata":{"name":"a"}}]}"#;
            Ok(answer(200, list))
        };
        std::future::ready(answer)
    });
    (Client::new(MapResponse::new(service, keep_retry_after), "default"), requests)
}

/// Everything that an agent saw.
#[derive(Default)]
struct Seen {
    /// Reasons, each with its `passing`.
    failures: Vec<(String, bool)>,
    /// Times of [`Signal::Works`].
    works: Vec<Instant>,
    /// Times of changes.
    changes: Vec<Instant>,
}

async fn follow_for_an_hour(client: Client) -> Seen {
    follow_so_for_an_hour(FollowSettings::AGENT, client).await
}

/// Follows for an hour of the paused clock, which advances only while all tasks are idle.
async fn follow_so_for_an_hour(settings: FollowSettings, client: Client) -> Seen {
    let api = Api::<Service>::default_namespaced(client);
    let (mut failures, mut works, mut changes) = (Vec::new(), Vec::new(), Vec::new());
    let report = |signal: Signal<'_>| match signal {
        Signal::Failed { reason, passing } => failures.push((reason.to_owned(), passing)),
        Signal::Works => works.push(Instant::now()),
        Signal::Slow { .. } => panic!("nothing is slow"),
    };
    let end = Instant::now() + Duration::from_secs(3600);
    {
        let events = follow(api, Config::default(), settings, report);
        let mut events = std::pin::pin!(events);
        while let Ok(Some(event)) = tokio::time::timeout_at(end, events.next()).await {
            if matches!(event, Event::Apply(_)) {
                changes.push(Instant::now());
            }
        }
    }
    Seen { failures, works, changes }
}

#[tokio::test(start_paused = true)]
async fn requests_stay_rare_where_lists_work_and_watches_fail() {
    type Watch = fn(usize) -> ApiResponse;
    let broken: [(&str, Watch); 5] = [
        ("cannot watch", |_| failure(403)),
        // A proxy that cuts streams.
        ("ended immediately", |_| answer(200, "")),
        ("too old", |_| standing(GONE)),
        ("unable to decode", |_| standing(UNDECODABLE)),
        ("Too large resource version", |_| {
            failure_with(504, "Timeout: Too large resource version: 9, current: 5")
        }),
    ];
    for (reason, watch) in broken {
        let (client, requests) = server(watch);
        let seen = follow_for_an_hour(client).await;
        let (lists, watches) = (requests.lists().len(), requests.watches().len());
        // One or two a minute after the first few.
        assert!((60..=140).contains(&watches), "{reason}: {watches} watches");
        // Lists still show changes. After 410 every attempt needs a list.
        let expected = if reason == "too old" { watches..=watches + 1 } else { 9..=14 };
        assert!(expected.contains(&lists), "{reason}: {lists} lists");
        assert!(seen.failures.iter().all(|(text, _)| text.contains(reason)), "{:?}", seen.failures);
        assert_eq!(seen.failures.iter().filter(|(_, passing)| *passing).count(), 1, "only the first");
        assert_eq!(seen.works, [], "a list is no watch");
        let pauses: Vec<_> = requests.watches().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses[10..].iter().all(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
    }
}

/// Ten thousand clients that list would add to an overload, and the version is as good as before.
#[tokio::test(start_paused = true)]
async fn neither_an_overload_nor_a_failed_connection_soon_leads_to_a_list() {
    type Watch = fn() -> io::Result<ApiResponse>;
    let broken: [Watch; 5] = [
        || Err(io::ErrorKind::ConnectionRefused.into()),
        || Ok(failure(429)),
        || Ok(failure(500)),
        || Ok(failure(503)),
        || Ok(failure(504)),
    ];
    for (index, watch) in broken.into_iter().enumerate() {
        let (client, requests) = unsteady_server(move |_| watch());
        let seen = follow_for_an_hour(client).await;
        let (lists, failed) = (requests.lists().len(), seen.failures.len());
        // One in ten minutes, as a proxy may let no watch pass.
        assert!((5..=7).contains(&lists) && failed >= 60, "case {index}: {lists} lists, {failed} failures");
        let pauses: Vec<_> = requests.lists().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.iter().all(|pause| *pause >= WITHOUT_WATCH), "{pauses:?}");
        // A server lists sooner: at the fourth failure that counts.
        let (client, requests) = unsteady_server(move |number| match number {
            1..=12 => watch(),
            _ => Ok(standing_for(BOOKMARK, 50)),
        });
        follow_so_for_an_hour(FollowSettings::SERVER, client).await;
        assert_eq!(requests.lists().len(), 1, "case {index}");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_that_count_lead_to_a_list_whatever_fails_between_them() {
    let (client, requests) = server(|number| match (number, number % 2) {
        (1..=8, 0) => failure(403),
        (1..=8, _) => failure(503),
        _ => standing_for(BOOKMARK, 50),
    });
    follow_so_for_an_hour(FollowSettings::SERVER, client).await;
    let (lists, watches) = (requests.lists(), requests.watches());
    assert_eq!(lists.len(), 2, "{lists:?}");
    assert!((watches[7]..=watches[8]).contains(&lists[1]), "{lists:?} {watches:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_works_once_it_stands_a_minute_or_sends_something() {
    for (text, after) in [("", FollowSettings::AGENT.settled), (MODIFIED, Duration::ZERO)] {
        let (client, requests) = server(move |number| match number {
            1..=5 => failure(500),
            _ => standing(text),
        });
        let begin = Instant::now();
        let seen = follow_for_an_hour(client).await;
        assert_eq!((requests.lists().len(), seen.failures.len()), (1, 5));
        let opened = requests.watches()[5];
        assert_eq!(seen.works[0], opened + after);
        assert_eq!(seen.changes.first(), (text == MODIFIED).then_some(&opened));
        assert!(opened - begin >= Duration::from_secs(5 + 10 + 20 + 30 + 30));
    }
}

#[tokio::test(start_paused = true)]
async fn objects_are_listed_again_if_watches_send_not_even_bookmarks() {
    for (text, lists) in [("", 10..=12), (BOOKMARK, 1..=1)] {
        let (client, requests) = server(move |_| standing_for(text, 50));
        let seen = follow_so_for_an_hour(FollowSettings::SERVER, client).await;
        assert!(lists.contains(&requests.lists().len()), "{text}: {:?}", requests.lists());
        assert!(seen.failures.is_empty() && requests.watches().len() >= 70, "{:?}", seen.failures);
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_respected_and_nothing_is_listed_again() {
    let (client, requests) = server(|number| match number {
        1..=2 => Response::builder()
            .status(429)
            .header("retry-after", "120")
            .body(Full::from("Too many requests, please try again later.\n").boxed_unsync())
            .unwrap(),
        _ => standing(""),
    });
    let seen = follow_for_an_hour(client).await;
    let watches = requests.watches();
    assert_eq!((seen.failures.len(), requests.lists().len()), (2, 1));
    for pair in watches[..3].windows(2) {
        assert!(pair[1] - pair[0] >= Duration::from_secs(120));
    }
    assert!(seen.failures.iter().all(|(reason, _)| reason.contains("asks to wait for 120 s")));
}

use std::convert::Infallible;
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
use crate::kube::client::keep_retry_after;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

fn answer(code: u16, body: &str) -> Answer {
    Response::builder().status(code).body(Full::from(body.to_owned()).boxed_unsync()).unwrap()
}

fn failure(code: u16) -> Answer {
    let message = "services is forbidden: cannot watch";
    answer(
        code,
        &format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"R","code":{code}}}"#
        ),
    )
}

/// A watch that tells this and then stays open.
fn standing(text: &str) -> Answer {
    let text = Some(text).filter(|text| !text.is_empty()).map(|text| Bytes::from(format!("{text}\n")));
    let frames = stream::iter(text.map(|text| Ok(Frame::data(text)))).chain(stream::pending());
    Response::new(StreamBody::new(frames).boxed_unsync())
}

const MODIFIED: &str = r#"{"type":"MODIFIED","object":{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","resourceVersion":"6"}}}"#;
const GONE: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old","reason":"Expired","code":410}}"#;

/// When the lists and the watches were asked for.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<(Vec<Instant>, Vec<Instant>)>>);

impl Asked {
    fn lists(&self) -> Vec<Instant> {
        self.0.lock().unwrap().0.clone()
    }

    fn watches(&self) -> Vec<Instant> {
        self.0.lock().unwrap().1.clone()
    }
}

/// An API server whose lists always work, and whose n-th watch is what `watch` says.
fn server(watch: impl Fn(usize) -> Answer + Send + 'static) -> (Client, Asked) {
    let asked = Asked::default();
    let noted = asked.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let mut noted = noted.0.lock().unwrap();
        let answer = if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
            noted.1.push(Instant::now());
            watch(noted.1.len())
        } else {
            noted.0.push(Instant::now());
            let list = r#"{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[{"metadata":{"name":"a"}}]}"#;
            answer(200, list)
        };
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    (Client::new(MapResponse::new(service, keep_retry_after), "default"), asked)
}

/// What is told until `time` of the clock, which only runs while nothing else does, is over.
async fn told(client: Client, time: Duration) -> Vec<News<Service>> {
    let api = move || std::future::ready(Ok(Api::<Service>::default_namespaced(client.clone())));
    let mut news = std::pin::pin!(follow(api, Which::default()));
    let end = Instant::now() + time;
    let mut told = Vec::new();
    while let Ok(Some(one)) = tokio::time::timeout_at(end, news.next()).await {
        told.push(one);
    }
    told
}

fn failures(told: &[News<Service>]) -> Vec<(&str, bool)> {
    let failed = |news| match news {
        &News::Failed { ref reason, passing } => Some((reason.as_str(), passing)),
        _ => None,
    };
    told.iter().filter_map(failed).collect()
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn where_lists_work_and_watches_fail_nobody_asks_without_end() {
    type Watch = fn(usize) -> Answer;
    let broken: [(&str, Watch); 3] = [
        ("cannot watch", |_| failure(403)),
        // A proxy that cuts streams.
        ("ended at once", |_| answer(200, "")),
        ("too old", |_| standing(GONE)),
    ];
    for (reason, watch) in broken {
        let (client, asked) = server(watch);
        let told = told(client, HOUR).await;
        let (lists, watches) = (asked.lists().len(), asked.watches().len());
        // Each minute one or two, after the first few.
        assert!((60..=140).contains(&watches), "{reason}: {watches} watches");
        // Changes are seen even so; and 410 leaves nothing but a list.
        let expected = if reason == "too old" { watches..=watches + 1 } else { 9..=14 };
        assert!(expected.contains(&lists), "{reason}: {lists} lists");
        let failures = failures(&told);
        assert!(failures.iter().all(|(text, _)| text.contains(reason)), "{failures:?}");
        assert_eq!(failures.iter().filter(|(_, passing)| *passing).count(), 1, "only the first may pass");
        assert!(!told.iter().any(|news| matches!(news, News::Works)), "a list is no watch");
        let pauses: Vec<_> = asked.watches().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses[10..].iter().all(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_stands_a_minute_or_tells_something_makes_good() {
    for (text, after) in [("", SETTLED), (MODIFIED, Duration::ZERO)] {
        let (client, asked) = server(move |number| match number {
            1..=5 => failure(500),
            6 => standing(text),
            _ => panic!("one watch stands"),
        });
        let begin = Instant::now();
        let told = told(client, HOUR).await;
        assert_eq!((asked.lists().len(), failures(&told).len()), (1, 5));
        let opened = *asked.watches().last().unwrap();
        match told.last() {
            Some(News::Works) => assert_eq!(after, SETTLED),
            Some(News::Event(Event::Apply(_))) => assert_eq!(after, Duration::ZERO),
            other => panic!("{other:?}"),
        }
        assert!(opened - begin >= Duration::from_millis(250 + 500 + 1000 + 2000 + 4000));
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_that_is_asked_for_is_kept_and_nothing_is_listed_again() {
    let (client, asked) = server(|number| match number {
        1..=2 => Response::builder()
            .status(429)
            .header("retry-after", "120")
            .body(Full::from("Too many requests, please try again later.\n").boxed_unsync())
            .unwrap(),
        _ => standing(""),
    });
    let told = told(client, HOUR).await;
    let watches = asked.watches();
    assert_eq!((watches.len(), asked.lists().len()), (3, 1));
    for pair in watches.windows(2) {
        assert!(pair[1] - pair[0] >= Duration::from_secs(120));
    }
    assert!(failures(&told).iter().all(|(reason, _)| reason.contains("asks to wait for 120 s")));
}

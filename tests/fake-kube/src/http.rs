//! The API's verbs over HTTP.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::patch::merge;
use super::store::{Change, Collection};
use super::{Fault, Order, Shared};

/// The body of an answer.
pub type Answer = UnsyncBoxBody<Bytes, io::Error>;

pub(super) async fn serve(stream: TcpStream, shared: Arc<Shared>, stop: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request: Request<Incoming>| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(request, &shared).await) }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        _ = connection => {}
        () = stop.cancelled() => {}
    }
}

pub(super) async fn answer<B: Body<Data = Bytes>>(
    request: Request<B>,
    shared: &Arc<Shared>,
) -> Response<Answer> {
    let path = request.uri().path().to_owned();
    let Some((collection, rest)) = Collection::split(&path) else {
        return status(404, "NotFound", &format!("no resource at {path}"));
    };
    let query: HashMap<String, String> = query(request.uri().query().unwrap_or_default());
    let verb = match (request.method(), rest.is_empty()) {
        (&Method::GET, true) if query.get("watch").is_some_and(|value| value != "false") => "watch",
        (&Method::GET, true) if query.contains_key("continue") => "continue",
        (&Method::GET, true) => "list",
        (&Method::GET, false) => "get",
        (&Method::POST, _) => "create",
        (&Method::PUT, _) => "update",
        (&Method::PATCH, _) => "patch",
        (&Method::DELETE, _) => "delete",
        _ => return status(405, "MethodNotAllowed", "no such verb"),
    };
    *shared.requests.lock().unwrap().entry((verb.to_owned(), path.clone())).or_default() += 1;
    let fault = fault(shared, verb, &collection.resource, rest.first().copied());
    match fault {
        Some(Fault::Status(code)) => return status(code, "Injected", "injected"),
        Some(Fault::FutureVersion) => {
            return status(504, "Timeout", "Timeout: Too large resource version: 1000000, current: 1");
        }
        Some(Fault::TooManyRequests { retry_after }) => {
            let text = Full::from("Too many requests, please try again later.\n");
            return Response::builder()
                .status(429)
                .header("retry-after", retry_after)
                .header("content-type", "text/plain")
                .body(text.map_err(never).boxed_unsync())
                .unwrap();
        }
        Some(Fault::Delay(time)) => tokio::time::sleep(time).await,
        Some(Fault::Together(ref others)) => {
            others.wait().await;
        }
        _ => {}
    }
    if verb == "watch" {
        return match fault {
            Some(Fault::GoneEvent) => lines(vec![Ok(gone())]),
            Some(Fault::CloseAtOnce) => lines(Vec::new()),
            Some(Fault::Truncate) => {
                lines(vec![Ok(Bytes::from_static(b"{\"type\":\"ADDED\",\"obj")), broken()])
            }
            _ => watch(path, collection, &query, shared.clone()),
        };
    }
    let content_type =
        request.headers().get("content-type").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let Ok(body) = request.into_body().collect().await else {
        return status(400, "BadRequest", "no body");
    };
    let body = body.to_bytes();
    let body: Value = if body.is_empty() {
        Value::Null
    } else {
        match serde_json::from_slice(&body) {
            Ok(body) => body,
            Err(error) => return status(400, "BadRequest", &error.to_string()),
        }
    };
    let review = shared.reviews.lock().unwrap().get(&collection.resource).cloned();
    if let (Some(review), "create") = (review, verb) {
        return json_response(201, &review(&body));
    }
    let outcome = match verb {
        "list" | "continue" => Ok(list(&collection, &query, shared)),
        _ => object(verb, &collection, &rest, &query, body, &content_type, shared),
    };
    match (outcome, fault) {
        (Ok(value), Some(Fault::Truncate)) => {
            let text = value.to_string();
            lines(vec![Ok(Bytes::from(text[..text.len() / 2].to_owned())), broken()])
        }
        (Ok(value), _) => json_response(if verb == "create" { 201 } else { 200 }, &value),
        (Err((code, reason, message)), _) => status(code, reason, &message),
    }
}

fn fault(shared: &Shared, verb: &str, resource: &str, object: Option<&str>) -> Option<Fault> {
    let mut rules = shared.rules.lock().unwrap();
    let matches = |pattern: &str, text: &str| pattern == "*" || pattern == text;
    let at = rules.iter().position(|rule| {
        matches(rule.verb, verb)
            && matches(rule.resource, resource)
            && rule.object.is_none_or(|name| object == Some(name))
    })?;
    let fault = rules[at].fault.clone();
    rules[at].times -= 1;
    if rules[at].times == 0 {
        rules.remove(at);
    }
    Some(fault)
}

type ApiError = (u16, &'static str, String);

fn object(
    verb: &str,
    collection: &Collection,
    rest: &[&str],
    query: &HashMap<String, String>,
    body: Value,
    content_type: &str,
    shared: &Shared,
) -> Result<Value, ApiError> {
    let subresource = match rest {
        [] | [_] => false,
        // An approval is a part of the status.
        [_, "status" | "approval"] => true,
        _ => return Err((404, "NotFound", format!("no such subresource: {rest:?}"))),
    };
    shared.change(|store| {
        if verb == "create" {
            let mut body = body;
            if body["metadata"]["name"].is_null() {
                let prefix = body["metadata"]["generateName"].as_str().unwrap_or_default().to_owned();
                if prefix.is_empty() {
                    return Err((422, "Invalid", "name or generateName is required".to_owned()));
                }
                body["metadata"]["name"] = json!(format!("{prefix}{:05}", store.version() + 1));
            }
            let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            if store.get(collection, &name).is_some() {
                let message = format!("{} {name:?} already exists", collection.resource);
                return Err((409, "AlreadyExists", message));
            }
            if collection.resource == "certificatesigningrequests" {
                body["status"] = json!({});
            }
            return Ok(store.put(collection, body));
        }
        let name = rest.first().copied().unwrap_or_default();
        let known = store.get(collection, name);
        let applied = verb == "patch" && content_type.starts_with("application/apply-patch");
        let manager = query.get("fieldManager").map(String::as_str).unwrap_or_default();
        if applied && manager.is_empty() {
            return Err((
                422,
                "Invalid",
                "fieldManager: Required value: is required for apply patch".to_owned(),
            ));
        }
        let Some(known) = known
            .or_else(|| (applied && !subresource).then(|| Arc::new(json!({"metadata": {"name": name}}))))
        else {
            return Err((404, "NotFound", format!("{} {name:?} not found", collection.resource)));
        };
        let conflict = |wanted: &Value, is: &Value| {
            let asked = !wanted.is_null() && !is.is_null() && wanted != is;
            let message = format!(
                "Operation cannot be fulfilled on {} {name:?}: the object has been modified",
                collection.resource
            );
            if asked { Err((409, "Conflict", message)) } else { Ok(()) }
        };
        match verb {
            "get" => Ok(known.as_ref().clone()),
            "delete" => {
                for field in ["uid", "resourceVersion"] {
                    conflict(&body["preconditions"][field], &known["metadata"][field])?;
                }
                Ok(store.remove(collection, name).unwrap_or_default())
            }
            _ => {
                conflict(&body["metadata"]["resourceVersion"], &known["metadata"]["resourceVersion"])?;
                let forced = query.get("force").is_some_and(|value| value == "true");
                if applied
                    && !forced
                    && let Some(field) = store.applied.conflict(manager, &known, &body)
                {
                    let message = format!("Apply failed with 1 conflict: another manager owns {field}");
                    return Err((409, "Conflict", message));
                }
                let mut next = known.as_ref().clone();
                if verb == "update" {
                    next = body.clone();
                } else {
                    merge(&mut next, &body, content_type.starts_with("application/strategic"));
                }
                // An update of the object leaves the status alone, and one of the status everything else.
                if subresource {
                    let status = next["status"].take();
                    next = known.as_ref().clone();
                    next["status"] = status;
                } else if !known["status"].is_null() {
                    next["status"] = known["status"].clone();
                }
                next["metadata"]["name"] = json!(name);
                let stored = store.put(collection, next);
                if applied {
                    store.applied.record(manager, &stored, &body);
                }
                Ok(stored)
            }
        }
    })
}

fn list(collection: &Collection, query: &HashMap<String, String>, shared: &Shared) -> Value {
    let store = shared.store();
    let filter = Filter::new(query);
    let limit: usize = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    // The first page's version: a watch from there replays what changed while the pages were read.
    let (version, after) = match query.get("continue").and_then(|token| token.split_once('|')) {
        Some((version, after)) => (version.to_owned(), after.to_owned()),
        None => (store.version().to_string(), String::new()),
    };
    let mut matching = store
        .list(collection)
        .filter(|(key, object)| key.token() > after && filter.matches(object))
        .map(|(key, object)| (key.token(), object.as_ref().clone()));
    let page: Vec<_> = matching.by_ref().take(limit).collect();
    let mut metadata = json!({"resourceVersion": version});
    if matching.next().is_some()
        && let Some((last, _)) = page.last()
    {
        metadata["continue"] = json!(format!("{version}|{last}"));
    }
    let items: Vec<Value> = page.into_iter().map(|(_, object)| object).collect();
    json!({
        "kind": format!("{}List", collection.kind()),
        "apiVersion": collection.api_version(),
        "metadata": metadata,
        "items": items,
    })
}

struct Filter {
    /// A label, and the values that it may have.
    labels: Option<(String, Vec<String>)>,
    fields: Vec<(String, bool, String)>,
}

impl Filter {
    fn new(query: &HashMap<String, String>) -> Self {
        let labels = query.get("labelSelector").filter(|text| !text.is_empty());
        let fields = query.get("fieldSelector").map(String::as_str).unwrap_or_default();
        let field = |text: &str| {
            let (key, value) = text.split_once('=').expect("a field selector");
            let pointer = format!("/{}", key.trim_end_matches('!').replace('.', "/"));
            (pointer, !key.ends_with('!'), value.trim_start_matches('=').to_owned())
        };
        Self {
            labels: labels.map(|text| label_selector(text).expect("KEY=VALUE or KEY in (VALUES)")),
            fields: fields.split(',').filter(|text| !text.is_empty()).map(field).collect(),
        }
    }

    fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| object["metadata"]["labels"][key].as_str().map(str::to_owned);
        self.labels.as_ref().is_none_or(|(key, values)| label(key).is_some_and(|is| values.contains(&is)))
            && self.fields.iter().all(|(pointer, equal, value)| {
                let is = object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
                (is == value) == *equal
            })
    }

    /// The event that a watch with this filter sees.
    fn event(&self, change: &Change) -> Option<Bytes> {
        let before = change.before.as_ref().is_some_and(|object| self.matches(object));
        let now = !change.deleted && self.matches(&change.object);
        let kind = match (before, now) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return None,
        };
        // As text, so that `type` comes first: that is how API servers write it.
        Some(Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{}}}\n", change.object)))
    }
}

/// Parses the two forms that are used here.
fn label_selector(text: &str) -> Option<(String, Vec<String>)> {
    if let Some((key, values)) = text.split_once(" in (") {
        let values = values.strip_suffix(')')?.split(',').map(|value| value.trim().to_owned());
        return Some((key.to_owned(), values.collect()));
    }
    let (key, value) = text.split_once('=')?;
    Some((key.to_owned(), vec![value.to_owned()]))
}

fn watch(
    path: String,
    collection: Collection,
    query: &HashMap<String, String>,
    shared: Arc<Shared>,
) -> Response<Answer> {
    let filter = Filter::new(query);
    let bookmarks = query.get("allowWatchBookmarks").is_some_and(|value| value == "true");
    let timeout = query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1800);
    let from = query.get("resourceVersion").and_then(|text| text.parse().ok());
    let (lines, received) = mpsc::channel(64);
    // Counted until its task ends, which is when the client has gone or the watch has ended.
    struct Open(Arc<Shared>, String);
    impl Drop for Open {
        fn drop(&mut self) {
            *self.0.open_watches.lock().unwrap().entry(self.1.clone()).or_default() -= 1;
        }
    }
    let mut orders = shared.orders.subscribe();
    let mut seen = orders.borrow_and_update().0;
    *shared.open_watches.lock().unwrap().entry(path.clone()).or_default() += 1;
    let open = Open(shared.clone(), path);
    tokio::spawn(async move {
        let _open = open;
        let deadline = tokio::time::sleep(Duration::from_secs(timeout));
        tokio::pin!(deadline);
        let mut versions = shared.version.subscribe();
        let mut at: u64 = from.unwrap_or_else(|| *versions.borrow_and_update());
        let bookmark = |at: u64| {
            let object = json!({"kind": collection.kind(), "apiVersion": collection.api_version(),
                "metadata": {"resourceVersion": at.to_string()}});
            Bytes::from(format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n"))
        };
        loop {
            // Orders first: a change that was made after an order is not sent before it.
            let (number, order) = *orders.borrow_and_update();
            if number != seen {
                seen = number;
                match order {
                    Order::Run => {}
                    Order::End => return,
                    Order::Gone => return drop(lines.send(Ok(gone())).await),
                    Order::Cut => {
                        let half = Bytes::from_static(b"{\"type\":\"MODIFIED\",\"object\":{\"meta");
                        let _ = lines.send(Ok(half)).await;
                        return drop(lines.send(broken()).await);
                    }
                    Order::Freeze => return lines.closed().await,
                }
            }
            let version = *versions.borrow_and_update();
            let Some(changes) = shared.store().since(at, &collection) else {
                let _ = lines.send(Ok(gone())).await;
                return;
            };
            for change in changes {
                at = change.version;
                if let Some(line) = filter.event(&change)
                    && lines.send(Ok(line)).await.is_err()
                {
                    return;
                }
            }
            at = at.max(version);
            tokio::select! {
                _ = versions.changed() => {}
                () = lines.closed() => return,
                () = &mut deadline => {
                    if bookmarks {
                        let _ = lines.send(Ok(bookmark(at))).await;
                    }
                    return;
                }
                _ = orders.changed() => {}
            }
        }
    });
    let frames = stream::unfold(received, |mut received| async move {
        let line: Result<Bytes, io::Error> = received.recv().await?;
        Some((line.map(Frame::data), received))
    });
    Response::builder()
        .header("content-type", "application/json")
        .body(StreamBody::new(frames).boxed_unsync())
        .unwrap()
}

fn gone() -> Bytes {
    let status = status_object(410, "Expired", "too old resource version");
    Bytes::from(format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n"))
}

fn broken() -> Result<Bytes, io::Error> {
    Err(io::Error::other("injected"))
}

fn never(error: Infallible) -> io::Error {
    match error {}
}

fn lines(lines: Vec<Result<Bytes, io::Error>>) -> Response<Answer> {
    let frames = stream::iter(lines).map(|line| line.map(Frame::data));
    Response::builder()
        .header("content-type", "application/json")
        .body(StreamBody::new(frames).boxed_unsync())
        .unwrap()
}

fn status_object(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code})
}

fn status(code: u16, reason: &str, message: &str) -> Response<Answer> {
    json_response(code, &status_object(code, reason, message))
}

fn json_response(code: u16, value: &Value) -> Response<Answer> {
    let body = Full::from(value.to_string()).map_err(never).boxed_unsync();
    Response::builder().status(code).header("content-type", "application/json").body(body).unwrap()
}

fn query(text: &str) -> HashMap<String, String> {
    text.split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (decode(key), decode(value)))
        .collect()
}

fn decode(text: &str) -> String {
    let text = text.replace('+', " ");
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'%', [high, low, after @ ..]) => {
                let hex = [*high, *low];
                let hex = std::str::from_utf8(&hex).expect("hexadecimal");
                bytes.push(u8::from_str_radix(hex, 16).expect("hexadecimal"));
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).expect("UTF-8")
}

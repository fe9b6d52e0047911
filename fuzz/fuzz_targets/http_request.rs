//! Requests to an HTTP listener, as far as its own code and hyper go: a target gets what the client sent, in as many
//! requests, whatever the bytes are.
#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_server::listener::{parse_destination, target_head};

/// Method, path and query, and body.
type Seen = Arc<Mutex<Vec<(String, String, Bytes)>>>;

fuzz_target!(|bytes: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(through(bytes));
});

async fn through(bytes: &[u8]) {
    let (sent, arrived) = (Seen::default(), Seen::default());
    let (mut client, listener) = tokio::io::duplex(1 << 20);
    client.write_all(bytes).await.unwrap();
    client.shutdown().await.unwrap();
    let service = service_fn(|request: Request<Incoming>| {
        let (sent, arrived) = (sent.clone(), arrived.clone());
        async move { Ok::<_, Infallible>(forward(request, &sent, &arrived).await) }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.half_close(true).max_buf_size(64 << 10);
    // Most bytes are no requests.
    let _ = builder.serve_connection(TokioIo::new(listener), service).await;
    let mut answers = Vec::new();
    let _ = client.read_to_end(&mut answers).await;
    let (sent, arrived) = (sent.lock().unwrap(), arrived.lock().unwrap());
    assert_eq!(*sent, *arrived, "the target saw other requests than the listener");
}

async fn forward(request: Request<Incoming>, sent: &Seen, arrived: &Seen) -> Response<Empty<Bytes>> {
    let refused = || {
        let mut response = Response::new(Empty::new());
        *response.status_mut() = StatusCode::BAD_REQUEST;
        response
    };
    let (mut head, body) = request.into_parts();
    let Ok(wanted) = parse_destination(&head) else { return refused() };
    assert!(!wanted.host.is_empty() && wanted.port != Some(0));
    let path = path_and_query(&head.uri);
    if head.method == hyper::Method::CONNECT || target_head(&mut head, &wanted.host, None).is_err() {
        return refused();
    }
    assert!(head.headers.keys().all(|name| !name.as_str().starts_with("x-tunnel-proxy-")));
    let Ok(body) = body.collect().await else { return refused() };
    let body = body.to_bytes();
    let method = head.method.to_string();
    let (near, far) = tokio::io::duplex(1 << 20);
    let target = tokio::spawn(target(far, arrived.clone()));
    let exchange = async {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(near)).await.ok()?;
        let driver = tokio::spawn(connection);
        // As in the listener: the body decides the length.
        head.headers.remove(hyper::header::CONTENT_LENGTH);
        let answer = sender.send_request(Request::from_parts(head, Full::new(body.clone()))).await.ok();
        drop(sender);
        let _ = driver.await;
        answer
    };
    if exchange.await.is_some() {
        sent.lock().unwrap().push((method, path, body));
    }
    let _ = target.await;
    Response::new(Empty::new())
}

/// An absolute form without a path has the path "/" (RFC 9112 section 3.2.1), also before a query.
fn path_and_query(uri: &Uri) -> String {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    format!("{}{query}", uri.path())
}

async fn target(stream: tokio::io::DuplexStream, arrived: Seen) {
    let service = service_fn(|request: Request<Incoming>| {
        let arrived = arrived.clone();
        async move {
            let method = request.method().to_string();
            let path = path_and_query(request.uri());
            let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            arrived.lock().unwrap().push((method, path, body));
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

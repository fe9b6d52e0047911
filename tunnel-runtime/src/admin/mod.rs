//! Admin endpoints. They have their own thread and runtime, so that they answer while the data path is busy.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | OpenMetrics 1.0 text, or Prometheus' older format for clients that do not ask for it |
//! | `/healthz`, `/livez` | 200 while the process runs (`/livez` is the name that Kubernetes' own programs use) |
//! | `/readyz` | 200, or 503 and the pending parts |
//! | `/status` | JSON |
//! | `/cluster` | JSON: the status of every server of the cluster, this one's first (server) |
//! | `/connections`, `/connections?node=NODE` | JSON: the current connections |
//! | `/ui/` | a page for browsers that shows the same (server) |
//! | `/config` | JSON: the flags in effect, without secrets |
//! | `POST /bench/NODE` | JSON: measures the path to a node (server) |
//! | `PUT /debug/flags/v` | sets the log level (a name or klog's number), also for single modules |
//! | `/debug/settled`, `/debug/settled?timeout=SECONDS` | 200 once metrics, log, status and maps show what had reached the process, or 503 and the stage that is late |
//!
//! Each is answered only under an IP address or `localhost` as the Host.
//!
//! Through the tunnel (source address [`TUNNELLED`]), only `/metrics` is available.

pub mod client;
mod exposition;
mod page;
mod process;
mod serve;
mod show;
#[cfg(test)]
mod tests;

pub use exposition::exposition;
pub use page::Page;
pub use process::{register_process_metrics, register_tasks};
pub use serve::TUNNELLED;
pub use show::{Show, ShowError};

use std::io;
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio_util::sync::CancellationToken;

use crate::accept::Gate;
use crate::lifecycle::{Readiness, THREADS_END};
use crate::logging;
use crate::net::refine;
use crate::settled::Settling;

/// A level is a word or a number, possibly followed by levels for modules.
const MAX_LEVEL_BYTES: usize = 1024;
/// Time that `/debug/settled` waits unless the request says otherwise, and the longest one, in seconds.
const SETTLE_SECONDS: u64 = 10;
const MAX_SETTLE_SECONDS: u64 = 60;

/// Returns the answer of `/status`.
pub type Status = dyn Fn() -> serde_json::Value + Send + Sync;

/// Converts a report to JSON. If that fails, the result holds the error.
pub fn to_json(report: &impl Serialize) -> serde_json::Value {
    serde_json::to_value(report).unwrap_or_else(|error| serde_json::json!({ "error": error.to_string() }))
}

/// Returns the answer of `/connections`, of one node or of all.
pub type Connections = dyn Fn(Option<&str>) -> serde_json::Value + Send + Sync;

/// Returns the answer of `/cluster`, as JSON.
pub type Cluster = dyn Fn() -> Pin<Box<dyn Future<Output = String> + Send>> + Send + Sync;

/// Answer of `POST /bench/NODE`, or the reason for having none.
pub type BenchAnswer = Pin<Box<dyn Future<Output = Result<serde_json::Value, String>> + Send>>;

/// Measures the path to a node.
pub type Bench = dyn Fn(String) -> BenchAnswer + Send + Sync;

/// State that the endpoints show and change.
#[derive(Clone)]
pub struct Admin {
    pub registry: Arc<Registry>,
    pub readiness: Readiness,
    pub status: Arc<Status>,
    /// Set on a server only.
    pub cluster: Option<Arc<Cluster>>,
    /// `None` if this program does not list its connections.
    pub connections: Option<Arc<Connections>>,
    /// The flags in effect, with secrets masked.
    pub flags: Arc<[String]>,
    /// Set on a server only.
    pub bench: Option<Arc<Bench>>,
    /// Files of the status page, below `/ui/`; on a server only.
    pub pages: &'static [Page],
    pub log: logging::Handle,
    pub settling: Settling,
}

impl Admin {
    /// Answers at the listener, on a new thread, until the returned handle is dropped.
    ///
    /// # Errors
    /// Fails if it is not a listener, or if the thread or its runtime cannot be created.
    pub fn serve(self, listener: TcpListener) -> io::Result<Serving> {
        listener.set_nonblocking(true)?;
        // Its connections inherit it.
        refine("TCP_USER_TIMEOUT", SockRef::from(&listener).set_tcp_user_timeout(Some(serve::READ_TIMEOUT)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, gate) = (CancellationToken::new(), Gate::new(true));
        let entered = runtime.enter();
        let listener = gate.guard(tokio::net::TcpListener::from_std(listener)?);
        drop(entered);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("admin".to_owned()).spawn(move || {
            let tunnelled = self.clone().tunnelled_router();
            let serving = serve::answer(listener, self.router(), tunnelled);
            runtime.block_on(stopped.run_until_cancelled_owned(serving));
            runtime.shutdown_timeout(THREADS_END);
        })?;
        Ok(Serving { stop, gate, thread: Some(thread) })
    }

    fn router(self) -> Router {
        let pages = Router::new();
        let pages = self.pages.iter().fold(pages, |router, page| {
            router.route(page.path, get(move || std::future::ready(page.answer())))
        });
        pages
            .route("/", get(index))
            .route("/ui", get(|| async { page::lead_to("ui/") }))
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthy))
            .route("/livez", get(healthy))
            .route("/readyz", get(readyz))
            .route("/status", get(status))
            .route("/cluster", get(cluster))
            .route("/connections", get(connections))
            .route("/config", get(config))
            .route("/bench/{node}", post(bench))
            .route("/debug/flags/v", any(level))
            .route("/debug/settled", get(settled))
            .layer(from_fn(serve::own_requests))
            .with_state(self)
    }

    /// Scrapers in the cloud may know the port by the node's name, and there is no browser.
    fn tunnelled_router(self) -> Router {
        Router::new().route("/metrics", get(metrics)).with_state(self)
    }
}

/// Running endpoints; dropping the value stops them.
#[derive(Debug)]
pub struct Serving {
    stop: CancellationToken,
    /// While it is closed, connections are left to another process that shares the listener.
    pub gate: Gate,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("admin thread panicked");
        }
    }
}

async fn index(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    if !admin.pages.is_empty() && page::is_browser(&headers) {
        return page::lead_to("ui/");
    }
    let ui = if admin.pages.is_empty() { "" } else { "/ui/\n" };
    let pages = "/metrics\n/healthz\n/livez\n/readyz\n/status\n/connections\n/config\n/debug/flags/v (PUT)\n/debug/settled\n";
    format!("{ui}{pages}").into_response()
}

async fn healthy() -> &'static str {
    "ok\n"
}

async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    match exposition(&admin.registry, &headers) {
        Ok((content_type, text)) => ([(header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("encoding the metrics: {error}\n")).into_response()
        }
    }
}

async fn readyz(State(admin): State<Admin>) -> Response {
    let pending = admin.readiness.names();
    if pending.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("pending: {}\n", pending.join(", "))).into_response()
}

async fn status(State(admin): State<Admin>) -> Response {
    axum::Json((admin.status)()).into_response()
}

async fn cluster(State(admin): State<Admin>) -> Response {
    let Some(cluster) = &admin.cluster else { return StatusCode::NOT_FOUND.into_response() };
    ([(header::CONTENT_TYPE, "application/json")], cluster().await).into_response()
}

/// Query parameters of `/connections`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConnectionsQuery {
    node: Option<String>,
}

async fn connections(State(admin): State<Admin>, Query(query): Query<ConnectionsQuery>) -> Response {
    match &admin.connections {
        Some(connections) => axum::Json(connections(query.node.as_deref())).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn config(State(admin): State<Admin>) -> Response {
    axum::Json(&*admin.flags).into_response()
}

/// Query parameters of `/debug/settled`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Patience {
    /// In seconds.
    timeout: Option<u64>,
}

async fn settled(State(admin): State<Admin>, Query(patience): Query<Patience>) -> Response {
    let seconds = patience.timeout.unwrap_or(SETTLE_SECONDS).min(MAX_SETTLE_SECONDS);
    let settled = admin.settling.settled(Duration::from_secs(seconds), admin.log.clone()).await;
    let status = if settled.pending.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, axum::Json(settled)).into_response()
}

async fn bench(State(admin): State<Admin>, Path(node): Path<String>) -> Response {
    let Some(bench) = &admin.bench else { return StatusCode::NOT_FOUND.into_response() };
    match bench(node).await {
        Ok(report) => axum::Json(report).into_response(),
        Err(reason) => (StatusCode::BAD_GATEWAY, format!("{reason}\n")).into_response(),
    }
}

/// Answers like klog's handler, so that scripts written for SuperEdge and kubelets work.
async fn level(State(admin): State<Admin>, request: Request<Body>) -> Response {
    if request.method() != Method::PUT {
        return (StatusCode::NOT_ACCEPTABLE, "unrecognized http method; use PUT\n").into_response();
    }
    let bad = |reason: String| (StatusCode::BAD_REQUEST, format!("{reason}\n")).into_response();
    let body = tokio::time::timeout(serve::READ_TIMEOUT, to_bytes(request.into_body(), MAX_LEVEL_BYTES));
    let Ok(body) = body.await else {
        return (StatusCode::REQUEST_TIMEOUT, "the body did not come in time\n").into_response();
    };
    let Ok(body) = body else {
        return bad(format!("the body is not a log level: longer than {MAX_LEVEL_BYTES} bytes"));
    };
    let Ok(value) = std::str::from_utf8(&body).map(str::trim) else {
        return bad("the body is not a log level: not UTF-8".to_owned());
    };
    match value.parse().and_then(|filter| admin.log.set(&filter)) {
        Ok(()) => {
            tracing::info!(new_level = value, "log level changed");
            format!("successfully set klog.logging.verbosity to {value}").into_response()
        }
        Err(error) => bad(format!("{value:?}: {error}")),
    }
}

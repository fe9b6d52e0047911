//! The admin endpoints. They have a thread and a runtime of their own, so that they answer while the data path is busy.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | OpenMetrics 1.0 text, or Prometheus' older format for clients that do not ask for it |
//! | `/healthz` | 200 while the process runs |
//! | `/readyz` | 200, or 503 and what is pending |
//! | `/status` | JSON |
//! | `/ui/` | a page for browsers that shows the same (server) |
//! | `/config` | JSON: the flags in effect, without secrets |
//! | `POST /bench/NODE` | JSON: measures the way to a node (server) |
//! | `PUT /debug/flags/v` | sets the log level (a name or klog's number), and others for modules |

pub mod client;
mod exposition;
mod page;
mod process;
mod serve;
mod show;

pub use exposition::exposition;
pub use page::Page;
pub use process::{register_process_metrics, register_tasks};
pub use show::{Show, ShowError};

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::BindError;
use crate::lifecycle::Readiness;
use crate::logging;

/// A level is a word or a number, and there may be more for modules.
const MAX_LEVEL_BYTES: usize = 1024;

/// Returns the answer of `/status`.
pub type Status = dyn Fn() -> serde_json::Value + Send + Sync;

/// The answer of `POST /bench/NODE`, or why there is none.
pub type BenchAnswer = Pin<Box<dyn Future<Output = Result<serde_json::Value, String>> + Send>>;

/// Measures the way to a node.
pub type Bench = dyn Fn(String) -> BenchAnswer + Send + Sync;

/// The state that the endpoints show and change.
#[derive(Clone)]
pub struct Admin {
    pub registry: Arc<Registry>,
    pub readiness: Readiness,
    pub status: Arc<Status>,
    /// The flags in effect, with secrets masked.
    pub flags: Arc<[String]>,
    /// Only of a server.
    pub bench: Option<Arc<Bench>>,
    /// The status page's files, below `/ui/`; only of a server.
    pub pages: &'static [Page],
    pub log: logging::Handle,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

impl Admin {
    /// Listens, without answering yet.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub fn bind(self, key: &'static str, address: SocketAddr) -> Result<Bound, BindError> {
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = listen().map_err(|error| BindError::new(key, address, error))?;
        Ok(Bound { admin: self, listener, address })
    }

    /// Takes a listener that another process had.
    ///
    /// # Errors
    /// It is not one.
    pub fn at(self, listener: TcpListener) -> io::Result<Bound> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Bound { admin: self, listener, address })
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
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .route("/status", get(status))
            .route("/config", get(config))
            .route("/bench/{node}", post(bench))
            .route("/debug/flags/v", any(level))
            .with_state(self)
    }
}

/// A listener; connections wait in its backlog until [`Bound::serve`].
#[derive(Debug)]
pub struct Bound {
    admin: Admin,
    listener: TcpListener,
    address: SocketAddr,
}

impl Bound {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The listener once more, for another process.
    ///
    /// # Errors
    /// Too many open files.
    pub fn copy(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Answers on a new thread until the returned handle is dropped.
    ///
    /// # Errors
    /// The thread or its runtime cannot be created.
    pub fn serve(self) -> io::Result<Serving> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (accepting, open) = watch::channel(true);
        let Self { admin, listener, address } = self;
        let thread = std::thread::Builder::new().name("admin".to_owned()).spawn(move || {
            runtime.block_on(async move {
                let served = async {
                    let listener = tokio::net::TcpListener::from_std(listener)?;
                    serve::answer(&listener, &admin.router(), open).await
                };
                tokio::select! {
                    () = stopped.cancelled() => {}
                    Err::<Infallible, io::Error>(error) = served => {
                        tracing::error!(%address, %error, "the admin endpoints have failed");
                    }
                }
            });
        })?;
        Ok(Serving { address, stop, accepting: Accepting(Arc::new(accepting)), thread: Some(thread) })
    }
}

/// Running endpoints; dropping this stops them.
#[derive(Debug)]
pub struct Serving {
    address: SocketAddr,
    stop: CancellationToken,
    accepting: Accepting,
    thread: Option<JoinHandle<()>>,
}

/// Whether the endpoints accept connections, or leave them to another process that has the listener.
#[derive(Clone, Debug)]
pub struct Accepting(Arc<watch::Sender<bool>>);

impl Accepting {
    pub fn set(&self, accepting: bool) {
        self.0.send_replace(accepting);
    }
}

impl Serving {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn accepting(&self) -> Accepting {
        self.accepting.clone()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the admin thread panicked");
        }
    }
}

async fn index(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    if !admin.pages.is_empty() && page::is_browser(&headers) {
        return page::lead_to("ui/");
    }
    let ui = if admin.pages.is_empty() { "" } else { "/ui/\n" };
    format!("{ui}/metrics\n/healthz\n/readyz\n/status\n/config\n/debug/flags/v (PUT)\n").into_response()
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

async fn config(State(admin): State<Admin>) -> Response {
    axum::Json(&*admin.flags).into_response()
}

async fn bench(State(admin): State<Admin>, Path(node): Path<String>, headers: HeaderMap) -> Response {
    if let Err(reason) = serve::own_page(&headers) {
        return (StatusCode::FORBIDDEN, format!("{reason}\n")).into_response();
    }
    let Some(bench) = &admin.bench else { return StatusCode::NOT_FOUND.into_response() };
    match bench(node).await {
        Ok(report) => axum::Json(report).into_response(),
        Err(reason) => (StatusCode::BAD_GATEWAY, format!("{reason}\n")).into_response(),
    }
}

/// Answers as klog's handler does, so that scripts for SuperEdge and kubelets work.
async fn level(State(admin): State<Admin>, request: Request<Body>) -> Response {
    if request.method() != Method::PUT {
        return (StatusCode::NOT_ACCEPTABLE, "unrecognized http method; use PUT\n").into_response();
    }
    if let Err(reason) = serve::own_page(request.headers()) {
        return (StatusCode::FORBIDDEN, format!("{reason}\n")).into_response();
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
            tracing::info!(level = value, "log level changed");
            format!("successfully set klog.logging.verbosity to {value}").into_response()
        }
        Err(error) => bad(format!("{value:?}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    fn serve() -> (Serving, Readiness, logging::Handle) {
        let mut registry = Registry::default();
        let counter = Counter::<u64>::default();
        registry.sub_registry_with_prefix("postern").register("things", "Things seen", counter.clone());
        counter.inc_by(3);
        register_process_metrics(&mut registry, "1.2.3");
        let readiness = Readiness::new();
        let log = logging::Handle::detached();
        let admin = Admin {
            registry: Arc::new(registry),
            readiness: readiness.clone(),
            status: Arc::new(|| serde_json::json!({"answer": 42})),
            flags: Arc::new(["--log-level=info".to_owned()]),
            bench: Some(Arc::new(|node: String| -> BenchAnswer {
                Box::pin(async move {
                    if node == "edge-1" {
                        Ok(serde_json::json!({"node": node}))
                    } else {
                        Err(format!("no {node}"))
                    }
                })
            })),
            pages: &[Page { path: "/ui/", content_type: "text/html; charset=utf-8", body: "<p>status</p>" }],
            log: log.clone(),
        };
        let bound = admin.bind("--admin-address", "127.0.0.1:0".parse().unwrap()).unwrap();
        (bound.serve().unwrap(), readiness, log)
    }

    async fn ask(serving: &Serving, method: Method, path: &str, body: &'static str) -> client::Answer {
        client::request(serving.address(), method, path, body.into()).await.unwrap()
    }

    #[tokio::test]
    async fn metrics_are_those_of_the_registry_and_of_the_process() {
        let (serving, _, _) = serve();
        let answer = ask(&serving, Method::GET, "/metrics", "").await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.content_type.as_deref(), Some("text/plain; version=0.0.4; charset=utf-8"));
        let text = answer.text();
        for line in [
            "# TYPE postern_things_total counter\npostern_things_total 3\n",
            "\npostern_build_info{version=\"1.2.3\"} 1\n",
            "\nprocess_resident_memory_bytes ",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }

    #[tokio::test]
    async fn the_flags_are_shown_and_a_measurement_is_asked_for() {
        let (serving, _, _) = serve();
        let flags = ask(&serving, Method::GET, "/config", "").await;
        assert_eq!(flags.text(), "[\"--log-level=info\"]");
        let answer = ask(&serving, Method::POST, "/bench/edge-1", "").await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "{\"node\":\"edge-1\"}"));
        let answer = ask(&serving, Method::POST, "/bench/edge-9", "").await;
        assert_eq!((answer.status, answer.text()), (StatusCode::BAD_GATEWAY, "no edge-9\n"));
        assert_eq!(
            ask(&serving, Method::GET, "/bench/edge-1", "").await.status,
            StatusCode::METHOD_NOT_ALLOWED
        );
    }

    #[tokio::test]
    async fn browsers_are_led_to_the_page() {
        let (serving, _, _) = serve();
        let get = async |path: &str, accept: &str| {
            let request = format!("GET {path} HTTP/1.1\r\n{accept}Connection: close\r\n\r\n");
            send(&serving, request.as_bytes()).await
        };
        let led = get("/", "Accept: text/html,application/xhtml+xml;q=0.9\r\n").await;
        assert!(led.starts_with("HTTP/1.1 303 ") && led.contains("\r\nlocation: ui/\r\n"), "{led}");
        let listed = get("/", "Accept: */*\r\n").await;
        assert!(listed.starts_with("HTTP/1.1 200 ") && listed.contains("/ui/\n/metrics\n"), "{listed}");
        let page = get("/ui/", "").await;
        assert!(page.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{page}");
        assert!(
            page.contains("x-content-type-options: nosniff") && page.ends_with("<p>status</p>"),
            "{page}"
        );
        let led = get("/ui", "").await;
        assert!(led.starts_with("HTTP/1.1 303 ") && led.contains("\r\nlocation: ui/\r\n"), "{led}");
    }

    #[tokio::test]
    async fn readyz_names_what_is_pending() {
        let (serving, readiness, _) = serve();
        let redirect = readiness.pending("redirect");
        let inventory = readiness.pending("inventory");
        let answer = ask(&serving, Method::GET, "/readyz", "").await;
        assert_eq!(
            (answer.status, answer.text()),
            (StatusCode::SERVICE_UNAVAILABLE, "pending: redirect, inventory\n")
        );
        drop((redirect, inventory));
        let answer = ask(&serving, Method::GET, "/readyz", "").await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "ok\n"));
        assert_eq!(ask(&serving, Method::GET, "/healthz", "").await.status, StatusCode::OK);
    }

    #[tokio::test]
    async fn status_is_json_and_unknown_paths_are_not_found() {
        let (serving, _, _) = serve();
        let answer = ask(&serving, Method::GET, "/status", "").await;
        assert_eq!(answer.content_type.as_deref(), Some("application/json"));
        assert_eq!(answer.text(), "{\"answer\":42}");
        assert_eq!(ask(&serving, Method::GET, "/nothing", "").await.status, StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn the_log_level_is_set_as_with_klog() {
        let (serving, _, log) = serve();
        let path = "/debug/flags/v";
        let answer = ask(&serving, Method::PUT, path, "5\n").await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.text(), "successfully set klog.logging.verbosity to 5");
        assert_eq!(log.level(), logging::Level::Debug);
        ask(&serving, Method::PUT, path, "warn").await;
        assert_eq!(log.level(), logging::Level::Warn);

        let answer = ask(&serving, Method::PUT, path, "loud").await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.text().starts_with("\"loud\": not a log level"), "{}", answer.text());
        let long = "1111111111111111111111111111111111111111111111111111111111111111111111111111111111";
        assert_eq!(ask(&serving, Method::PUT, path, long).await.status, StatusCode::BAD_REQUEST);
        for method in [Method::GET, Method::POST, Method::DELETE] {
            assert_eq!(ask(&serving, method, path, "5").await.status, StatusCode::NOT_ACCEPTABLE);
        }
        assert_eq!(log.level(), logging::Level::Warn);
    }

    /// Sends `request`, and reads until the endpoint closes.
    async fn send(serving: &Serving, request: &[u8]) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::TcpStream::connect(serving.address()).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        let limit = serve::READ_TIMEOUT * 2;
        // A reset is as good an end as any.
        let _ =
            tokio::time::timeout(limit, stream.read_to_end(&mut answer)).await.expect("it closes in time");
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn a_head_that_never_ends_is_closed() {
        let (serving, _, _) = serve();
        let answers =
            tokio::join!(send(&serving, b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: "), send(&serving, b""));
        assert!(!answers.0.contains(" 200 ") && !answers.1.contains(" 200 "), "{answers:?}");
    }

    #[tokio::test]
    async fn a_head_larger_than_its_bound_is_refused() {
        let (serving, _, _) = serve();
        let request =
            |size| format!("GET /healthz HTTP/1.1\r\nConnection: close\r\nX: {}\r\n\r\n", "x".repeat(size));
        assert!(send(&serving, request(15_000).as_bytes()).await.starts_with("HTTP/1.1 200 "));
        assert!(send(&serving, request(17_000).as_bytes()).await.starts_with("HTTP/1.1 431 "));
    }

    #[tokio::test]
    async fn a_foreign_page_does_not_change_the_log_level() {
        let (serving, _, log) = serve();
        let before = log.level();
        let put = async |headers: &str| {
            let request = format!(
                "PUT /debug/flags/v HTTP/1.1\r\n{headers}\r\nContent-Length: 1\r\nConnection: close\r\n\r\n5"
            );
            send(&serving, request.as_bytes()).await
        };
        for foreign in ["Host: evil.example:10265", "Host: 127.0.0.1\r\nOrigin: http://evil.example"] {
            let answer = put(foreign).await;
            assert!(
                answer.starts_with("HTTP/1.1 403 ") && answer.contains("may not change anything"),
                "{answer}"
            );
        }
        assert_eq!(log.level(), before);
        assert!(put("Host: localhost:10265").await.starts_with("HTTP/1.1 200 "));
        assert_eq!(log.level(), logging::Level::Debug);
    }

    #[tokio::test]
    async fn an_address_in_use_is_an_error_until_its_server_stops() {
        let (serving, _, _) = serve();
        let address = serving.address();
        let admin = || Admin {
            registry: Arc::default(),
            readiness: Readiness::new(),
            status: Arc::new(|| serde_json::Value::Null),
            flags: Arc::new([]),
            bench: None,
            pages: &[],
            log: logging::Handle::detached(),
        };
        let error = admin().bind("--admin-address", address).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "--admin-address: cannot listen on {address}: address in use: another process listens there; stop it \
                 or choose another port"
            )
        );
        drop(serving);
        admin().bind("--admin-address", address).unwrap();
    }
}

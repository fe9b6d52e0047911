use super::*;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use std::net::SocketAddr;
use tokio::net::{TcpSocket, TcpStream};
use tracing_subscriber::filter::{LevelFilter, Targets};

/// Endpoints that are served.
struct Served {
    address: SocketAddr,
    serving: Serving,
}

impl Served {
    fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The log's filter.
struct Log(Arc<Mutex<Targets>>);

impl Log {
    /// Set once a level was.
    fn level(&self) -> Option<LevelFilter> {
        self.0.lock().iter().find(|(target, _)| *target == "tunnel").map(|(_, level)| level)
    }
}

fn serve() -> (Served, Readiness, Log) {
    serve_after(Settling::default())
}

fn serve_after(settling: Settling) -> (Served, Readiness, Log) {
    serve_on(TcpListener::bind("127.0.0.1:0").unwrap(), settling)
}

fn serve_on(listener: TcpListener, settling: Settling) -> (Served, Readiness, Log) {
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    registry.sub_registry_with_prefix("postern").register("things", "Things seen", counter.clone());
    counter.inc_by(3);
    register_process_metrics(&mut registry, "1.2.3");
    let readiness = Readiness::default();
    let log = Log(Arc::default());
    let admin = Admin {
        registry: Arc::new(registry),
        readiness: readiness.clone(),
        status: Arc::new(|| serde_json::json!({"answer": 42})),
        cluster: Some(Arc::new(|| Box::pin(std::future::ready("[42]".to_owned())))),
        connections: Some(Arc::new(|node: Option<&str>| serde_json::json!({"of": node}))),
        flags: Arc::new(["--log-level=info".to_owned()]),
        bench: Some(Arc::new(|node: String| -> BenchAnswer {
            Box::pin(async move {
                if node == "late" {
                    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
                }
                if node != "edge-9" {
                    Ok(serde_json::json!({"node": node}))
                } else {
                    Err(format!("no {node}"))
                }
            })
        })),
        pages: &[Page { path: "/ui/", content_type: "text/html; charset=utf-8", body: "<p>status</p>" }],
        log: logging::Handle::noting(log.0.clone()),
        settling,
    };
    let address = listener.local_addr().unwrap();
    (Served { address, serving: admin.serve(listener).unwrap() }, readiness, log)
}

async fn ask(serving: &Served, method: Method, path: &str, body: &'static str) -> client::AdminResponse {
    client::request(client::DEADLINE, serving.address(), method, path, body.into()).await.unwrap()
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
    assert_eq!(ask(&serving, Method::GET, "/cluster", "").await.text(), "[42]");
    let answer = ask(&serving, Method::POST, "/bench/edge-1", "").await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "{\"node\":\"edge-1\"}"));
    let answer = ask(&serving, Method::POST, "/bench/edge-9", "").await;
    assert_eq!((answer.status, answer.text()), (StatusCode::BAD_GATEWAY, "no edge-9\n"));
    assert_eq!(ask(&serving, Method::GET, "/bench/edge-1", "").await.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn a_client_that_sends_no_more_is_answered() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (serving, _, _) = serve();
    for version in ["1.1", "1.0"] {
        let mut stream = TcpStream::connect(serving.address()).await.unwrap();
        let request = format!("POST /bench/late HTTP/{version}\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.contains(" 200 OK\r\n") && answer.ends_with("{\"node\":\"late\"}"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_stage_that_is_late_is_named() {
    let settling = Settling::default();
    settling.stage("first", || std::future::ready(()));
    let (served, _, _) = serve_after(settling.clone());
    let settled = ask(&served, Method::GET, "/debug/settled", "").await;
    assert_eq!((settled.status, settled.text()), (StatusCode::OK, "{\"settled\":[\"first\",\"log\"]}"));
    settling.stage("second", std::future::pending);
    let late = ask(&served, Method::GET, "/debug/settled?timeout=0", "").await;
    let expected = "{\"settled\":[\"first\"],\"pending\":\"second\"}";
    assert_eq!((late.status, late.text()), (StatusCode::SERVICE_UNAVAILABLE, expected));
    let wrong = ask(&served, Method::GET, "/debug/settled?timeout=soon", "").await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
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
    assert!(page.contains("x-content-type-options: nosniff") && page.ends_with("<p>status</p>"), "{page}");
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
}

#[tokio::test]
async fn a_process_that_runs_is_healthy_before_it_is_ready() {
    let (serving, readiness, _) = serve();
    let _pending = readiness.pending("redirect");
    for path in ["/healthz", "/livez"] {
        let answer = ask(&serving, Method::GET, path, "").await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "ok\n"), "{path}");
    }
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
async fn connections_are_those_of_all_nodes_or_of_one() {
    let (serving, _, _) = serve();
    for (path, status, text) in [
        ("/connections", StatusCode::OK, "{\"of\":null}"),
        ("/connections?node=edge-1", StatusCode::OK, "{\"of\":\"edge-1\"}"),
        ("/connections?nodes=edge-1", StatusCode::BAD_REQUEST, "unknown field `nodes`"),
    ] {
        let answer = ask(&serving, Method::GET, path, "").await;
        assert!(answer.status == status && answer.text().contains(text), "{path}: {answer:?}");
    }
}

#[tokio::test]
async fn the_log_level_is_set_as_with_klog() {
    let (serving, _, log) = serve();
    let path = "/debug/flags/v";
    let answer = ask(&serving, Method::PUT, path, "5\n").await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.text(), "successfully set klog.logging.verbosity to 5");
    assert_eq!(log.level(), Some(LevelFilter::DEBUG));
    ask(&serving, Method::PUT, path, "warn").await;
    assert_eq!(log.level(), Some(LevelFilter::WARN));

    let answer = ask(&serving, Method::PUT, path, "loud").await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.text().starts_with("\"loud\": not a log level"), "{}", answer.text());
    let long = "1111111111111111111111111111111111111111111111111111111111111111111111111111111111";
    assert_eq!(ask(&serving, Method::PUT, path, long).await.status, StatusCode::BAD_REQUEST);
    for method in [Method::GET, Method::POST, Method::DELETE] {
        assert_eq!(ask(&serving, method, path, "5").await.status, StatusCode::NOT_ACCEPTABLE);
    }
    assert_eq!(log.level(), Some(LevelFilter::WARN));
}

/// Sends `request`, and reads until the endpoint closes.
async fn send(serving: &Served, request: &[u8]) -> String {
    exchange(TcpStream::connect(serving.address()).await.unwrap(), request).await
}

async fn exchange(mut stream: TcpStream, request: &[u8]) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let limit = serve::READ_TIMEOUT * 2;
    // A reset is an acceptable end too.
    let _ = tokio::time::timeout(limit, stream.read_to_end(&mut answer)).await.expect("it closes in time");
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
async fn connections_are_bounded_and_a_new_one_is_answered() {
    let (serving, _, _) = serve();
    let mut held = Vec::new();
    for _ in 0..serve::MAX_CONNECTIONS {
        held.push(TcpStream::connect(serving.address()).await.unwrap().into_std().unwrap());
    }
    // It was accepted after all of them.
    assert_eq!(ask(&serving, Method::GET, "/healthz", "").await.status, StatusCode::OK);
    let is_open = |held: &&std::net::TcpStream| {
        held.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    // The others end as soon as their tasks run: the listener does not wait for that.
    let bound = serve::MAX_CONNECTIONS as usize * 3 / 4;
    let wait = async {
        while held.iter().filter(is_open).count() > bound {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(serve::READ_TIMEOUT / 2, wait).await.expect("the oldest ones are closed");
    assert!(!is_open(&&held[0]) && is_open(&held.last().unwrap()));
}

#[test]
fn an_answer_that_nobody_takes_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let shared = listener.try_clone().unwrap();
    let _serving = serve_on(listener, Settling::default());
    // The kernel does the rest, for each connection.
    assert_eq!(SockRef::from(&shared).tcp_user_timeout().unwrap(), Some(serve::READ_TIMEOUT));
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
    for (foreign, reason) in [
        ("Host: evil.example:10265", "is not this port's"),
        ("Host: 127.0.0.1\r\nOrigin: http://evil.example", "may not change anything"),
    ] {
        let answer = put(foreign).await;
        assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains(reason), "{answer}");
    }
    assert_eq!(log.level(), before);
    assert!(put("Host: localhost:10265").await.starts_with("HTTP/1.1 200 "));
    assert_eq!(log.level(), Some(LevelFilter::DEBUG));
}

/// Otherwise a web page whose name is made to lead to 127.0.0.1 (DNS rebinding) would read what it likes.
#[tokio::test]
async fn another_name_reads_nothing() {
    let (serving, _, _) = serve();
    let get = async |path: &str, host: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        send(&serving, request.as_bytes()).await
    };
    let paths =
        ["/metrics", "/healthz", "/status", "/connections", "/config", "/ui/", "/ui", "/", "/nothing"];
    for path in paths {
        let answer = get(path, "evil.example:10265").await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{path}: {answer}");
        assert!(answer.ends_with("name it by its IP address or as localhost\n"), "{path}: {answer}");
    }
    // As behind `kubectl port-forward`, and a kubelet's probe.
    for host in ["localhost:8080", "127.0.0.1:10265"] {
        let answer = get("/status", host).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("42"), "{host}: {answer}");
    }
}

#[tokio::test]
async fn its_address_is_free_once_it_is_dropped() {
    let (served, _, _) = serve();
    let bound = TcpListener::bind(served.address());
    assert_eq!(bound.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    drop(served.serving);
    TcpListener::bind(served.address).unwrap();
}

#[tokio::test]
async fn through_the_tunnel_there_are_the_metrics_only() {
    let (serving, _, log) = serve();
    let before = log.level();
    let tunnelled = async |method: &str, path: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((TUNNELLED, 0).into()).unwrap();
        let stream = socket.connect(serving.address()).await.unwrap();
        // A scraper in the cloud may know the port by its node's name.
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: edge-1:10266\r\nContent-Length: 1\r\nConnection: close\r\n\r\n5"
        );
        exchange(stream, request.as_bytes()).await
    };
    let metrics = tunnelled("GET", "/metrics").await;
    assert!(metrics.starts_with("HTTP/1.1 200 ") && metrics.contains("postern_things_total 3"), "{metrics}");
    for (method, path) in [
        ("PUT", "/debug/flags/v"),
        ("GET", "/debug/settled"),
        ("POST", "/bench/edge-1"),
        ("GET", "/"),
        ("GET", "/ui/"),
        ("GET", "/config"),
        ("GET", "/status"),
        ("GET", "/connections"),
        ("GET", "/healthz"),
        ("GET", "/livez"),
        ("GET", "/readyz"),
    ] {
        let answer = tunnelled(method, path).await;
        assert!(answer.starts_with("HTTP/1.1 404 "), "{method} {path}: {answer}");
    }
    assert_eq!(log.level(), before);
    assert_eq!(ask(&serving, Method::PUT, "/debug/flags/v", "5").await.status, StatusCode::OK);
    assert_eq!(log.level(), Some(LevelFilter::DEBUG));
}

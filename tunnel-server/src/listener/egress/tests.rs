//! Packet streams from a real client over the Unix socket, to a target that this server dials itself.

mod services;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};
use tunnel_link::konnectivity::Packet;
use tunnel_link::konnectivity::packet::Payload;
use tunnel_link::konnectivity::proxy_service_client::ProxyServiceClient;
use tunnel_link::outcome::{Hop, Outcome};
use tunnel_runtime::accept::Gate;

use super::*;
use crate::caller::CallersCa;
use crate::listener::judge::judge_all;
use crate::metrics::Metrics;
use crate::session::{Threads, Workers};

const PATIENCE: Duration = Duration::from_secs(10);
/// Number of callers that wait for a banner.
const ROUNDS: usize = 400;

struct Served {
    dir: tempfile::TempDir,
    metrics: Metrics,
    _task: tokio_util::task::AbortOnDropHandle<()>,
    _threads: Threads,
}

impl Served {
    async fn open() -> Self {
        Self::open_with(None, 1000).await
    }

    async fn open_with(services: Option<ClusterServices>, places: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = Socket::bind(&dir.path().join("egress.sock"), 0o600, false).await.unwrap();
        let (workers, threads) = Workers::start(1).unwrap();
        let context = ListenerContext { workers, ..ListenerContext::without_nodes() };
        let metrics = context.metrics.clone();
        let direct = vec!["127.0.0.0/8".parse().unwrap()];
        let served = Egress::new(context, places, direct, services);
        let task = tokio::spawn(served.serve_unix(socket, Gate::new(true)));
        let opened =
            Self { dir, metrics, _task: tokio_util::task::AbortOnDropHandle::new(task), _threads: threads };
        while !opened.path().exists() {
            tokio::task::yield_now().await;
        }
        opened
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("egress.sock")
    }

    async fn empty(&self) {
        let empty = async {
            while self.metrics.active_at(NAME) != 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, empty).await.expect("no connection is left");
    }
}

struct Client {
    packets: mpsc::Sender<Packet>,
    answers: Streaming<Packet>,
}

impl Client {
    async fn open(path: &Path) -> Self {
        Self::on(Self::connect(path).await).await
    }

    async fn connect(path: &Path) -> Channel {
        let path = path.to_owned();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        Endpoint::from_static("http://egress").connect_with_connector(connector).await.unwrap()
    }

    /// Opens a stream of this connection.
    async fn on(channel: Channel) -> Self {
        let (packets, requests) = mpsc::channel(1);
        let stream = ProxyServiceClient::new(channel).proxy(ReceiverStream::new(requests)).await.unwrap();
        Self { packets, answers: stream.into_inner() }
    }

    async fn send(&self, packet: Packet) {
        timeout(PATIENCE, self.packets.send(packet)).await.expect("taken in time").unwrap();
    }

    async fn next(&mut self) -> Payload {
        let next = timeout(PATIENCE, self.answers.message()).await.expect("answered in time");
        next.unwrap().expect("the stream goes on").payload.expect("a payload")
    }

    async fn dial(&mut self, address: &str, random: i64) -> Result<i64, String> {
        self.send(Packet::dial_request(address.to_owned(), random)).await;
        match self.next().await {
            Payload::DialResponse(answer) if answer.random == random => {
                if answer.error.is_empty() {
                    Ok(answer.connect_id)
                } else {
                    Err(answer.error)
                }
            }
            other => panic!("a dial was answered {other:?}"),
        }
    }

    async fn closed(&mut self) -> (i64, String) {
        match self.next().await {
            Payload::CloseResponse(answer) => (answer.connect_id, answer.error),
            other => panic!("{other:?} instead of CLOSE_RSP"),
        }
    }
}

/// Returns a listener and its address.
async fn target() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// As of konnectivity-client's reusable tunnel: one connection, a stream for each dial.
#[tokio::test]
async fn one_connection_has_a_stream_for_every_place() {
    const PLACES: u32 = 10_000;
    let served = Served::open_with(None, PLACES).await;
    let (listener, address) = target().await;
    let channel = Client::connect(&served.path()).await;
    let mut streams = Vec::new();
    for _ in 0..PLACES {
        streams.push(timeout(PATIENCE, Client::on(channel.clone())).await.expect("a stream"));
    }
    let last = streams.last_mut().unwrap();
    assert_eq!(last.dial(&address, 7).await, Ok(1));
    listener.accept().await.unwrap();
}

#[tokio::test]
async fn data_passes_both_ways_until_either_end_closes() {
    let served = Served::open().await;
    let (listener, address) = target().await;
    let mut client = Client::open(&served.path()).await;
    assert_eq!(client.dial(&address, 7).await, Ok(1));
    let (mut first, _) = listener.accept().await.unwrap();
    assert_eq!(client.dial(&address, 8).await, Ok(2));
    let (mut second, _) = listener.accept().await.unwrap();
    client.send(Packet::data(1, Bytes::from_static(b"ping"))).await;
    let mut read = [0; 4];
    first.read_exact(&mut read).await.unwrap();
    assert_eq!(&read, b"ping");
    first.write_all(b"pong").await.unwrap();
    let Payload::Data(data) = client.next().await else { panic!("no data") };
    assert_eq!((data.connect_id, &data.data[..]), (1, &b"pong"[..]));
    // The target closes: there is no half-close.
    first.shutdown().await.unwrap();
    assert_eq!(client.closed().await, (1, String::new()));
    assert_eq!(first.read(&mut read).await.unwrap(), 0);
    // The client closes; the data that it has sent arrives.
    client.send(Packet::data(2, Bytes::from(vec![1; 500_000]))).await;
    client.send(Packet::close_request(2)).await;
    assert_eq!(client.closed().await, (2, String::new()));
    drop(client);
    let mut all = Vec::new();
    timeout(PATIENCE, second.read_to_end(&mut all)).await.expect("the end").unwrap();
    assert_eq!(all.len(), 500_000);
    drop((first, second));
    served.empty().await;
}

#[tokio::test]
async fn packets_of_nobody_are_answered() {
    let served = Served::open().await;
    let (_listener, address) = target().await;
    let mut client = Client::open(&served.path()).await;
    client.send(Packet::data(3, Bytes::from_static(b"x"))).await;
    assert_eq!(client.closed().await, (3, "backend not initialized".to_owned()));
    client.send(Packet::close_request(3)).await;
    assert_eq!(client.closed().await, (3, "Unknown connectID".to_owned()));
    assert!(client.dial("nobody:1", 1).await.unwrap_err().contains("no such host"));
    assert!(client.dial("10.9.9.9:1", 2).await.unwrap_err().contains("--egress-direct"));
    let (gone, refused) = target().await;
    drop(gone);
    assert!(client.dial(&refused, 3).await.unwrap_err().contains("connection refused"));
    let connect_id = client.dial(&address, 4).await.unwrap();
    client.send(Packet::data(99, Bytes::from_static(b"x"))).await;
    assert_eq!(client.closed().await, (99, "unrecognized connectID".to_owned()));
    // A dial whose answer has crossed DIAL_CLS ends, and its number may be used again.
    client.send(Packet::close_dial(4)).await;
    let (closed, error) = client.closed().await;
    assert!(closed == connect_id && !error.is_empty(), "{closed} ended with {error:?}");
    client.send(Packet::close_dial(4)).await;
    assert!(client.dial(&address, 4).await.is_ok());
    drop(client);
    served.empty().await;
}

#[tokio::test]
async fn of_several_connections_only_the_stalled_one_is_closed() {
    let served = Served::open().await;
    let (listener, address) = target().await;
    let mut client = Client::open(&served.path()).await;
    let stalled = client.dial(&address, 1).await.unwrap();
    let (_deaf, _) = listener.accept().await.unwrap();
    // A stalled connection that is alone makes its caller wait.
    let piece = Bytes::from(vec![1; 1 << 20]);
    let fill = async {
        loop {
            client.packets.send(Packet::data(stalled, piece.clone())).await.unwrap();
        }
    };
    assert!(timeout(Duration::from_secs(1), fill).await.is_err());
    let mut client = Client::open(&served.path()).await;
    let stalled = client.dial(&address, 1).await.unwrap();
    let (_deaf, _) = listener.accept().await.unwrap();
    let good = client.dial(&address, 2).await.unwrap();
    let (mut read, _) = listener.accept().await.unwrap();
    for _ in 0..64 {
        client.send(Packet::data(stalled, piece.clone())).await;
    }
    client.send(Packet::data(good, Bytes::from_static(b"ping"))).await;
    let mut ping = [0; 4];
    timeout(PATIENCE, read.read_exact(&mut ping)).await.expect("not held up").unwrap();
    let (closed, error) = client.closed().await;
    assert!(closed == stalled && error.contains("1 MiB"), "{closed} ended with {error:?}");
}

#[tokio::test]
async fn a_caller_takes_a_place_before_it_asks_for_anything() {
    let served = Served::open_with(None, 2).await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(UnixStream::connect(served.path()).await.unwrap());
    }
    let mut third = UnixStream::connect(served.path()).await.unwrap();
    // Long before it would be turned away for its silence.
    let read = timeout(PATIENCE / 3, third.read(&mut [0; 1])).await.expect("turned away at once");
    assert_eq!(read.unwrap_or(0), 0);
    drop(silent);
    let (_listener, address) = target().await;
    let served = async {
        loop {
            let mut stream = UnixStream::connect(served.path()).await.unwrap();
            let request = format!("CONNECT {address} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
            // The places may not be free yet.
            if stream.write_all(request.as_bytes()).await.is_ok()
                && stream.read(&mut [0; 1]).await.is_ok_and(|read| read == 1)
            {
                break;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("served once there is a place");
}

/// Keeps all CPUs busy until it is dropped.
struct Busy(Arc<std::sync::atomic::AtomicBool>);

impl Busy {
    fn start() -> Self {
        let busy = Self(Arc::new(true.into()));
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            let on = busy.0.clone();
            std::thread::spawn(move || while on.load(std::sync::atomic::Ordering::Relaxed) {});
        }
        busy
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Checks this on a busy machine too, and with a caller that waits for edge-triggered readiness.
#[tokio::test]
async fn a_banner_comes_behind_the_answer() {
    const ANSWER: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";
    let served = Served::open().await;
    let (listener, address) = target().await;
    let greet = tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.write_all(b"banner").await.unwrap();
            // A server that sends a banner waits for the other side.
            tokio::spawn(async move { socket.read(&mut [0; 1]).await });
        }
    });
    let busy = Busy::start();
    for round in 0..ROUNDS {
        let mut stream = UnixStream::connect(served.path()).await.unwrap();
        let request = format!("CONNECT {address} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        if round % 4 == 0 {
            // Late enough for both to have arrived.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if round % 4 == 1 {
            // Causes an event of the server's socket that is not a read event.
            timeout(PATIENCE, stream.readable()).await.expect("an answer").unwrap();
            stream.shutdown().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if round % 4 == 2 {
            // The client sends no more, and waits for the answer.
            stream.shutdown().await.unwrap();
        }
        let mut read = vec![0; 4096];
        let length = timeout(PATIENCE, stream.read(&mut read)).await.expect("an answer").unwrap();
        assert_eq!(&read[..length], ANSWER, "round {round}: {}", String::from_utf8_lossy(&read[..length]));
        let mut banner = [0; 6];
        timeout(PATIENCE, stream.read_exact(&mut banner)).await.expect("the banner").unwrap();
        assert_eq!(&banner, b"banner");
    }
    drop(busy);
    greet.abort();
}

#[tokio::test]
async fn a_callers_connection_ends_with_its_certificate() {
    let context = ListenerContext::without_nodes();
    let metrics = context.metrics.clone();
    let direct = Direct(vec!["127.0.0.0/8".parse().unwrap()]);
    let dialler = Dialler { context, shares: Shares::new(10), direct, services: None };
    let (accepted, certified) = CallersCa::new().certified(6 * PATIENCE);
    let caller = EgressClient {
        address: ([127, 0, 0, 1], 40000).into(),
        name: "kube-apiserver".into(),
        certified: Some(certified),
    };
    let (listener, address) = target().await;
    let Ok(connected) = dialler.dial(&address, &caller, std::future::pending()).await else {
        panic!("the certificate is accepted");
    };
    let (mut target, _) = listener.accept().await.unwrap();
    let (near, mut far) = tokio::io::duplex(100);
    let relayed = tokio::spawn(async move {
        let (mut read, mut write) = tokio::io::split(near);
        connected.run(&mut read, &mut write, std::future::pending()).await
    });
    target.write_all(b"x").await.unwrap();
    assert_eq!(timeout(PATIENCE, far.read_u8()).await.expect("it is relayed").unwrap(), b'x');
    judge_all(&metrics, Instant::now()).await;
    assert!(!relayed.is_finished());
    accepted.set(CallersCa::new().verifier());
    judge_all(&metrics, Instant::now()).await;
    let failed = timeout(PATIENCE, relayed).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!(failed.outcome, Outcome::Denied);
    let detail = metrics.failures.all()[&Hop::Policy].recent[0].detail.clone();
    assert!(detail.starts_with("the client certificate is no longer accepted"), "{detail}");
    let Err(refused) = dialler.dial(&address, &caller, std::future::pending()).await else {
        panic!("it reaches nothing more");
    };
    assert_eq!(refused.outcome, Outcome::Denied);
}

//! Serves a client's connection, ending its TLS if the listener does that.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_link::relay::TunnelStream;

use super::body::Body;
use super::kinds::{Front, MAX_HEAD, Peer};
use super::metrics::MetricsPage;
use super::request;
use super::requests::Requests;
use super::served::Served;
use crate::admission::{Share, Shares};
use crate::caller::caller_of_certificate;
use crate::listener::context::{ListenerContext, OpenError};
use crate::listener::preface;
use crate::listener::socket::{Faults, PrefixedSocket, Watched};
use crate::metrics::Metrics;

/// Maximum time to tell a refused client of the end.
const FAREWELL: Duration = Duration::from_secs(10);
/// Maximum wait for a whole head, including the idle time before the next request. For HTTP/2, maximum time without a
/// request, and interval of PINGs.
///
/// Longer than Prometheus' usual 30 s between scrapes.
const IDLE: Duration = Duration::from_secs(45);
/// Name of a request in errors.
const REQUEST: &str = "request";
/// Maximum number of concurrent requests of a connection; further ones wait.
const MAX_STREAMS: u32 = 128;
/// Maximum number of unread bytes of request bodies on an HTTP/2 connection. Until the caller is authenticated, bodies are not
/// read.
const UNREAD: u32 = 128 << 10;

impl Front {
    /// Serves a connection until it ends. `prefix` was already read from it; `place` is its own.
    ///
    /// # Errors
    /// The connection was given up before a request came; the error says why.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        socket: TcpStream,
        prefix: Bytes,
        client: SocketAddr,
        context: &ListenerContext,
        shares: &Shares,
        place: Option<Share>,
    ) -> Result<(), OpenError> {
        let socket = Arc::new(socket);
        let (watched, faults) = (Watched::Socket(socket.clone()), Faults::Socket(Arc::downgrade(&socket)));
        let socket = PrefixedSocket::new(socket, prefix);
        let served = |certificate, faults| {
            let peer = Peer::new(client, certificate, place);
            Served::new(self.clone(), peer, faults, context.clone(), shares.clone())
        };
        let Some(tls) = &self.tls else {
            return http(socket, false, watched, served(None, Some(faults))).await;
        };
        let accepted = tls.accept(socket, self.ends_with_refusal()).await;
        let (stream, certified) = accepted.map_err(OpenError::Client)?;
        let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let certificate = match certified {
            Some(certified) => {
                let caller = caller_of_certificate(&certified.leaf).map_err(OpenError::Client)?;
                Some((caller, Arc::new(certified)))
            }
            None => None,
        };
        // Over HTTP/2 a cut answer resets its stream, not the connection.
        http(stream, h2, watched, served(certificate, (!h2).then_some(faults))).await
    }

    /// The same for a client whose bytes come through its node's agent.
    ///
    /// # Errors
    /// The connection was given up before a request came; the error says why.
    pub(crate) async fn serve_piped(
        self: Arc<Self>,
        stream: TunnelStream,
        client: SocketAddr,
        context: ListenerContext,
        shares: Shares,
        place: Share,
    ) -> Result<(), OpenError> {
        let pipe = stream.status();
        // A connection between two requests ends with an end of file.
        pipe.end_on_drop();
        let peer = Peer::new(client, None, Some(place));
        let served = Served::new(self, peer, Some(Faults::Pipe(pipe.clone())), context, shares);
        http(stream, false, Watched::Pipe(pipe), served).await
    }
}

/// Answers the requests of a connection until it ends, or until it has become a tunnel.
async fn http<S>(stream: S, h2: bool, watched: Watched, served: Served) -> Result<(), OpenError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (listener, shutdown) = (served.front.listener, served.context.drain.shutdown().clone());
    let served = Arc::new(served);
    let page = served.front.metrics.as_ref();
    let _counted = page.map(|_| Counted::new(listener, &served.context.metrics));
    let requests = Requests::default();
    let answer = |request| {
        let (served, request_in_flight) = (served.clone(), requests.open());
        async move { Ok::<_, Infallible>(request_in_flight.answered(request::answer(&served, request).await)) }
    };
    let over = async {
        tokio::select! {
            () = shutdown.draining() => {}
            () = handed_over(page) => {}
            // The client comes back with another one.
            () = served.peer.lapsed() => {}
        }
        requests.first().await;
    };
    let proxy = served.front.is_proxy();
    let patience = if proxy { preface::READ_TIMEOUT } else { IDLE };
    let serving = async {
        if h2 {
            http_2(stream, &requests, over, answer).await
        } else {
            http_1(stream, patience, over, answer).await
        }
    };
    let ended = tokio::select! {
        ended = serving => ended,
        // HTTP/2 notices by itself, since it always reads.
        error = watched.lost(), if !h2 => {
            tracing::debug!(listener, error, "a client's connection was lost");
            return Ok(());
        }
        // The error at the end of the answer waits for the client to read, and that may never happen.
        () = served.cut.cancelled() => {
            if let Some(faults) = &served.faults {
                faults.report();
            }
            return Ok(());
        }
    };
    if let Some(tunnel) = served.tunnel.lock().take() {
        // In a task of its own, which does not hold what HTTP took.
        served.context.drain.spawn(tunnel.run(watched));
        return Ok(());
    }
    if let Some(upgraded) = served.upgraded.lock().take() {
        served.context.drain.spawn(upgraded.run(watched));
        return Ok(());
    }
    let refused = served.refused.lock().take();
    if let Some(refused) = refused
        && let Ok(client) = refused.await
    {
        // A client that is gone, or does not read, need not be told of the end.
        let _ = tokio::time::timeout(FAREWELL, TokioIo::new(client).shutdown()).await;
    }
    let late = proxy && matches!(&ended, Err(error) if error.is_timeout());
    let told = ended.as_ref().map_or_else(|error| late || error.is_parse(), |()| true);
    // An upgraded connection goes on with its socket.
    if let Some(mut socket) = watched.into_socket().filter(|_| told) {
        let last = if late && served.front.tls.is_none() {
            preface::last_answer(StatusCode::REQUEST_TIMEOUT, &preface::timed_out(REQUEST))
        } else {
            String::new()
        };
        tokio::select! {
            () = preface::answer(&mut socket, last.as_bytes()) => {}
            () = shutdown.forced() => {}
        }
    }
    match ended {
        Err(_) if late => Err(OpenError::Client(preface::timed_out(REQUEST))),
        // Normal for clients: they leave, or leave idle connections open.
        Err(error) if error.is_parse() => Err(OpenError::Client(format!("not an HTTP request: {error}"))),
        Err(error) => {
            let error = tunnel_runtime::error::chain(&error);
            tracing::debug!(listener, error, "a client's connection ended");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Completes when another server answers scrapers from now on. Connections of other listeners go on until the drain.
async fn handed_over(page: Option<&MetricsPage>) {
    match page {
        Some(page) => page.gate.closed().await,
        None => std::future::pending().await,
    }
}

/// A connection that is counted until it is dropped.
struct Counted(&'static str, Metrics);

impl Counted {
    fn new(listener: &'static str, metrics: &Metrics) -> Self {
        metrics.opened(listener);
        Self(listener, metrics.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.answered(self.0);
    }
}

/// Answers HTTP/1.1 requests until the client has gone, or until `over` has completed and the requests up to then are
/// answered.
///
/// A client may close its half after its request and wait for the answer (RFC 9112 section 9.6). hyper reads nothing
/// while it answers, so the caller of this function has to detect a reset. The kernel of a client that has closed its
/// socket resets the connection when it receives more: an answer, or after a minute a keepalive probe.
async fn http_1<S, F>(
    stream: S,
    patience: Duration,
    over: impl Future<Output = ()>,
    answer: impl Fn(Request<Incoming>) -> F,
) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    F: Future<Output = Result<Response<Body>, Infallible>>,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience).max_buf_size(MAX_HEAD).half_close(true);
    let connection = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => ended,
        () = over => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    }
}

/// The same for HTTP/2, until there has been no request for a while. hyper knows no such limit, and waits for a client's
/// preface even after a shutdown (hyper#4171, #4172).
async fn http_2<S, F>(
    stream: S,
    requests: &Requests,
    over: impl Future<Output = ()>,
    answer: impl Fn(Request<Incoming>) -> F,
) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
{
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
        // One that is not read leaves room for others.
        .initial_stream_window_size(UNREAD / 2)
        .initial_connection_window_size(UNREAD)
        .keep_alive_interval(IDLE);
    let connection = builder.serve_connection(TokioIo::new(stream), service_fn(answer));
    let mut connection = std::pin::pin!(connection);
    let over = async {
        tokio::select! {
            () = over => {}
            () = requests.none_for(IDLE) => {}
        }
    };
    tokio::select! {
        // A request that has just come is answered.
        biased;
        ended = connection.as_mut() => return ended,
        () = over => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = requests.none_at_all(FAREWELL) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Empty, Full};
    use hyper::client::conn::http2::{Builder, SendRequest};
    use socket2::SockRef;
    use tokio::io::{AsyncReadExt as _, DuplexStream};
    use tokio::net::TcpListener;
    use tokio::task::JoinHandle;
    use tokio::time::timeout;
    use tokio_util::sync::{CancellationToken, DropGuard};
    use tunnel_link::relay::lost;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Returns a client's end of a connection whose requests are answered after `due`. The tokens are cancelled when a
    /// request has come, and when it is over.
    async fn served(due: Duration) -> (TcpStream, CancellationToken, CancellationToken) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let (came, gone) = (CancellationToken::new(), CancellationToken::new());
        let told = (came.clone(), gone.clone());
        tokio::spawn(async move {
            let watched = Arc::new(accepted);
            let stream = PrefixedSocket::new(watched.clone(), Bytes::new());
            let answer = |_| {
                came.cancel();
                let over: DropGuard = gone.clone().drop_guard();
                async move {
                    tokio::time::sleep(due).await;
                    drop(over);
                    Ok(Response::new(Full::from("late").map_err(|never| match never {}).boxed_unsync()))
                }
            };
            tokio::select! {
                _ = http_1(stream, IDLE, std::future::pending(), answer) => {}
                _ = lost(&watched) => {}
            }
        });
        (client, told.0, told.1)
    }

    #[tokio::test]
    async fn a_client_that_sends_no_more_is_answered() {
        for version in ["1.1", "1.0"] {
            let (mut client, ..) = served(Duration::from_millis(300)).await;
            client.write_all(format!("GET / HTTP/{version}\r\nHost: a\r\n\r\n").as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            let mut answer = String::new();
            timeout(PATIENCE, client.read_to_string(&mut answer)).await.expect("an answer").unwrap();
            assert!(answer.contains(" 200 OK\r\n") && answer.ends_with("late"), "HTTP/{version}: {answer:?}");
        }
    }

    #[tokio::test]
    async fn a_reset_ends_the_request() {
        for half_closed in [false, true] {
            let (mut client, came, gone) = served(6 * PATIENCE).await;
            client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            if half_closed {
                client.shutdown().await.unwrap();
            }
            timeout(PATIENCE, came.cancelled()).await.expect("a request");
            assert!(!gone.is_cancelled(), "it waits for its answer");
            SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
            drop(client);
            timeout(PATIENCE, gone.cancelled()).await.expect("the request ends with its client");
        }
    }

    /// Returns a client's end of an HTTP/2 connection whose requests are answered after four times the longest idle time,
    /// their bodies unread; a token that begins its end; and the task that serves it.
    fn served_over_http_2() -> (DuplexStream, CancellationToken, JoinHandle<hyper::Result<()>>) {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let over = CancellationToken::new();
        let until = over.clone();
        let serving = tokio::spawn(async move {
            let requests = Requests::default();
            let answer = |unread: Request<Incoming>| {
                let request = requests.open();
                async move {
                    tokio::time::sleep(4 * IDLE).await;
                    drop(unread);
                    let late = Full::from("late").map_err(|never| match never {}).boxed_unsync();
                    Ok(request.answered(Response::new(late)))
                }
            };
            http_2(server, &requests, until.cancelled(), answer).await
        });
        (client, over, serving)
    }

    async fn speaks_http_2(client: DuplexStream) -> SendRequest<Empty<Bytes>> {
        let builder = Builder::new(TokioExecutor::new());
        let (sender, connection) = builder.handshake(TokioIo::new(client)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    #[tokio::test(start_paused = true)]
    async fn an_http_2_connection_without_a_request_ends() {
        for (preface, drains) in [(false, false), (false, true), (true, false), (true, true)] {
            let (client, over, serving) = served_over_http_2();
            let (mut silent, mut speaking) = (None, None);
            match preface {
                true => speaking = Some(speaks_http_2(client).await),
                false => silent = Some(client),
            }
            if drains {
                over.cancel();
            }
            let second = Duration::from_secs(1);
            if !drains {
                tokio::time::sleep(IDLE - second).await;
                assert!(!serving.is_finished(), "preface: {preface}");
            }
            let ended = timeout(FAREWELL + 2 * second, serving).await;
            // A client may close first.
            let _ = ended.unwrap_or_else(|_| panic!("preface: {preface}, drains: {drains}")).unwrap();
            drop((silent, speaking));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_http_2_request_may_take_long() {
        for drains in [false, true] {
            let (client, over, serving) = served_over_http_2();
            let mut sender = speaks_http_2(client).await;
            let answer = tokio::spawn(sender.send_request(Request::new(Empty::new())));
            tokio::time::sleep(IDLE / 2).await;
            if drains {
                over.cancel();
            }
            let answer = answer.await.unwrap().unwrap().into_body().collect().await.unwrap();
            assert_eq!(answer.to_bytes(), "late");
            let ended = timeout(IDLE + FAREWELL + Duration::from_secs(1), serving).await;
            let _ = ended.unwrap_or_else(|_| panic!("drains: {drains}")).unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_http_2_body_that_nobody_reads_leaves_room_for_another() {
        let (client, _over, _serving) = served_over_http_2();
        let (sender, connection) = h2::client::handshake(client).await.unwrap();
        tokio::spawn(connection);
        let (mut open, mut accepted) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let mut sender = sender.clone().ready().await.unwrap();
            let request = Request::post("https://postern/").body(()).unwrap();
            let (answer, mut body) = sender.send_request(request, false).unwrap();
            body.reserve_capacity(2 * UNREAD as usize);
            let mut sent = 0;
            // The clock stands still as long as anything moves.
            while let Ok(room) = timeout(PATIENCE, std::future::poll_fn(|cx| body.poll_capacity(cx))).await {
                let room = room.unwrap().unwrap();
                body.send_data(vec![0u8; room].into(), false).unwrap();
                sent += room;
            }
            accepted.push(sent);
            open.push((answer, body));
        }
        assert_eq!(accepted, [64 << 10, 64 << 10, 0]);
    }
}

//! The ends of a link, as the two programs have them.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::RecvStream;
use h2::client::SendRequest;
use h2::server::SendResponse;
use http::{Request, StatusCode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tunnel_link::grpc::{refuse, response};
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{
    Abort, Forward, Pipe, RelayError, StallBound, Traffic, TunnelStream, pipe, pipe_of_client,
};

use super::adversary::{Adversary, pattern};

/// The process's end of a relayed connection.
pub struct Local {
    pub stream: u32,
    pub io: Option<TunnelStream>,
    written: usize,
    pub read: Vec<u8>,
    shut: bool,
    /// It has read the end of file, which was no error.
    ended: bool,
}

impl Local {
    pub fn new(stream: u32, io: TunnelStream) -> Self {
        Self { stream, io: Some(io), written: 0, read: Vec::new(), shut: false, ended: false }
    }

    pub fn write(&mut self, bytes: u16) {
        let Some(io) = self.io.as_mut().filter(|_| !self.shut) else { return };
        let data = pattern(self.stream, self.written, bytes.into());
        if let Some(Ok(written)) = io.write(&data).now_or_never() {
            self.written += written;
        }
    }

    pub fn read(&mut self, bytes: u16) {
        let Some(io) = self.io.as_mut() else { return };
        let mut buffer = vec![0; usize::from(bytes).max(1)];
        match io.read(&mut buffer).now_or_never() {
            Some(Ok(0)) => self.ended = true,
            Some(Ok(read)) => self.read.extend_from_slice(&buffer[..read]),
            Some(Err(_)) | None => {}
        }
    }

    pub fn shut(&mut self) {
        if let Some(io) = &mut self.io {
            self.shut |= io.shutdown().now_or_never().is_some();
        }
    }

    /// Compares with what went over the line. `of_server`: the end of the stream is a clean one.
    pub fn check(&self, of_server: bool, adversary: &Adversary) {
        let stream = self.stream;
        let sent = adversary.sent.segments(stream);
        assert!(sent.starts_with(&self.read), "stream {stream} was given what was not sent on it");
        if self.ended {
            let complete = adversary.sent.complete(stream);
            assert_eq!(complete.as_ref(), Some(&self.read), "stream {stream} seems complete");
        }
        let seen = adversary.seen.segments(stream);
        assert!(seen.len() <= self.written, "stream {stream} has sent more than was written");
        assert!(seen == pattern(stream, 0, seen.len()), "stream {stream} has sent what was not written");
        if let (true, Some(complete)) = (of_server, adversary.seen.complete(stream)) {
            assert!(self.shut && complete.len() == self.written, "stream {stream} ended early");
        }
    }
}

/// State that the tasks of a link share.
#[derive(Clone)]
pub struct Shared {
    flow: Arc<Flow>,
    pub stalls: Arc<StallBound>,
    pub over: CancellationToken,
    pub stop: CancellationToken,
    locals: mpsc::UnboundedSender<Local>,
    /// The streams that are forwarded: of the other server, and to the agent.
    pairs: mpsc::UnboundedSender<(u32, u32)>,
    open: Arc<AtomicUsize>,
}

/// Counts an open stream.
struct Counted(Arc<AtomicUsize>);

impl Shared {
    fn count(&self) -> Counted {
        self.open.fetch_add(1, Ordering::Relaxed);
        Counted(self.open.clone())
    }

    async fn over(&self) -> Outcome {
        self.over.cancelled().await;
        Outcome::TunnelLost
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The server's end: as `session/link.rs` of the server.
pub async fn client_end(line: DuplexStream, shared: Shared, ready: impl FnOnce(SendRequest<Bytes>)) {
    let _over = shared.over.clone().drop_guard();
    let Ok((send, mut connection)) = link::client_builder().handshake::<_, Bytes>(line).await else { return };
    let pings = connection.ping_pong().expect("the first call");
    ready(send);
    tokio::select! {
        _ = link::drive(connection, shared.flow.clone()) => {}
        _ = link::keep_alive(pings, &shared.flow, || shared.stalls.sweep()) => {}
        () = shared.stop.cancelled() => {}
    }
}

/// Asks for a connection, and returns its stream once the adversary has connected.
async fn ask(
    send: &SendRequest<Bytes>,
    shared: &Shared,
) -> Result<
    (h2::SendStream<Bytes>, impl Future<Output = Result<http::Response<RecvStream>, RelayError>> + use<>),
    RelayError,
> {
    let mut send = send.clone();
    poll_fn(|cx| send.poll_ready(cx)).await.map_err(RelayError::Link)?;
    if shared.open.load(Ordering::Relaxed) >= send.current_max_send_streams() {
        return Err(RelayError::Dial(Outcome::Busy, String::new()));
    }
    let (response, stream) = send.send_request(Request::new(()), false).map_err(RelayError::Link)?;
    let answer = async {
        let late = || RelayError::Dial(Outcome::TimedOut, String::new());
        let response = timeout(Duration::from_secs(8), response).await.map_err(|_| late())??;
        if response.status() != StatusCode::OK || Status::from_header_map(response.headers()).is_some() {
            return Err(RelayError::Dial(Outcome::Protocol, String::new()));
        }
        Ok(response)
    };
    Ok((stream, answer))
}

pub async fn open(send: SendRequest<Bytes>, shared: Shared) {
    let Ok((mut stream, answer)) = ask(&send, &shared).await else { return };
    let (_counted, id) = (shared.count(), stream.stream_id().as_u32());
    let answer = tokio::select! {
        answer = answer => answer,
        () = shared.over.cancelled() => return,
    };
    let Ok(answer) = answer else { return };
    let (near, far) = pipe();
    let _ = shared.locals.send(Local::new(id, near));
    let traffic = Traffic::default();
    let pipe = Pipe { flow: &shared.flow, stalls: &shared.stalls, traffic: &traffic };
    far.run(pipe, &mut stream, answer.into_body(), shared.over()).await;
}

/// The end on which the adversary opens streams: as the agent's `session/serve.rs`.
pub async fn server_end<F>(
    line: DuplexStream,
    builder: h2::server::Builder,
    shared: Shared,
    serve: impl Fn(RecvStream, SendResponse<Bytes>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let _over = shared.over.clone().drop_guard();
    let handshake = timeout(link::HANDSHAKE_TIMEOUT, builder.handshake::<_, Bytes>(line)).await;
    let Ok(Ok(mut connection)) = handshake else { return };
    let pings = connection.ping_pong().expect("the first call");
    let mut dead = pin!(link::keep_alive(pings, &shared.flow, || shared.stalls.sweep()));
    loop {
        tokio::select! {
            biased;
            _ = &mut dead => break,
            () = shared.stop.cancelled() => break,
            accepted = link::accept(&mut connection, &shared.flow) => match accepted {
                Some(Ok((request, respond))) => drop(tokio::spawn(serve(request.into_body(), respond))),
                _ => break,
            },
        }
    }
    shared.over.cancel();
    connection.graceful_shutdown();
    let closed = async { while let Some(Ok(_)) = connection.accept().await {} };
    let _ = timeout(Duration::from_secs(1), closed).await;
}

/// Dials a target that connects, refuses, or takes a while, depending on the stream.
pub async fn relay(body: RecvStream, mut respond: SendResponse<Bytes>, shared: Shared) {
    let (_counted, id) = (shared.count(), body.stream_id().as_u32());
    let dialled = tokio::select! {
        dialled = dial(id) => dialled,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    if !dialled {
        return refuse(&mut respond, &Status::unavailable("refused"));
    }
    let Ok(mut send) = respond.send_response(response(), false) else { return };
    let (near, far) = pipe_of_client();
    let _ = shared.locals.send(Local::new(id, near));
    let traffic = Traffic::default();
    let pipe = Pipe { flow: &shared.flow, stalls: &shared.stalls, traffic: &traffic };
    far.run(pipe, &mut send, body, shared.over()).await;
}

async fn dial(stream: u32) -> bool {
    if stream % 16 == 5 {
        sleep(Duration::from_secs(3)).await;
    }
    stream % 16 != 9
}

/// Forwards a stream to the agent: as the server's `agent_port/forwarded.rs`.
pub async fn forward(
    body: RecvStream,
    mut respond: SendResponse<Bytes>,
    agent: SendRequest<Bytes>,
    shared: (Shared, Shared),
) {
    let from = body.stream_id().as_u32();
    let (_counted, client, shared) = (shared.1.count(), shared.0, shared.1);
    let Ok((mut send, answer)) = ask(&agent, &shared).await else {
        return refuse(&mut respond, &Status::unavailable("no agent"));
    };
    let _ = shared.pairs.send((from, send.stream_id().as_u32()));
    if respond.send_informational(http::Response::builder().status(100).body(()).expect("valid")).is_err() {
        return;
    }
    let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
    let (flow, stalls) = ((&client.flow, &shared.flow), &shared.stalls);
    let forward = Forward { client: flow.0, agent: flow.1, stalls, abort: &abort, traffic: &traffic };
    let mut running = pin!(forward.run((body, &mut respond), &mut send, answer));
    let ended = tokio::select! {
        ended = &mut running => ended,
        () = shared.over.cancelled() => {
            abort.trigger(Outcome::TunnelLost);
            running.await
        }
    };
    drop(ended);
}

pub fn shared_by(
    stalls: &Arc<StallBound>,
) -> (Shared, mpsc::UnboundedReceiver<Local>, mpsc::UnboundedReceiver<(u32, u32)>) {
    let ((locals, arriving), (pairs, paired)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    let shared = Shared {
        flow: Arc::default(),
        stalls: stalls.clone(),
        over: CancellationToken::new(),
        stop: CancellationToken::new(),
        locals,
        pairs,
        open: Arc::default(),
    };
    (shared, arriving, paired)
}

//! The two ends of a link, against a stranger that has the other end: frames of any order, size and stream. In the middle,
//! a server forwards between a stranger that is a server and one that is an agent.
//!
//! Whatever the stranger does, the bytes of a stream reach no other one, a stream that ends well is complete, flow
//! control is kept, what is held is bounded, a link that answers PINGs takes new streams, and when it ends, everything
//! ends and is freed.
#![no_main]

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arbitrary::Arbitrary;
use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::RecvStream;
use h2::client::SendRequest;
use h2::server::SendResponse;
use http::{Request, StatusCode};
use libfuzzer_sys::fuzz_target;
use postern_fuzz::memory;
use postern_fuzz::stranger::{Block, Frame, LINE, Payload, Pick, Stranger, pattern};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tunnel_link::grpc::{refuse, response};
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{
    Abort, Forward, Pipe, RelayError, StallBound, StallBudget, Traffic, TunnelStream, pipe, pipe_of_client,
};

/// Limit on the bytes held for receivers that do not read.
const HELD: usize = 64 << 10;
/// Limit on the memory of one run, including what the stranger remembers.
const MEMORY: usize = 64 << 20;
/// Streams that the end that admits them is built for.
const ADMITTED: u32 = 4;
/// Connections that [`Step::Talk`] uses.
const TALKING: usize = 4;
/// Everything ends within this time after the link.
const END: Duration = Duration::from_secs(120);

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The server's end: the HTTP/2 client.
    Server,
    Agent,
    /// A server's end on which the other end opens streams.
    Admitting,
    /// A server between another server and an agent.
    Middle,
}

/// Locals are counted from the last one.
#[derive(Arbitrary, Clone, Debug)]
enum Step {
    /// The stranger sends a frame. `second`: the agent's line in the middle.
    Send {
        second: bool,
        times: u8,
        frame: Frame,
    },
    /// The same with DATA, which is what reaches the processes.
    Data {
        second: bool,
        on: u8,
        payload: Payload,
        end: bool,
    },
    /// A new connection, up to what the stranger answers.
    Connect,
    /// The same without an answer.
    Open,
    /// A segment on each stream of the last connections, which each process reads and answers.
    Talk(u8),
    Write(u8, u16),
    Read(u8, u16),
    Shut(u8),
    Drop(u8),
    Reads {
        second: bool,
        reads: bool,
    },
    /// Quarters of a second.
    Pass(u8),
    Stop,
}

#[derive(Arbitrary, Clone, Debug)]
struct Input {
    role: Role,
    /// Connections at the start.
    connections: u8,
    steps: Vec<Step>,
}

/// The process's end of a relayed connection.
struct Local {
    stream: u32,
    io: Option<TunnelStream>,
    written: usize,
    read: Vec<u8>,
    shut: bool,
    /// It has read the end of file, which was no error.
    ended: bool,
}

impl Local {
    fn new(stream: u32, io: TunnelStream) -> Self {
        Self { stream, io: Some(io), written: 0, read: Vec::new(), shut: false, ended: false }
    }

    fn write(&mut self, bytes: u16) {
        let Some(io) = self.io.as_mut().filter(|_| !self.shut) else { return };
        let data: Vec<u8> =
            (self.written..self.written + usize::from(bytes)).map(|at| pattern(self.stream, at)).collect();
        if let Some(Ok(written)) = io.write(&data).now_or_never() {
            self.written += written;
        }
    }

    fn read(&mut self, bytes: u16) {
        let Some(io) = self.io.as_mut() else { return };
        let mut buffer = vec![0; usize::from(bytes).max(1)];
        match io.read(&mut buffer).now_or_never() {
            Some(Ok(0)) => self.ended = true,
            Some(Ok(read)) => self.read.extend_from_slice(&buffer[..read]),
            Some(Err(_)) | None => {}
        }
    }

    fn shut(&mut self) {
        if let Some(io) = &mut self.io {
            self.shut |= io.shutdown().now_or_never().is_some();
        }
    }

    /// Compares with what went over the line.
    fn check(&self, role: Role, stranger: &Stranger) {
        let stream = self.stream;
        let sent = stranger.sent.segments(stream);
        assert!(sent.starts_with(&self.read), "stream {stream} was given what was not sent on it");
        if self.ended {
            let complete = stranger.sent.complete(stream);
            assert_eq!(complete.as_ref(), Some(&self.read), "stream {stream} seems complete");
        }
        let seen = stranger.seen.segments(stream);
        assert!(seen.len() <= self.written, "stream {stream} has sent more than was written");
        for (at, byte) in seen.iter().enumerate() {
            assert_eq!(*byte, pattern(stream, at), "stream {stream} has sent something else at {at}");
        }
        if let (Role::Server, Some(complete)) = (role, stranger.seen.complete(stream)) {
            assert!(self.shut && complete.len() == self.written, "stream {stream} ended early");
        }
    }
}

/// What the tasks of a link share.
#[derive(Clone)]
struct Shared {
    flow: Arc<Flow>,
    stalls: Arc<StallBound>,
    over: CancellationToken,
    stop: CancellationToken,
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

/// The server's end: as `session/link.rs` and `session/relay.rs` of the server.
async fn client_end(line: DuplexStream, shared: Shared, ready: impl FnOnce(SendRequest<Bytes>)) {
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

/// Asks for a connection, and returns its stream once the stranger has connected.
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

async fn open(send: SendRequest<Bytes>, shared: Shared) {
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

/// The end on which the stranger opens streams: as the agent's `session/serve.rs`.
async fn server_end<F>(
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
async fn relay(body: RecvStream, mut respond: SendResponse<Bytes>, shared: Shared) {
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
async fn forward(
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

/// A run: the strangers, and the process's ends.
struct Run {
    role: Role,
    strangers: Vec<Stranger>,
    locals: Vec<Local>,
    arriving: mpsc::UnboundedReceiver<Local>,
    pairs: mpsc::UnboundedReceiver<(u32, u32)>,
    forwarded: Vec<(u32, u32)>,
    opens: mpsc::UnboundedSender<()>,
    shared: Shared,
    stopped: bool,
    start: usize,
}

fn shared_by(
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

impl Run {
    fn new(role: Role, start: usize) -> Self {
        let budget = StallBudget::new(8 * HELD);
        let stalls = Arc::new(StallBound::within(HELD, HELD, &budget));
        let (shared, arriving, pairs) = shared_by(&stalls);
        let (opens, mut wanted) = mpsc::unbounded_channel::<()>();
        let (near, far) = tokio::io::duplex(LINE);
        let mut strangers = vec![Stranger::new(far, role != Role::Server)];
        match role {
            Role::Server => {
                let (sends, mut ready) = mpsc::unbounded_channel();
                tokio::spawn(client_end(near, shared.clone(), move |send| drop(sends.send(send))));
                let shared = shared.clone();
                tokio::spawn(async move {
                    let Some(send) = ready.recv().await else { return };
                    while let Some(()) = wanted.recv().await {
                        tokio::spawn(open(send.clone(), shared.clone()));
                    }
                });
            }
            Role::Agent | Role::Admitting => {
                let builder = match role {
                    Role::Agent => link::server_builder(),
                    _ => link::admitting_builder(ADMITTED),
                };
                let serving = shared.clone();
                let serve = move |body, respond| relay(body, respond, serving.clone());
                tokio::spawn(server_end(near, builder, shared.clone(), serve));
            }
            Role::Middle => {
                let (line, far) = tokio::io::duplex(LINE);
                strangers.push(Stranger::new(far, false));
                let (client, ..) = shared_by(&stalls);
                let (sends, mut ready) = mpsc::unbounded_channel();
                tokio::spawn(client_end(line, shared.clone(), move |send| drop(sends.send(send))));
                let both = (client.clone(), shared.clone());
                tokio::spawn(async move {
                    let Some(agent) = ready.recv().await else { return };
                    let (client, builder) = (both.0.clone(), link::admitting_builder(ADMITTED));
                    let serve = move |body, respond| forward(body, respond, agent.clone(), both.clone());
                    server_end(near, builder, client, serve).await;
                });
            }
        }
        Self {
            role,
            strangers,
            locals: Vec::new(),
            arriving,
            pairs,
            forwarded: Vec::new(),
            opens,
            shared,
            stopped: false,
            start,
        }
    }

    /// Waits until nothing moves any more, and checks what is held.
    async fn settle(&mut self) {
        for _ in 0..1000 {
            // The paused clock goes on when no task can.
            sleep(Duration::from_millis(1)).await;
            if !self.strangers.iter_mut().fold(false, |moved, stranger| stranger.exchange() || moved) {
                break;
            }
        }
        while let Ok(local) = self.arriving.try_recv() {
            self.locals.push(local);
        }
        while let Ok(pair) = self.pairs.try_recv() {
            self.forwarded.push(pair);
        }
        let held = self.shared.stalls.held();
        assert!(held <= 2 * HELD, "{held} bytes are held");
        let memory = memory::held().saturating_sub(self.start);
        assert!(memory <= MEMORY, "{memory} bytes are allocated");
    }

    /// Opens a connection, and connects it.
    async fn connect(&mut self) {
        let request = Frame::Headers { on: Pick::Next, block: Block::Request, end: false, more: false };
        match self.role {
            Role::Server => drop(self.opens.send(())),
            _ => self.strangers[0].send(&request),
        }
        self.settle().await;
        if matches!(self.role, Role::Server | Role::Middle) {
            let on = Pick::Known(0);
            let answer = Frame::Headers { on, block: Block::Connected, end: false, more: false };
            self.last().send(&answer);
            self.settle().await;
        }
    }

    fn last(&mut self) -> &mut Stranger {
        self.strangers.last_mut().expect("there is one")
    }

    async fn talk(&mut self, bytes: u16) {
        let segment = |stranger: &mut Stranger, stream: u32| {
            let (on, payload) = (Pick::Any(stream), Payload::Segments(vec![bytes]));
            stranger.send(&Frame::Data { on, payload, end: false, padding: None });
        };
        let of_locals: Vec<u32> = self.locals.iter().rev().take(TALKING).map(|local| local.stream).collect();
        for stream in of_locals {
            segment(&mut self.strangers[0], stream);
        }
        for (from, to) in self.forwarded.clone().into_iter().rev().take(TALKING) {
            segment(&mut self.strangers[0], from);
            segment(self.last(), to);
        }
        self.settle().await;
        for local in self.locals.iter_mut().rev().take(TALKING) {
            local.read(bytes);
            local.write(bytes);
        }
    }

    /// The last one is 0.
    fn local(&mut self, number: u8) -> Option<&mut Local> {
        let count = self.locals.len().max(1);
        self.locals.iter_mut().rev().nth(usize::from(number) % count)
    }

    fn stranger(&mut self, second: bool) -> &mut Stranger {
        if second { self.last() } else { &mut self.strangers[0] }
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Send { second, times, frame } => {
                for _ in 0..(times % 64).max(1) {
                    self.stranger(*second).send(frame);
                }
            }
            Step::Data { second, on, payload, end } => {
                let (on, payload) = (Pick::Known(*on), payload.clone());
                self.stranger(*second).send(&Frame::Data { on, payload, end: *end, padding: None });
            }
            Step::Connect => self.connect().await,
            Step::Open => drop(self.opens.send(())),
            Step::Talk(bytes) => self.talk(u16::from(*bytes) + 1).await,
            Step::Write(local, bytes) => drop(self.local(*local).map(|local| local.write(*bytes))),
            Step::Read(local, bytes) => drop(self.local(*local).map(|local| local.read(*bytes))),
            Step::Shut(local) => drop(self.local(*local).map(Local::shut)),
            Step::Drop(local) => drop(self.local(*local).and_then(|local| local.io.take())),
            Step::Reads { second, reads } => self.stranger(*second).reads = *reads,
            Step::Pass(quarters) => sleep(Duration::from_millis(250 * u64::from(*quarters))).await,
            Step::Stop => {
                self.shared.stop.cancel();
                self.stopped = true;
            }
        }
        self.settle().await;
    }

    /// If the link answers a PING, it relays a new stream.
    async fn goes_on(&mut self) {
        const PROBE: u64 = 0x1234_5678_9abc_def0;
        let stranger = &mut self.strangers[0];
        let is_full = self.role == Role::Admitting && stranger.sent.opened.len() > 64;
        if !matches!(self.role, Role::Agent | Role::Admitting) || is_full || stranger.sent.goaway {
            return;
        }
        stranger.reads = true;
        self.settle().await;
        let stranger = &mut self.strangers[0];
        if !stranger.is_between_frames() {
            return;
        }
        stranger.send(&Frame::Ping { ack: false, payload: PROBE });
        self.settle().await;
        let stranger = &mut self.strangers[0];
        let highest = stranger.sent.opened.iter().copied().max().unwrap_or(0);
        if !stranger.has_pong(PROBE) || stranger.seen.goaway || highest > 1 << 30 {
            return;
        }
        // A target that connects.
        let stream = ((highest >> 4) + 1 << 4) + 1;
        stranger.send(&Frame::Headers {
            on: Pick::Any(stream),
            block: Block::Request,
            end: false,
            more: false,
        });
        let payload = Payload::Segments(vec![10]);
        stranger.send(&Frame::Data { on: Pick::Any(stream), payload, end: false, padding: None });
        self.settle().await;
        if self.strangers[0].seen.goaway {
            return;
        }
        let local = self.locals.iter_mut().find(|local| local.stream == stream);
        let local = local.expect("a link that answers PINGs takes no new stream");
        local.read(100);
        assert_eq!(local.read.len(), 10, "a new stream does not relay");
    }

    fn check(&self) {
        for local in &self.locals {
            local.check(self.role, &self.strangers[0]);
        }
        let [client, agent] = &self.strangers[..] else { return };
        for (from, to) in &self.forwarded {
            let passes = |to: &[u8], from: &[u8]| from.starts_with(to);
            assert!(passes(agent.seen.raw(*to), client.sent.raw(*from)), "{from} to {to}");
            assert!(passes(client.seen.raw(*from), agent.sent.raw(*to)), "{to} back to {from}");
        }
    }

    /// Ends the link, upon which everything ends.
    async fn end(mut self) {
        for stranger in &mut self.strangers {
            stranger.reads = true;
        }
        for _ in 0..4 {
            self.locals.iter_mut().for_each(|local| local.read(u16::MAX));
            self.settle().await;
        }
        self.check();
        for stranger in &mut self.strangers {
            stranger.hang_up();
        }
        drop(self);
        sleep(END).await;
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        assert_eq!(tasks, 0, "tasks outlive the link");
    }
}

fuzz_target!(|input: Input| {
    memory::leaves_nothing(|| {
        let start = memory::held();
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).build().expect("without sockets");
        runtime.block_on(async {
            let mut run = Run::new(input.role, start);
            run.settle().await;
            for _ in 0..input.connections % 5 {
                run.connect().await;
            }
            for step in &input.steps {
                run.step(step).await;
            }
            if !run.stopped {
                run.goes_on().await;
            }
            run.end().await;
        });
    });
});

//! The two ends of a link, against an adversary that has the other end: frames of any order, size and stream. In the middle,
//! a server forwards between an adversary that is a server and one that is an agent.
//!
//! Whatever the adversary does, the bytes of a stream reach no other one, a stream that ends well is complete, flow
//! control is kept, what is held is bounded, a link that answers PINGs takes new streams, and when it ends, everything
//! ends and is freed.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use postern_fuzz::adversary::{Adversary, LINE};
use postern_fuzz::ends::{Local, Shared, client_end, forward, open, relay, server_end, shared_by};
use postern_fuzz::frames::{Block, Frame, Payload, Pick};
use postern_fuzz::memory;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tunnel_link::link;
use tunnel_link::relay::{StallBound, StallBudget};

/// Limit on the bytes held for receivers that do not read.
const HELD: usize = 64 << 10;
/// Limit on the memory of one run, including what the adversary remembers.
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
    /// The adversary sends a frame. `second`: the agent's line in the middle.
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
    /// A new connection, up to what the adversary answers.
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

/// A run: the adversaries, and the process's ends.
struct Run {
    role: Role,
    adversaries: Vec<Adversary>,
    locals: Vec<Local>,
    arriving: mpsc::UnboundedReceiver<Local>,
    pairs: mpsc::UnboundedReceiver<(u32, u32)>,
    forwarded: Vec<(u32, u32)>,
    opens: mpsc::UnboundedSender<()>,
    shared: Shared,
    stopped: bool,
    start: usize,
}

impl Run {
    fn new(role: Role, start: usize) -> Self {
        let budget = StallBudget::new(8 * HELD);
        let stalls = Arc::new(StallBound::within(HELD, HELD, &budget));
        let (shared, arriving, pairs) = shared_by(&stalls);
        let (opens, mut wanted) = mpsc::unbounded_channel::<()>();
        let (near, far) = tokio::io::duplex(LINE);
        let mut adversaries = vec![Adversary::new(far, role != Role::Server)];
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
                adversaries.push(Adversary::new(far, false));
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
            adversaries,
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
            let mut moved = false;
            for adversary in &mut self.adversaries {
                moved |= adversary.exchange();
            }
            if !moved {
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
            _ => self.adversaries[0].send(&request),
        }
        self.settle().await;
        if matches!(self.role, Role::Server | Role::Middle) {
            let on = Pick::Known(0);
            let answer = Frame::Headers { on, block: Block::Connected, end: false, more: false };
            self.last().send(&answer);
            self.settle().await;
        }
    }

    fn last(&mut self) -> &mut Adversary {
        self.adversaries.last_mut().expect("there is one")
    }

    async fn talk(&mut self, bytes: u16) {
        let segment = |adversary: &mut Adversary, stream: u32| {
            let (on, payload) = (Pick::Any(stream), Payload::Segments(vec![bytes]));
            adversary.send(&Frame::Data { on, payload, end: false, padding: None });
        };
        let of_locals: Vec<u32> = self.locals.iter().rev().take(TALKING).map(|local| local.stream).collect();
        for stream in of_locals {
            segment(&mut self.adversaries[0], stream);
        }
        for (from, to) in self.forwarded.clone().into_iter().rev().take(TALKING) {
            segment(&mut self.adversaries[0], from);
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

    fn adversary(&mut self, second: bool) -> &mut Adversary {
        if second { self.last() } else { &mut self.adversaries[0] }
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Send { second, times, frame } => {
                for _ in 0..(times % 64).max(1) {
                    self.adversary(*second).send(frame);
                }
            }
            Step::Data { second, on, payload, end } => {
                let (on, payload) = (Pick::Known(*on), payload.clone());
                self.adversary(*second).send(&Frame::Data { on, payload, end: *end, padding: None });
            }
            Step::Connect => self.connect().await,
            Step::Open => drop(self.opens.send(())),
            Step::Talk(bytes) => self.talk(u16::from(*bytes) + 1).await,
            Step::Write(local, bytes) => drop(self.local(*local).map(|local| local.write(*bytes))),
            Step::Read(local, bytes) => drop(self.local(*local).map(|local| local.read(*bytes))),
            Step::Shut(local) => drop(self.local(*local).map(Local::shut)),
            Step::Drop(local) => drop(self.local(*local).and_then(|local| local.io.take())),
            Step::Reads { second, reads } => self.adversary(*second).reads = *reads,
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
        let adversary = &mut self.adversaries[0];
        let is_full = self.role == Role::Admitting && adversary.sent.opened.len() > 64;
        if !matches!(self.role, Role::Agent | Role::Admitting) || is_full || adversary.sent.goaway {
            return;
        }
        adversary.reads = true;
        self.settle().await;
        let adversary = &mut self.adversaries[0];
        if !adversary.is_between_frames() {
            return;
        }
        adversary.send(&Frame::Ping { ack: false, payload: PROBE });
        self.settle().await;
        let adversary = &mut self.adversaries[0];
        let highest = adversary.sent.opened.iter().copied().max().unwrap_or(0);
        if !adversary.has_pong(PROBE) || adversary.seen.goaway || highest > 1 << 30 {
            return;
        }
        // A target that connects.
        let stream = (((highest >> 4) + 1) << 4) + 1;
        adversary.send(&Frame::Headers {
            on: Pick::Any(stream),
            block: Block::Request,
            end: false,
            more: false,
        });
        let payload = Payload::Segments(vec![10]);
        adversary.send(&Frame::Data { on: Pick::Any(stream), payload, end: false, padding: None });
        self.settle().await;
        if self.adversaries[0].seen.goaway {
            return;
        }
        let local = self.locals.iter_mut().find(|local| local.stream == stream);
        let local = local.expect("a link that answers PINGs takes no new stream");
        local.read(100);
        assert_eq!(local.read.len(), 10, "a new stream does not relay");
    }

    fn check(&self) {
        for local in &self.locals {
            local.check(self.role == Role::Server, &self.adversaries[0]);
        }
        let [client, agent] = &self.adversaries[..] else { return };
        for (from, to) in &self.forwarded {
            let passes = |to: &[u8], from: &[u8]| from.starts_with(to);
            assert!(passes(agent.seen.raw(*to), client.sent.raw(*from)), "{from} to {to}");
            assert!(passes(client.seen.raw(*from), agent.sent.raw(*to)), "{to} back to {from}");
        }
    }

    /// Ends the link, upon which everything ends.
    async fn end(mut self) {
        for adversary in &mut self.adversaries {
            adversary.reads = true;
        }
        for _ in 0..4 {
            self.locals.iter_mut().for_each(|local| local.read(u16::MAX));
            self.settle().await;
        }
        self.check();
        for adversary in &mut self.adversaries {
            adversary.hang_up();
        }
    }
}

fuzz_target!(|input: Input| {
    memory::leaves_nothing(END, async |start| {
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

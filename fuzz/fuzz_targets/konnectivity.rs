//! A stream of konnectivity's packets on the end that dials, with any packet for any connection at any time.
//!
//! Bytes reach only the connection that they name, in order; each packet is answered as konnectivity does; no connection
//! says anything after its end; and when all have ended, the table is empty again and nothing is left.
#![no_main]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use arbitrary::Arbitrary;
use bytes::Bytes;
use futures_util::FutureExt as _;
use libfuzzer_sys::fuzz_target;
use postern_fuzz::adversary::pattern;
use postern_fuzz::memory;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::Status;
use tunnel_link::konnectivity::packet::Payload;
use tunnel_link::konnectivity::{
    Bounds, Connections, Dial, DialRequest, Gone, Inbox, Outbox, Packet, PacketType, Room,
};

const BOUNDS: Bounds = Bounds {
    connections: 6,
    one: 4 << 10,
    patience: Duration::from_secs(2),
    callers_share: false,
    stalled: "stalled",
    linger: Duration::from_secs(60),
    early: "unrecognized connectID",
};
/// Limit for all connections together.
const ALL: usize = 12 << 10;
/// Bytes between a connection and its target, in each direction.
const TARGET: usize = 1 << 10;
/// Packets that wait for the caller.
const PACKETS: usize = 4;
const FIRST: i64 = 100;
/// Numbers of dials from here on occur once.
const FIRST_NEW: i64 = 1000;
/// Maximum bytes that the caller sends in one run.
const MOST_SENT: usize = 4 << 20;
/// Limit on the memory of one run, which remembers everything that was sent.
const MEMORY: usize = 16 << 20;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Id {
    /// One that was given, counted from the last one.
    Known(u8),
    Any(i64),
}

#[derive(Arbitrary, Clone, Debug)]
enum Step {
    /// Of a target that connects.
    Dial {
        /// None for a new one.
        random: Option<i8>,
    },
    DialOther {
        random: i8,
        target: u8,
        other_protocol: bool,
    },
    CloseDial {
        random: i8,
    },
    Data {
        id: Id,
        bytes: u16,
    },
    Close {
        id: Id,
    },
    /// A kind that does not fit its content, or one that this end is never sent.
    Other {
        kind: u8,
        content: u8,
        id: Id,
    },
    /// The caller takes answers.
    Take(u8),
    TargetReads {
        target: u8,
        bytes: u16,
    },
    TargetWrites {
        target: u8,
        bytes: u16,
    },
    TargetEnds {
        target: u8,
    },
    TargetFails {
        target: u8,
    },
    /// Data for each of the last connections, which each target reads and answers.
    Talk {
        bytes: u8,
    },
    Pass {
        quarters: u8,
    },
}

#[derive(Arbitrary, Clone, Debug)]
struct Input {
    callers_share: bool,
    /// Connections at the start.
    connections: u8,
    steps: Vec<Step>,
}

/// A target that has been dialled.
struct Target {
    line: Option<DuplexStream>,
    /// Fails the connection.
    fail: Option<tokio::sync::oneshot::Sender<()>>,
    read: Vec<u8>,
    written: usize,
    number: u32,
    ended: bool,
}

impl Target {
    fn read(&mut self, bytes: usize) {
        let Some(line) = &mut self.line else { return };
        let mut buffer = vec![0; bytes.max(1)];
        if let Some(Ok(read)) = line.read(&mut buffer).now_or_never() {
            self.read.extend_from_slice(&buffer[..read]);
        }
    }

    fn write(&mut self, bytes: usize) {
        let Some(line) = &mut self.line else { return };
        let data = pattern(self.number, self.written, bytes);
        if let Some(Ok(written)) = line.write(&data).now_or_never() {
            self.written += written;
        }
    }
}

struct Dialler {
    targets: mpsc::UnboundedSender<(String, DuplexStream, tokio::sync::oneshot::Sender<()>)>,
}

type Connected = (DuplexStream, tokio::sync::oneshot::Receiver<()>);

#[tonic::async_trait]
impl Dial for Dialler {
    type Connected = Connected;

    /// Connects to an address that begins with "ready".
    async fn dial(&self, address: &str, gone: &Gone) -> Result<Connected, String> {
        if address == "waits:1" {
            tokio::select! {
                () = gone.cut() => return Err("the dial was closed".to_owned()),
                () = sleep(Duration::from_secs(5)) => return Err("i/o timeout".to_owned()),
            }
        }
        if !address.starts_with("ready") {
            return Err("connection refused".to_owned());
        }
        let ((near, far), (fail, failed)) = (tokio::io::duplex(TARGET), tokio::sync::oneshot::channel());
        let _ = self.targets.send((address.to_owned(), far, fail));
        Ok((near, failed))
    }

    async fn relay(
        &self,
        (line, failed): Connected,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String> {
        let (mut from, mut to) = tokio::io::split(line);
        let both = async {
            let up = async {
                tokio::io::copy(inbox, &mut to).await?;
                to.shutdown().await
            };
            let down = async {
                tokio::io::copy(&mut from, outbox).await?;
                outbox.shutdown().await
            };
            tokio::try_join!(up, down).map(drop)
        };
        tokio::select! {
            biased;
            both = both => both.map_err(|error| error.to_string()),
            () = gone.wait() => Err("the caller has ended the connection".to_owned()),
            Ok(()) = failed => Err("the target failed".to_owned()),
        }
    }
}

/// The caller's connections and dials.
#[derive(Default)]
struct Caller {
    /// Numbers of the connections, in the order of their answers.
    known: Vec<i64>,
    /// The target of a connection, if no other dial had its number.
    target_of: HashMap<i64, u32>,
    /// Dials and answers, by number.
    dials: HashMap<i64, u32>,
    /// Numbers of the targets, by number of the dial.
    numbers: HashMap<i64, u32>,
    answers: HashMap<i64, u32>,
    /// Data that was sent, and that came, by connection.
    sent: HashMap<i64, Vec<u8>>,
    came: HashMap<i64, Vec<u8>>,
    /// Those that the caller has closed, those that have ended, and those that seem complete.
    closing: HashSet<i64>,
    closed: HashSet<i64>,
    complete: HashSet<i64>,
    /// Packets for connections that never were, and their answers.
    unknown: HashMap<i64, u32>,
    refused: HashMap<i64, u32>,
}

impl Caller {
    fn take(&mut self, packet: Packet) {
        match packet.payload {
            Some(Payload::DialResponse(answer)) => {
                let answers = self.answers.entry(answer.random).or_default();
                *answers += 1;
                let dials = self.dials.get(&answer.random).copied().unwrap_or_default();
                assert!(*answers <= dials, "dial {} is answered {answers} times", answer.random);
                if answer.error.is_empty() {
                    assert!(!self.known.contains(&answer.connect_id), "{} again", answer.connect_id);
                    self.known.push(answer.connect_id);
                    if dials == 1 {
                        self.target_of.insert(answer.connect_id, self.numbers[&answer.random]);
                    }
                }
            }
            Some(Payload::Data(data)) => {
                let id = data.connect_id;
                assert!(self.known.contains(&id), "data of {id}, which is not connected");
                assert!(!self.closed.contains(&id), "data of {id}, which has ended");
                self.came.entry(id).or_default().extend_from_slice(&data.data);
            }
            Some(Payload::CloseResponse(close)) => {
                let id = close.connect_id;
                if self.known.contains(&id) {
                    if close.error.is_empty() && !self.closing.contains(&id) && !self.closed.contains(&id) {
                        self.complete.insert(id);
                    }
                    self.closed.insert(id);
                } else if self.is_unknown(id) {
                    let expected = ["unrecognized connectID", "Unknown connectID"];
                    assert!(expected.contains(&close.error.as_str()), "{id}: {}", close.error);
                    *self.refused.entry(id).or_default() += 1;
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// True if no connection can have this number.
    fn is_unknown(&self, id: i64) -> bool {
        id <= FIRST || id > FIRST + 100_000
    }
}

struct Run {
    packets: mpsc::UnboundedSender<Result<Packet, Status>>,
    answers: mpsc::Receiver<Result<Packet, Status>>,
    arriving: mpsc::UnboundedReceiver<(String, DuplexStream, tokio::sync::oneshot::Sender<()>)>,
    targets: Vec<Target>,
    caller: Caller,
    dialled: u32,
    /// Bytes of data that were sent.
    total: usize,
}

impl Run {
    fn new(callers_share: bool) -> Self {
        let ((packets, stream), (sender, answers)) = (mpsc::unbounded_channel(), mpsc::channel(PACKETS));
        let (targets, arriving) = mpsc::unbounded_channel();
        let stream =
            futures_util::stream::unfold(stream, |mut stream| async { Some((stream.recv().await?, stream)) });
        let (room, numbers) = (Arc::new(Room::new(ALL)), Arc::new(AtomicI64::new(FIRST)));
        let bounds = Bounds { callers_share, ..BOUNDS };
        let connections = Connections::new(Arc::new(Dialler { targets }), bounds, room, numbers, sender);
        tokio::spawn(connections.serve(Box::pin(stream)));
        let (targets, caller) = (Vec::new(), Caller::default());
        Self { packets, answers, arriving, targets, caller, dialled: 0, total: 0 }
    }

    fn send(&self, packet: Packet) {
        let _ = self.packets.send(Ok(packet));
    }

    fn id(&self, id: Id) -> i64 {
        let known = &self.caller.known;
        match id {
            Id::Known(_) if known.is_empty() => FIRST + 1,
            Id::Known(back) => known[known.len() - 1 - usize::from(back) % known.len()],
            Id::Any(id) => id,
        }
    }

    fn dial(&mut self, address: String, random: i64, protocol: &str) {
        self.dialled += 1;
        *self.caller.dials.entry(random).or_default() += 1;
        self.caller.numbers.insert(random, self.dialled);
        let request = DialRequest { protocol: protocol.to_owned(), address, random };
        let payload = Some(Payload::DialRequest(request));
        self.send(Packet { r#type: PacketType::DialReq.into(), payload });
    }

    fn dial_ready(&mut self, random: i64) {
        let address = format!("ready{}:1", self.dialled + 1);
        self.dial(address, random, "tcp");
    }

    async fn settle(&mut self) {
        sleep(Duration::from_millis(1)).await;
        while let Ok((address, line, fail)) = self.arriving.try_recv() {
            let number = address["ready".len()..].split(':').next().and_then(|number| number.parse().ok());
            let number = number.expect("its number");
            let (line, fail) = (Some(line), Some(fail));
            self.targets.push(Target { line, fail, read: Vec::new(), written: 0, number, ended: false });
        }
    }

    async fn take(&mut self, count: usize) {
        for _ in 0..count {
            self.settle().await;
            let Ok(Ok(packet)) = self.answers.try_recv() else { return };
            self.caller.take(packet);
        }
    }

    fn data(&mut self, id: i64, bytes: usize) {
        if self.total > MOST_SENT {
            return;
        }
        let sent = self.caller.sent.entry(id).or_default();
        let data = pattern(id as u32, sent.len(), bytes);
        sent.extend_from_slice(&data);
        self.total += bytes;
        if self.caller.is_unknown(id) && id != 0 {
            *self.caller.unknown.entry(id).or_default() += 1;
        }
        self.send(Packet::data(id, data.into()));
    }

    async fn talk(&mut self, bytes: usize) {
        let last = self.caller.known.len().saturating_sub(BOUNDS.connections);
        let known = self.caller.known[last..].to_vec();
        for id in known {
            self.data(id, bytes);
        }
        self.settle().await;
        for target in &mut self.targets {
            target.read(bytes);
            target.write(bytes);
        }
        self.take(BOUNDS.connections).await;
    }

    /// The last one is 0.
    fn target(&mut self, target: u8) -> Option<&mut Target> {
        let count = self.targets.len().max(1);
        self.targets.iter_mut().rev().nth(usize::from(target) % count)
    }

    async fn step(&mut self, step: &Step) {
        match *step {
            Step::Dial { random } => {
                self.dial_ready(random.map_or(FIRST_NEW + i64::from(self.dialled), i64::from));
            }
            Step::DialOther { random, target, other_protocol } => {
                let address = if target % 2 == 0 { "refuses:1" } else { "waits:1" };
                let protocol = if other_protocol { "udp" } else { "tcp" };
                self.dial(address.to_owned(), random.into(), protocol);
            }
            Step::CloseDial { random } => self.send(Packet::close_dial(random.into())),
            Step::Data { id, bytes } => {
                let (mut id, bytes) = (self.id(id), usize::from(bytes % (8 << 10)));
                // Data for the number of a dial that has no answer yet may be refused, or not.
                if !self.caller.is_unknown(id) && !self.caller.known.contains(&id) {
                    id = FIRST;
                }
                self.data(id, bytes);
            }
            Step::Close { id } => {
                let id = self.id(id);
                if self.caller.is_unknown(id) {
                    *self.caller.unknown.entry(id).or_default() += 1;
                }
                self.caller.closing.insert(id);
                self.send(Packet::close_request(id));
            }
            Step::Other { kind, content, id } => {
                let id = self.id(id);
                let content = match content % 5 {
                    0 => None,
                    1 => Packet::close_response(id, String::new()).payload,
                    2 => Packet::dial_response(id, Ok(id)).payload,
                    3 => Packet::drain().payload,
                    _ => Packet::data(id, Bytes::from_static(b"not data")).payload,
                };
                // DATA with its content would be data.
                let kind = if kind == PacketType::Data as u8 { PacketType::Drain as u8 } else { kind };
                self.send(Packet { r#type: kind.into(), payload: content });
            }
            Step::Take(count) => self.take(count.into()).await,
            Step::TargetReads { target, bytes } => {
                if let Some(target) = self.target(target) {
                    target.read(bytes.into());
                }
            }
            Step::TargetWrites { target, bytes } => {
                if let Some(target) = self.target(target) {
                    target.write(bytes.into());
                }
            }
            Step::Talk { bytes } => self.talk(usize::from(bytes) + 1).await,
            Step::TargetEnds { target } => {
                let Some(target) = self.target(target) else { return };
                let Some(line) = &mut target.line else { return };
                target.ended |= line.shutdown().now_or_never().is_some();
            }
            Step::TargetFails { target } => {
                if let Some(target) = self.target(target) {
                    let _ = target.fail.take().map(|fail| fail.send(()));
                    target.line = None;
                }
            }
            Step::Pass { quarters } => sleep(Duration::from_millis(250 * u64::from(quarters))).await,
        }
        self.settle().await;
    }

    /// Each target has read what was sent on its connection, and each connection has what its target has written.
    fn check(&self) {
        let caller = &self.caller;
        for (id, number) in &caller.target_of {
            let target =
                self.targets.iter().find(|target| target.number == *number).expect("it has connected");
            let sent = caller.sent.get(id).map(Vec::as_slice).unwrap_or_default();
            assert!(sent.starts_with(&target.read), "target {number} has read what {id} was not sent");
            let came = caller.came.get(id).map(Vec::as_slice).unwrap_or_default();
            assert!(came.len() <= target.written, "{id} was sent more than target {number} has written");
            let written = pattern(*number, 0, came.len());
            assert!(came == written, "{id} was sent what target {number} has not written");
            if caller.complete.contains(id) {
                let ended = target.ended || target.line.is_none();
                assert!(ended && came.len() == target.written, "{id} seems complete");
            }
        }
    }

    /// Ends all connections; the table must then have room again.
    async fn all_end(&mut self) {
        let mut quiet = 0;
        // A closed connection may go on for a while, and a queued dial connects once there is room.
        while quiet < 3 {
            sleep(BOUNDS.linger).await;
            self.settle().await;
            let before =
                self.targets.iter().filter(|target| target.line.is_some()).count() + self.answers.len();
            for target in &mut self.targets {
                target.line = None;
            }
            self.take(usize::MAX).await;
            quiet = if before == 0 { quiet + 1 } else { 0 };
        }
        self.check();
        assert_eq!(self.caller.unknown, self.caller.refused, "packets for unknown connections");
        let before = self.caller.known.len();
        let mut used: Vec<i64> = self.caller.dials.keys().copied().collect();
        used.sort_unstable();
        for number in 1..=BOUNDS.connections + 1 {
            // The number of a dial that is over can be used again.
            self.dial_ready(used.get(number - 1).copied().unwrap_or(i64::MAX - number as i64));
            self.take(10).await;
            let connected = self.caller.known.len() - before;
            assert_eq!(connected, number.min(BOUNDS.connections), "an ended connection keeps its place");
        }
    }
}

fuzz_target!(|input: Input| {
    memory::leaves_nothing(BOUNDS.linger * 2, async |start| {
        let mut run = Run::new(input.callers_share);
        run.settle().await;
        for number in 0..input.connections % 5 {
            run.dial_ready(FIRST_NEW + i64::from(number));
            run.take(1).await;
        }
        for step in &input.steps {
            run.step(step).await;
            let memory = memory::held().saturating_sub(start);
            assert!(memory <= MEMORY, "{memory} bytes are allocated");
        }
        if input.steps.len().is_multiple_of(2) {
            run.all_end().await;
        }
        run.check();
    });
});

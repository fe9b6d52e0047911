//! The other end of an HTTP/2 connection, which sends what the fuzzer chooses.

use std::collections::HashMap;
use std::sync::LazyLock;

use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tunnel_link::relay::header;

use super::direction::{ACK, Direction, END_STREAM, PADDED, PREFACE};
use super::frames::{Block, Frame, Payload, Pick, encode};

/// Maximum bytes that the adversary sends in one run.
const MOST_SENT: usize = 8 << 20;
/// Bytes that the line holds in each direction.
pub const LINE: usize = 64 << 10;
const END_HEADERS: u8 = 4;

/// The adversary's end of the line.
#[derive(Debug)]
pub struct Adversary {
    line: Option<DuplexStream>,
    client: bool,
    unsent: Vec<u8>,
    /// Rest of a segment that was begun, by stream.
    begun: HashMap<u32, Vec<u8>>,
    /// Data that was put into segments, by stream.
    offsets: HashMap<u32, usize>,
    pub sent: Direction,
    pub seen: Direction,
    total: usize,
    highest: u32,
    /// True once the first SETTINGS are acknowledged: they apply from then on. The fuzzer acknowledges others.
    acknowledged: bool,
    /// False while the adversary does not read.
    pub reads: bool,
}

/// Data of all streams; each begins at another place. Made once: the targets spend their time elsewhere.
static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mixed = |at: u32| (at.wrapping_mul(0x9e37_79b1) ^ at.wrapping_mul(at) ^ (at >> 7)) >> 13;
    // A prime number, so that no multiple of a size comes back to the same place.
    (0..65_521).map(|at| mixed(at).to_le_bytes()[0]).collect()
});

/// The data of a stream from an offset on: that of another stream, or from another offset on, differs.
pub fn pattern(stream: u32, from: usize, len: usize) -> Vec<u8> {
    let mut at = (stream as usize).wrapping_mul(40_503).wrapping_add(from) % NOISE.len();
    let mut data = Vec::with_capacity(len);
    while data.len() < len {
        data.extend_from_slice(&NOISE[at..NOISE.len().min(at + len - data.len())]);
        at = 0;
    }
    data
}

impl Adversary {
    /// `client`: it opens the streams.
    pub fn new(line: DuplexStream, client: bool) -> Self {
        let mut adversary = Self {
            line: Some(line),
            client,
            unsent: Vec::new(),
            begun: HashMap::new(),
            offsets: HashMap::new(),
            sent: Direction::new(client),
            seen: Direction::new(!client),
            total: 0,
            highest: 0,
            acknowledged: false,
            reads: true,
        };
        if client {
            adversary.push(PREFACE);
        }
        adversary.push_frame(4, 0, 0, &[]);
        adversary
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.total + bytes.len() <= MOST_SENT {
            self.total += bytes.len();
            self.unsent.extend_from_slice(bytes);
        }
    }

    fn push_frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        self.push(&[&head, payload].concat());
    }

    fn streams(&self) -> &[u32] {
        if self.client { &self.sent.opened } else { &self.seen.opened }
    }

    fn stream(&mut self, pick: Pick) -> u32 {
        match pick {
            Pick::Known(255) => 0,
            Pick::Known(back) => {
                let known = self.streams();
                let back = usize::from(back) % known.len().max(1);
                known.iter().rev().nth(back).copied().unwrap_or(1)
            }
            Pick::Next => self.next(),
            Pick::Any(stream) => stream,
        }
    }

    fn next(&mut self) -> u32 {
        if !self.client {
            return self.highest + 2;
        }
        let highest = self.streams().iter().copied().max().unwrap_or(0).max(self.highest);
        self.highest = if highest == 0 { 1 } else { (highest | 1) + 2 };
        self.highest
    }

    /// A segment with the stream's next data.
    fn segment(&mut self, stream: u32, len: usize) -> Vec<u8> {
        let offset = self.offsets.entry(stream).or_default();
        let data = pattern(stream, *offset, len);
        *offset += len;
        [&header(len).expect("short")[..], &data].concat()
    }

    fn payload(&mut self, stream: u32, payload: &Payload) -> Vec<u8> {
        match payload {
            Payload::Segments(lens) => {
                lens.iter().flat_map(|len| self.segment(stream, usize::from(*len))).collect()
            }
            Payload::Begin { len, at } => {
                let segment = self.segment(stream, usize::from(*len));
                let (first, rest) = segment.split_at(usize::from(*at).min(segment.len()));
                self.begun.entry(stream).or_default().extend_from_slice(rest);
                first.to_vec()
            }
            Payload::Rest => self.begun.remove(&stream).unwrap_or_default(),
            Payload::Raw(bytes) => bytes.clone(),
            Payload::Tiny(count) => {
                (0..*count).flat_map(|n| self.segment(stream, usize::from(n % 2))).collect()
            }
        }
    }

    /// Queues a frame.
    pub fn send(&mut self, frame: &Frame) {
        match frame {
            Frame::Data { on, payload, end, padding } => {
                let stream = self.stream(*on);
                let payload = self.payload(stream, payload);
                let flags = if *end { END_STREAM } else { 0 };
                match padding {
                    Some(padding) => {
                        let padded =
                            [&[*padding], payload.as_slice(), &vec![0; usize::from(*padding)]].concat();
                        self.push_frame(0, flags | PADDED, stream, &padded);
                    }
                    None => self.push_frame(0, flags, stream, &payload),
                }
            }
            Frame::Headers { on, block, end, more } => {
                let stream = self.stream(*on);
                let flags = if *end { END_STREAM } else { 0 } | if *more { 0 } else { END_HEADERS };
                self.push_frame(1, flags, stream, &encode(block));
            }
            Frame::Continuation { on, block, more } => {
                let stream = self.stream(*on);
                self.push_frame(9, if *more { 0 } else { END_HEADERS }, stream, &encode(block));
            }
            Frame::Reset { on, code } => {
                let stream = self.stream(*on);
                self.push_frame(3, 0, stream, &u32::from(*code).to_be_bytes());
            }
            Frame::WindowUpdate { on, by } => {
                let stream = self.stream(*on);
                self.push_frame(8, 0, stream, &by.to_be_bytes());
            }
            Frame::Room { on } => {
                let stream = self.stream(*on);
                for stream in [0, stream] {
                    self.push_frame(8, 0, stream, &(1u32 << 18).to_be_bytes());
                }
            }
            Frame::Settings(settings) => {
                let payload: Vec<u8> = settings
                    .iter()
                    .flat_map(|(id, value)| {
                        [&u16::from(*id).to_be_bytes()[..], &value.to_be_bytes()].concat()
                    })
                    .collect();
                self.push_frame(4, 0, 0, &payload);
            }
            Frame::SettingsAck => self.push_frame(4, ACK, 0, &[]),
            Frame::Ping { ack, payload } => {
                self.push_frame(6, if *ack { ACK } else { 0 }, 0, &payload.to_be_bytes());
            }
            Frame::Pong => {
                let payload = self.seen.last_ping.unwrap_or_default();
                self.push_frame(6, ACK, 0, &payload);
            }
            Frame::GoAway { last, code } => {
                let last = self.stream(*last);
                let payload = [last.to_be_bytes(), u32::from(*code).to_be_bytes()].concat();
                self.push_frame(7, 0, 0, &payload);
            }
            Frame::Priority { on, depends } => {
                let stream = self.stream(*on);
                self.push_frame(2, 0, stream, &[&depends.to_be_bytes()[..], &[7]].concat());
            }
            Frame::Promise { on, promised } => {
                let (stream, promised) = (self.stream(*on), self.stream(*promised));
                let payload = [&promised.to_be_bytes()[..], &encode(&Block::Request)].concat();
                self.push_frame(5, END_HEADERS, stream, &payload);
            }
            Frame::Unknown { kind, flags, on, payload } => {
                let stream = self.stream(*on);
                self.push_frame(*kind, *flags, stream, payload);
            }
            Frame::Torn { length, kind, flags, on, payload } => {
                let stream = self.stream(*on);
                let head = [&length.to_be_bytes()[1..], &[*kind, *flags], &stream.to_be_bytes()].concat();
                self.push(&[&head, payload.as_slice()].concat());
            }
        }
    }

    /// Moves what the line takes and has. True if anything moved.
    pub fn exchange(&mut self) -> bool {
        let Some(line) = &mut self.line else { return false };
        let mut moved = false;
        while !self.unsent.is_empty() {
            match line.write(&self.unsent).now_or_never() {
                Some(Ok(written)) if written > 0 => {
                    self.sent.take(&self.unsent[..written]);
                    self.unsent.drain(..written);
                    moved = true;
                }
                Some(_) => {
                    self.unsent.clear();
                    break;
                }
                None => break,
            }
        }
        let mut bytes = [0; 16 << 10];
        while self.reads {
            match line.read(&mut bytes).now_or_never() {
                Some(Ok(read)) if read > 0 => {
                    self.seen.take(&bytes[..read]);
                    moved = true;
                }
                _ => break,
            }
        }
        self.seen.keeps_to(&self.sent);
        if self.seen.settings && !self.acknowledged {
            self.acknowledged = true;
            self.send(&Frame::SettingsAck);
            moved = true;
        }
        moved
    }

    /// True if all that was queued is on the line, and it ends with a whole frame.
    pub fn is_between_frames(&self) -> bool {
        self.unsent.is_empty() && self.sent.preface == 0 && self.sent.rest.is_empty()
    }

    /// True if the other end has answered this PING.
    pub fn has_pong(&self, payload: u64) -> bool {
        self.seen.last_pong == Some(payload.to_be_bytes())
    }

    /// Closes the line.
    pub fn hang_up(&mut self) {
        self.line = None;
    }
}

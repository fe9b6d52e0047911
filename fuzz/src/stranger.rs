//! The other end of an HTTP/2 connection, which sends what the fuzzer chooses, and a record of what went over the line
//! in both directions.

use std::collections::HashMap;

use arbitrary::Arbitrary;
use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tunnel_link::relay::{Deframer, header};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
/// Maximum bytes that the stranger sends in one run.
const MOST_SENT: usize = 8 << 20;
/// Bytes that the line holds in each direction.
pub const LINE: usize = 64 << 10;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// Chooses a stream of the connection.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Pick {
    /// One that exists, counted from the last one.
    Known(u8),
    /// The next one that a client may open.
    Next,
    Any(u32),
}

/// A block of headers.
#[derive(Arbitrary, Clone, Debug)]
pub enum Block {
    Request,
    Connected,
    /// A trailers-only response, or trailers.
    Status {
        response: bool,
        code: u8,
    },
    Informational,
    Response(u16),
    /// More than the other end accepts, perhaps.
    Large(u16),
    Raw(Vec<u8>),
}

/// What one DATA frame carries.
#[derive(Arbitrary, Clone, Debug)]
pub enum Payload {
    /// Whole segments.
    Segments(Vec<u16>),
    /// The beginning of a segment, or its rest: `at` bytes of one with `len` bytes of data.
    Begin {
        len: u16,
        at: u8,
    },
    Rest,
    Raw(Vec<u8>),
    /// Many empty or tiny segments.
    Tiny(u8),
}

#[derive(Arbitrary, Clone, Debug)]
pub enum Frame {
    Data {
        on: Pick,
        payload: Payload,
        end: bool,
        padding: Option<u8>,
    },
    Headers {
        on: Pick,
        block: Block,
        end: bool,
        more: bool,
    },
    Continuation {
        on: Pick,
        block: Block,
        more: bool,
    },
    Reset {
        on: Pick,
        code: u8,
    },
    WindowUpdate {
        on: Pick,
        by: u32,
    },
    Room {
        on: Pick,
    },
    Settings(Vec<(u8, u32)>),
    SettingsAck,
    Ping {
        ack: bool,
        payload: u64,
    },
    /// Answers the last PING.
    Pong,
    GoAway {
        last: Pick,
        code: u8,
    },
    Priority {
        on: Pick,
        depends: u32,
    },
    Promise {
        on: Pick,
        promised: Pick,
    },
    Unknown {
        kind: u8,
        flags: u8,
        on: Pick,
        payload: Vec<u8>,
    },
    /// A frame header that does not fit what follows.
    Torn {
        length: u32,
        kind: u8,
        flags: u8,
        on: Pick,
        payload: Vec<u8>,
    },
}

/// One direction of the line, parsed for what matters here.
#[derive(Debug, Default)]
pub struct Direction {
    rest: Vec<u8>,
    preface: usize,
    /// Payload of DATA frames, without padding.
    data: HashMap<u32, Vec<u8>>,
    /// Streams in the order of their first HEADERS.
    pub opened: Vec<u32>,
    /// Length of `data` at the end of a stream.
    ended: HashMap<u32, usize>,
    pub goaway: bool,
    settings: bool,
    last_ping: Option<[u8; 8]>,
    last_pong: Option<[u8; 8]>,
    /// Flow control that the sender of this direction has granted beyond the initial windows. Stream 0 is the
    /// connection.
    granted: HashMap<u32, u64>,
    /// The largest initial window of a stream that it has announced.
    initial_window: u64,
    /// Bytes that count for flow control.
    counted: HashMap<u32, u64>,
}

impl Direction {
    fn new(preface: bool) -> Self {
        Self { preface: if preface { PREFACE.len() } else { 0 }, initial_window: 65_535, ..Self::default() }
    }

    fn take(&mut self, bytes: &[u8]) {
        let skipped = self.preface.min(bytes.len());
        self.preface -= skipped;
        self.rest.extend_from_slice(&bytes[skipped..]);
        let mut at = 0;
        while let Some(head) = self.rest.get(at..at + FRAME_HEADER) {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let (kind, flags) = (head[3], head[4]);
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
            let from = at + FRAME_HEADER;
            if self.rest.len() < from + length {
                break;
            }
            let payload = self.rest[from..from + length].to_vec();
            self.frame(kind, flags, stream, &payload);
            at = from + length;
        }
        self.rest.drain(..at);
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let number = |at: usize| {
            payload.get(at..at + 4).map(|bytes| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        match kind {
            0 => {
                for counted in [0, stream] {
                    *self.counted.entry(counted).or_default() += payload.len() as u64;
                }
                let mut data = payload;
                if flags & PADDED != 0 {
                    let Some((&padding, rest)) = data.split_first() else { return };
                    let Some(length) = rest.len().checked_sub(usize::from(padding)) else { return };
                    data = &rest[..length];
                }
                self.data.entry(stream).or_default().extend_from_slice(data);
            }
            1 => {
                if !self.opened.contains(&stream) {
                    self.opened.push(stream);
                }
            }
            4 if flags & ACK == 0 => {
                self.settings = true;
                for setting in payload.chunks_exact(6) {
                    let value = u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]);
                    if setting[..2] == [0, 4] {
                        self.initial_window = self.initial_window.max(value.into());
                    }
                }
            }
            6 => {
                let Ok(payload) = payload.try_into() else { return };
                *(if flags & ACK == 0 { &mut self.last_ping } else { &mut self.last_pong }) = Some(payload);
            }
            7 => self.goaway = true,
            8 => {
                let by = number(0).unwrap_or_default() & 0x7fff_ffff;
                *self.granted.entry(stream).or_default() += u64::from(by);
            }
            _ => {}
        }
        if kind <= 1 && flags & END_STREAM != 0 {
            let length = self.raw(stream).len();
            self.ended.entry(stream).or_insert(length);
        }
    }

    /// The payload of the stream's DATA frames.
    pub fn raw(&self, stream: u32) -> &[u8] {
        self.data.get(&stream).map(Vec::as_slice).unwrap_or_default()
    }

    /// The data of the stream's segments, as far as they are segments.
    pub fn segments(&self, stream: u32) -> Vec<u8> {
        segments(self.raw(stream)).0
    }

    /// The same up to the stream's end. None if it has not ended, or inside a segment.
    pub fn complete(&self, stream: u32) -> Option<Vec<u8>> {
        let (data, whole) = segments(&self.raw(stream)[..*self.ended.get(&stream)?]);
        whole.then_some(data)
    }

    /// Fails if this direction has more DATA than the other one has granted.
    fn keeps_to(&self, other: &Self) {
        for (&stream, &counted) in &self.counted {
            let initial = if stream == 0 { 65_535 } else { other.initial_window };
            let granted = initial + other.granted.get(&stream).copied().unwrap_or_default();
            assert!(counted <= granted, "{counted} bytes on stream {stream}, which may have {granted}");
        }
    }
}

/// The data of segments, and whether all of it are whole segments.
fn segments(raw: &[u8]) -> (Vec<u8>, bool) {
    let (mut deframer, mut data) = (Deframer::default(), Vec::new());
    let mut chunk = Bytes::copy_from_slice(raw);
    loop {
        match deframer.next(&mut chunk) {
            Ok(Some(piece)) => data.extend_from_slice(&piece),
            Ok(None) => return (data, deframer.finish().is_ok()),
            Err(_) => return (data, false),
        }
    }
}

/// The stranger's end of the line.
#[derive(Debug)]
pub struct Stranger {
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
    /// False while the stranger does not read.
    pub reads: bool,
}

/// The data of a stream at an offset: that of another stream, or at another offset, differs nearly always.
pub fn pattern(stream: u32, offset: usize) -> u8 {
    let mixed = stream.wrapping_mul(0x9e37_79b1) ^ (offset as u32).wrapping_mul(0x85eb_ca6b);
    (mixed >> 23) as u8
}

impl Stranger {
    /// `client`: it opens the streams.
    pub fn new(line: DuplexStream, client: bool) -> Self {
        let mut stranger = Self {
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
            stranger.push(PREFACE);
        }
        stranger.push_frame(4, 0, 0, &[]);
        stranger
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
        let data = (*offset..*offset + len).map(|at| pattern(stream, at));
        *offset += len;
        header(len).expect("short").into_iter().chain(data).collect()
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

fn literal(name: &str, value: &str) -> Vec<u8> {
    let string = |text: &str| {
        let mut bytes = vec![u8::try_from(text.len()).expect("short")];
        bytes.extend_from_slice(text.as_bytes());
        bytes
    };
    [vec![0], string(name), string(value)].concat()
}

fn status_code(status: u16) -> Vec<u8> {
    // A literal with an indexed name, ":status".
    let text = format!("{:03}", status % 1000);
    [&[8, 3], text.as_bytes()].concat()
}

/// HPACK, without the dynamic table.
fn encode(block: &Block) -> Vec<u8> {
    match block {
        // POST, https, "/".
        Block::Request => [&[0x83, 0x87, 0x84][..], &literal("postern-target", "10.0.0.1:80")].concat(),
        Block::Connected => [&[0x88][..], &literal("content-type", "application/grpc")].concat(),
        Block::Status { response, code } => {
            let status = literal("grpc-status", &(code % 18).to_string());
            if *response { [&[0x88][..], &status].concat() } else { status }
        }
        Block::Informational => status_code(100),
        Block::Response(status) => status_code(*status),
        Block::Large(count) => {
            let each = literal("large", &"x".repeat(100));
            [vec![0x83, 0x87, 0x84], each.repeat(usize::from(*count % 400))].concat()
        }
        Block::Raw(bytes) => bytes.clone(),
    }
}

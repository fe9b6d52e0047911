//! A record of what went over the line.

use std::collections::HashMap;

use bytes::Bytes;
use tunnel_link::relay::Deframer;

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
pub(super) const END_STREAM: u8 = 1;
pub(super) const ACK: u8 = 1;
pub(super) const PADDED: u8 = 8;

/// One direction of the line, parsed for what matters here.
#[derive(Debug, Default)]
pub struct Direction {
    pub(super) rest: Vec<u8>,
    pub(super) preface: usize,
    /// Payload of DATA frames, without padding.
    data: HashMap<u32, Vec<u8>>,
    /// Streams in the order of their first HEADERS.
    pub opened: Vec<u32>,
    /// Length of `data` at the end of a stream.
    ended: HashMap<u32, usize>,
    pub goaway: bool,
    pub(super) settings: bool,
    pub(super) last_ping: Option<[u8; 8]>,
    pub(super) last_pong: Option<[u8; 8]>,
    /// Flow control that the sender of this direction has granted beyond the initial windows. Stream 0 is the
    /// connection.
    granted: HashMap<u32, u64>,
    /// The largest initial window of a stream that it has announced.
    initial_window: u64,
    /// Bytes that count for flow control.
    counted: HashMap<u32, u64>,
}

impl Direction {
    pub(super) fn new(preface: bool) -> Self {
        Self { preface: if preface { PREFACE.len() } else { 0 }, initial_window: 65_535, ..Self::default() }
    }

    pub(super) fn take(&mut self, bytes: &[u8]) {
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
            1 if !self.opened.contains(&stream) => self.opened.push(stream),
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
    pub(super) fn keeps_to(&self, other: &Self) {
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

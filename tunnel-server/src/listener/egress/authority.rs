//! Overwrites the `:authority` of callers' HTTP/2 requests.
//!
//! On a Unix socket, Go programs send the socket's path as `:authority`, with `%2F` for each slash. That is not a valid
//! authority (RFC 3986 section 3.2), so h2 refuses the request, and nothing here needs the value. So it is overwritten
//! in place, byte by byte, as header blocks (RFC 7541) pass. Its length stays the same, so frames stay as they are.
//! Read as plain text instead of Huffman code, it can only be shorter than the caller's value; then the caller's
//! dynamic table evicts an entry before ours does.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// Connection preface of HTTP/2 (RFC 9113 section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Index of `:authority` in the static table.
const AUTHORITY: u8 = 1;

/// A caller's bytes, from the beginning of its connection.
#[derive(Debug)]
pub(super) struct Masked<R> {
    inner: R,
    frames: Frames,
}

impl<R> Masked<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, frames: Frames::default() }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Masked<R> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, into))?;
        this.frames.pass(&mut into.filled_mut()[before..]);
        Poll::Ready(Ok(()))
    }
}

/// Position of the next byte in a frame.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Before this number of bytes to skip, such as the connection preface.
    Skipped(usize),
    /// In a frame's header.
    Header { bytes: [u8; FRAME_HEADER], have: usize },
    /// At the length of the padding.
    PadLength { left: usize, priority: bool },
    /// In a header block with `block` bytes left in this frame, followed by padding.
    Block { block: usize, padding: usize },
}

#[derive(Debug)]
struct Frames {
    at: At,
    /// Bytes to skip before the block begins.
    skip: usize,
    fields: Fields,
}

impl Default for Frames {
    fn default() -> Self {
        Self { at: At::Skipped(PREFACE.len()), skip: 0, fields: Fields::First }
    }
}

impl Frames {
    fn pass(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let used = match &mut self.at {
                At::Skipped(0) => {
                    self.at = At::Header { bytes: [0; FRAME_HEADER], have: 0 };
                    0
                }
                At::Skipped(left) => {
                    let skipped = bytes.len().min(*left);
                    *left -= skipped;
                    skipped
                }
                At::Header { bytes: header, have } => {
                    header[*have] = bytes[0];
                    *have += 1;
                    let (header, whole) = (*header, *have == FRAME_HEADER);
                    if whole {
                        self.at = self.frame(header);
                    }
                    1
                }
                At::PadLength { left, priority } => {
                    let (left, priority) = (*left, *priority);
                    self.at = self.block(left, usize::from(bytes[0]).min(left), priority);
                    1
                }
                At::Block { block: 0, padding } => {
                    self.at = At::Skipped(*padding);
                    0
                }
                At::Block { block, .. } => {
                    *block -= 1;
                    if self.skip > 0 {
                        self.skip -= 1;
                    } else {
                        self.fields.pass(&mut bytes[0]);
                    }
                    1
                }
            };
            bytes = &mut bytes[used..];
        }
    }

    fn frame(&mut self, header: [u8; FRAME_HEADER]) -> At {
        let [high, middle, low, kind, flags, ..] = header;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        match kind {
            HEADERS => {
                self.fields = Fields::First;
                let priority = flags & PRIORITY != 0;
                if flags & PADDED != 0 && length > 0 {
                    At::PadLength { left: length - 1, priority }
                } else {
                    self.block(length, 0, priority)
                }
            }
            CONTINUATION => self.block(length, 0, false),
            _ => At::Skipped(length),
        }
    }

    fn block(&mut self, left: usize, padding: usize, priority: bool) -> At {
        self.skip = if priority { 5 } else { 0 };
        At::Block { block: left - padding, padding }
    }
}

/// Meaning of an integer.
#[derive(Clone, Copy, Debug)]
enum Number {
    /// An index or a table size: the field ends with it.
    Last,
    /// The index of a name other than `:authority` in the static table.
    Name,
    /// The length of a string.
    Length(Text),
}

/// A string of a field.
#[derive(Clone, Copy, Debug)]
enum Text {
    Name,
    Value { masked: bool },
}

/// Position of the next byte in a header block.
#[derive(Clone, Copy, Debug)]
enum Fields {
    /// At a field's first byte.
    First,
    /// In an integer that is longer than its prefix.
    Number {
        value: usize,
        shift: u32,
        of: Number,
    },
    /// At the first byte of a string's length.
    Length(Text),
    Text {
        left: usize,
        of: Text,
    },
}

impl Fields {
    fn pass(&mut self, byte: &mut u8) {
        *self = match *self {
            Self::First => Self::first(*byte),
            Self::Number { value, shift, of } => {
                let value = value.saturating_add(usize::from(*byte & 0x7f) << shift);
                if *byte & 0x80 != 0 {
                    Self::Number { value, shift: (shift + 7).min(28), of }
                } else {
                    Self::after(value, of)
                }
            }
            Self::Length(of) => {
                if matches!(of, Text::Value { masked: true }) {
                    // The value is not Huffman-coded any more.
                    *byte &= 0x7f;
                }
                Self::number(*byte, 0x7f, Number::Length(of))
            }
            Self::Text { left, of } => {
                if matches!(of, Text::Value { masked: true }) {
                    *byte = b'a';
                }
                Self::text(left - 1, of)
            }
        };
    }

    fn first(byte: u8) -> Self {
        let literal = |prefix: u8| match byte & prefix {
            0 => Self::Length(Text::Name),
            AUTHORITY => Self::Length(Text::Value { masked: true }),
            _ => Self::number(byte, prefix, Number::Name),
        };
        match byte {
            0x80.. => Self::number(byte, 0x7f, Number::Last),
            0x40.. => literal(0x3f),
            0x20.. => Self::number(byte, 0x1f, Number::Last),
            _ => literal(0x0f),
        }
    }

    fn number(byte: u8, prefix: u8, of: Number) -> Self {
        let value = usize::from(byte & prefix);
        if byte & prefix == prefix { Self::Number { value, shift: 0, of } } else { Self::after(value, of) }
    }

    fn after(value: usize, of: Number) -> Self {
        match of {
            Number::Last => Self::First,
            Number::Name => Self::Length(Text::Value { masked: false }),
            Number::Length(of) => Self::text(value, of),
        }
    }

    fn text(left: usize, of: Text) -> Self {
        match (left, of) {
            (0, Text::Name) => Self::Length(Text::Value { masked: false }),
            (0, Text::Value { .. }) => Self::First,
            (left, of) => Self::Text { left, of },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Returns a block of fields around an authority with this value, Huffman-coded or not.
    fn block(huffman: bool, value: &[u8]) -> Vec<u8> {
        let length = u8::try_from(value.len()).unwrap();
        assert!(length < 0x7f);
        let first = if huffman { 0x80 | length } else { length };
        [
            // A table size update, :method POST, :scheme http, :path with a value.
            &[0x3f, 0xe1, 0x1f, 0x83, 0x86, 0x44, 2, b'/', 0x41][..],
            &[0x41, first],
            value,
            // A new name of 200 bytes with an empty value, and a name with a long index.
            &[0x40, 0x7f, 73],
            &[0x41; 200],
            &[0, 0x0f, 0x2f, 1, 0x41],
        ]
        .concat()
    }

    fn passed(bytes: &[u8], cuts: &[usize]) -> Vec<u8> {
        let (mut frames, mut out) = (Frames::default(), bytes.to_vec());
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        for window in at.windows(2) {
            frames.pass(&mut out[window[0]..window[1]]);
        }
        out
    }

    proptest! {
        #[test]
        fn only_the_authority_is_changed(
            value in proptest::collection::vec(any::<u8>(), 0..100),
            data in proptest::collection::vec(any::<u8>(), 0..300),
            huffman: bool,
            cuts in proptest::collection::vec(any::<usize>(), 0..20),
        ) {
            let plain = vec![b'a'; value.len()];
            let connection = |huffman: bool, value: &[u8]| {
                let block = block(huffman, value);
                let padded = [&[3, 0x41, 0x41, 0x41, 0x41, 0x41][..], &block, &[0x41, 0x41, 0x41]].concat();
                let (begin, end) = block.split_at(block.len() / 2);
                [
                    PREFACE.to_vec(),
                    frame(4, 0, &[0x41; 6]),
                    frame(HEADERS, 4, &block),
                    frame(0, 0, &data),
                    frame(HEADERS, 4 | PADDED | PRIORITY, &padded),
                    frame(HEADERS, 0, begin),
                    frame(CONTINUATION, 4, end),
                    frame(0, 1, &data),
                ]
                .concat()
            };
            prop_assert_eq!(passed(&connection(huffman, &value), &cuts), connection(false, &plain));
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), cuts in proptest::collection::vec(any::<usize>(), 0..5)) {
            let bytes = [PREFACE, &bytes].concat();
            prop_assert_eq!(passed(&bytes, &cuts), passed(&bytes, &[]));
        }
    }
}

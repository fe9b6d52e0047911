//! Segments on the wire: `message Segment { bytes data = 1; }` in gRPC's length-prefixed framing, written and read
//! without the copies that a codec makes.
//!
//! The header has a fixed size, so that data is read from the socket directly into the buffer behind it: one byte "not
//! compressed", four bytes of message length, the field's tag, and its length as a varint padded to four bytes (which
//! protobuf allows).

use bytes::{Buf, Bytes};

/// Length of a segment's header, in bytes.
pub const HEADER_LEN: usize = 10;
/// Maximum data of one segment, in bytes: the largest number in a four-byte varint.
pub const MAX_DATA: usize = (1 << 28) - 1;

const FIELD_HEADER_LEN: usize = HEADER_LEN - GRPC_PREFIX_LEN;
const GRPC_PREFIX_LEN: usize = 5;
/// Field 1, wire type 2 (length-delimited).
const TAG_DATA: u8 = 0x0a;
/// Maximum bytes of a varint for a `uint32` length.
const MAX_VARINT_LEN: u32 = 5;

/// Returns the header of a segment with `len` bytes of data; `None` if that is more than [`MAX_DATA`].
pub fn header(len: usize) -> Option<[u8; HEADER_LEN]> {
    if len > MAX_DATA {
        return None;
    }
    let len = u32::try_from(len).ok()?;
    let message = (len + u32::try_from(FIELD_HEADER_LEN).ok()?).to_be_bytes();
    let seven = |shift: u32| u8::try_from((len >> shift) & 0x7f).unwrap_or(0);
    Some([
        0,
        message[0],
        message[1],
        message[2],
        message[3],
        TAG_DATA,
        seven(0) | 0x80,
        seven(7) | 0x80,
        seven(14) | 0x80,
        seven(21),
    ])
}

/// Reason for bytes not being a sequence of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The compression flag is set, but compression was not negotiated.
    #[error("segment is marked as compressed (flag {0})")]
    Compressed(u8),
    /// The field is not field 1, length-delimited.
    #[error("segment has an unknown field (tag {0:#04x})")]
    UnknownField(u8),
    /// The varint does not end, or exceeds the message.
    #[error("segment's data length is malformed")]
    Length,
    /// The stream ended inside a segment.
    #[error("stream ended inside a segment")]
    Truncated,
}

#[derive(Clone, Copy, Debug)]
enum DeframerState {
    /// Inside the five bytes of gRPC prefix; `have` of them were read.
    Prefix { have: usize, length: u32 },
    /// At a field's tag; `left` bytes of the message remain.
    Tag { left: u32 },
    /// Inside the length; `shift` bits of it were read.
    Length { left: u32, value: u32, shift: u32 },
    /// Inside the data; `left` bytes of the message follow it.
    Data { data: u32, left: u32 },
}

/// Extracts the data of segments as they arrive, in chunks of any size, without reassembling them.
#[derive(Debug)]
pub struct Deframer {
    state: DeframerState,
}

impl Default for Deframer {
    fn default() -> Self {
        Self { state: DeframerState::Prefix { have: 0, length: 0 } }
    }
}

impl Deframer {
    /// Returns the next piece of data, removed from the front of `chunk`; `None` if the chunk is used up.
    ///
    /// # Errors
    /// Fails if the bytes are not segments. The stream cannot be read any further.
    pub fn next(&mut self, chunk: &mut Bytes) -> Result<Option<Bytes>, FrameError> {
        loop {
            if let DeframerState::Data { data, left } = self.state {
                if data == 0 {
                    self.state = after_field(left);
                    continue;
                }
                if chunk.is_empty() {
                    return Ok(None);
                }
                let take = chunk.len().min(data as usize);
                // `take` is at most `data`, which is a u32.
                let taken = u32::try_from(take).map_err(|_| FrameError::Length)?;
                self.state = match data - taken {
                    0 => after_field(left),
                    data => DeframerState::Data { data, left },
                };
                return Ok(Some(chunk.split_to(take)));
            }
            if chunk.is_empty() {
                return Ok(None);
            }
            let byte = chunk.get_u8();
            self.state = self.state.step(byte)?;
        }
    }

    /// Checks that the stream may end at this point.
    ///
    /// # Errors
    /// Returns [`FrameError::Truncated`] inside a segment.
    pub fn finish(&self) -> Result<(), FrameError> {
        match self.state {
            DeframerState::Prefix { have: 0, .. } => Ok(()),
            _ => Err(FrameError::Truncated),
        }
    }
}

fn after_field(left: u32) -> DeframerState {
    if left == 0 { DeframerState::Prefix { have: 0, length: 0 } } else { DeframerState::Tag { left } }
}

impl DeframerState {
    fn step(self, byte: u8) -> Result<Self, FrameError> {
        match self {
            Self::Prefix { have: 0, .. } => match byte {
                0 => Ok(Self::Prefix { have: 1, length: 0 }),
                flag => Err(FrameError::Compressed(flag)),
            },
            Self::Prefix { have, length } => {
                let length = length << 8 | u32::from(byte);
                if have + 1 < GRPC_PREFIX_LEN {
                    return Ok(Self::Prefix { have: have + 1, length });
                }
                Ok(after_field(length))
            }
            Self::Tag { left } => match byte {
                TAG_DATA => Ok(Self::Length { left: left - 1, value: 0, shift: 0 }),
                tag => Err(FrameError::UnknownField(tag)),
            },
            Self::Length { left, value, shift } => {
                let left = left.checked_sub(1).ok_or(FrameError::Length)?;
                if shift / 7 >= MAX_VARINT_LEN {
                    return Err(FrameError::Length);
                }
                let bits = u64::from(byte & 0x7f) << shift;
                let value = u32::try_from(u64::from(value) | bits).map_err(|_| FrameError::Length)?;
                if byte & 0x80 != 0 {
                    return Ok(Self::Length { left, value, shift: shift + 7 });
                }
                let rest = left.checked_sub(value).ok_or(FrameError::Length)?;
                Ok(Self::Data { data: value, left: rest })
            }
            data @ Self::Data { .. } => Ok(data),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto;
    use proptest::prelude::*;
    use prost::Message;

    fn deframe(chunks: impl IntoIterator<Item = Bytes>) -> Result<Vec<u8>, FrameError> {
        let mut deframer = Deframer::default();
        let mut out = Vec::new();
        for mut chunk in chunks {
            while let Some(data) = deframer.next(&mut chunk)? {
                out.extend_from_slice(&data);
            }
        }
        deframer.finish().map(|()| out)
    }

    fn frame(data: &[u8]) -> Vec<u8> {
        let mut bytes = header(data.len()).unwrap().to_vec();
        bytes.extend_from_slice(data);
        bytes
    }

    fn split(bytes: &[u8], cuts: &[usize]) -> Vec<Bytes> {
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        at.windows(2).map(|w| Bytes::copy_from_slice(&bytes[w[0]..w[1]])).collect()
    }

    proptest! {
        #[test]
        fn data_survives_any_split(
            segments in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 0..6),
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let wire: Vec<u8> = segments.iter().flat_map(|data| frame(data)).collect();
            prop_assert_eq!(deframe(split(&wire, &cuts)), Ok(segments.concat()));
        }

        #[test]
        fn prost_reads_our_segments_and_we_read_those_of_prost(data in proptest::collection::vec(any::<u8>(), 0..70_000)) {
            let ours = frame(&data);
            let theirs = proto::Segment::decode(&ours[GRPC_PREFIX_LEN..]).unwrap();
            prop_assert_eq!(&theirs.data[..], &data[..]);
            let encoded = theirs.encode_to_vec();
            let mut wire = vec![0];
            wire.extend_from_slice(&u32::try_from(encoded.len()).unwrap().to_be_bytes());
            wire.extend_from_slice(&encoded);
            prop_assert_eq!(deframe([Bytes::from(wire)]), Ok(data));
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300), cuts in proptest::collection::vec(any::<usize>(), 0..5)) {
            let whole = deframe([Bytes::from(bytes.clone())]);
            prop_assert_eq!(deframe(split(&bytes, &cuts)), whole);
        }
    }

    #[test]
    fn malformed_segments_are_rejected_with_their_reason() {
        assert_eq!(deframe([Bytes::from_static(&[1])]), Err(FrameError::Compressed(1)));
        assert_eq!(
            deframe([Bytes::from_static(&[0, 0, 0, 0, 2, 0x12, 0])]),
            Err(FrameError::UnknownField(0x12))
        );
        assert_eq!(deframe([Bytes::from_static(&[0, 0, 0, 0, 3, TAG_DATA, 9, 0])]), Err(FrameError::Length));
        assert_eq!(deframe([Bytes::from_static(&[0, 0, 0, 0, 3, TAG_DATA, 1])]), Err(FrameError::Truncated));
        assert_eq!(
            deframe([Bytes::from_static(&[0, 0, 0, 0, 0])]),
            Ok(vec![]),
            "an empty message is an empty segment"
        );
    }

    #[test]
    fn the_largest_segment_fills_the_length() {
        assert_eq!(header(MAX_DATA + 1), None);
        assert_eq!(header(MAX_DATA), Some([0, 0x10, 0, 0, 4, TAG_DATA, 0xff, 0xff, 0xff, 0x7f]));
        assert_eq!(header(0), Some([0, 0, 0, 0, 5, TAG_DATA, 0x80, 0x80, 0x80, 0]));
    }

    #[test]
    fn a_length_has_five_bytes_at_most() {
        let with_length = |length: &[u8]| {
            let message = u8::try_from(1 + length.len()).unwrap();
            deframe([Bytes::from([&[0, 0, 0, 0, message, TAG_DATA], length].concat())])
        };
        assert_eq!(with_length(&[0x80, 0x80, 0x80, 0x80, 0]), Ok(vec![]));
        assert_eq!(with_length(&[0x80, 0x80, 0x80, 0x80, 0x80, 0]), Err(FrameError::Length));
        // 2^32 does not fit, whatever the message's own length.
        assert_eq!(with_length(&[0x80, 0x80, 0x80, 0x80, 0x10]), Err(FrameError::Length));
    }
}

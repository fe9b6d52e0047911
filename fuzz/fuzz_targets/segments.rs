//! Segments of a relayed connection, as they come out of HTTP/2 DATA frames of any size.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use tunnel_link::proto::Segment;
use tunnel_link::relay::{Deframer, FrameError, header};

/// The data that the chunks carry, and the result at their end.
fn deframe<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, Result<(), FrameError>) {
    let (mut deframer, mut data) = (Deframer::default(), Vec::new());
    for chunk in chunks {
        let mut chunk = Bytes::copy_from_slice(chunk);
        loop {
            match deframer.next(&mut chunk) {
                Ok(Some(piece)) => data.extend_from_slice(&piece),
                Ok(None) => break,
                Err(error) => return (data, Err(error)),
            }
        }
    }
    let end = deframer.finish();
    (data, end)
}

/// A reference decoder: plain gRPC framing and protobuf.
fn model(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    while !bytes.is_empty() {
        let (prefix, rest) = bytes.split_at_checked(5)?;
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        let (message, rest) = rest.split_at_checked(length)?;
        (prefix[0] == 0).then_some(())?;
        data.extend_from_slice(&Segment::decode(message).ok()?.data);
        bytes = rest;
    }
    Some(data)
}

fuzz_target!(|input: &[u8]| {
    let Some((&size, bytes)) = input.split_first() else { return };
    let (whole, end) = deframe(std::iter::once(bytes));
    let pieces = deframe(bytes.chunks(usize::from(size) + 1));
    assert_eq!((&whole, &end), (&pieces.0, &pieces.1), "the result depends on how the bytes are split");
    if end.is_ok() && bytes.len() < 1 << 16 {
        // If a message repeats its field, protobuf keeps the last, and the deframer all of them.
        let decoded = model(bytes).expect("protobuf accepts what the deframer accepts");
        assert!(decoded.len() <= whole.len());
    }
    // A written segment can be read.
    let framed = [&header(bytes.len()).expect("inputs are short")[..], bytes].concat();
    assert_eq!(deframe(framed.chunks(7)), (bytes.to_vec(), Ok(())));
    assert_eq!(model(&framed).as_deref(), Some(bytes));
});

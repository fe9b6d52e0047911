//! Frames that the fuzzer chooses.

use arbitrary::Arbitrary;

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

/// Content of one DATA frame.
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
pub(super) fn encode(block: &Block) -> Vec<u8> {
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

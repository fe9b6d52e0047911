//! Floods of HTTP/2 frames (RFC 9113), written by hand: no library sends them.
use std::time::Duration;

use anyhow::{Context as _, Result};
use postern_testbed::client::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Frame types (section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const UNKNOWN: u8 = 0xfa;

const END_HEADERS: u8 = 4;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Minimum number of bytes per write.
const BATCH: usize = 100_000;

/// The flooder's role in HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// An agent on its link: the server makes the requests.
    Answering,
    /// An unauthenticated client of the server's enrolment.
    Asking,
}

/// Frames that are sent without end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flood {
    /// Each requires an acknowledgement, which the flooder does not read.
    Settings,
    /// As above.
    Pings,
    /// On the one stream that the server has opened; or each on a stream opened just before (CVE-2023-44487).
    Resets,
    WindowUpdates,
    /// Of one header block that never ends (CVE-2024-27316).
    Continuations,
    /// On one stream (CVE-2019-9518).
    EmptyData,
    Priorities,
    /// Header lists of 64 KiB.
    LargeHeaders,
    Promises,
    /// A frame type unknown to RFC 9113, to be ignored.
    Unknown,
}

impl Flood {
    pub(crate) const ALL: [Self; 10] = [
        Self::Settings,
        Self::Pings,
        Self::Resets,
        Self::WindowUpdates,
        Self::Continuations,
        Self::EmptyData,
        Self::Priorities,
        Self::LargeHeaders,
        Self::Promises,
        Self::Unknown,
    ];

    /// Returns the frames before the flood itself, on stream 1.
    fn beginning(self, role: Role) -> Vec<u8> {
        match self {
            Self::Continuations => frame(HEADERS, 0, 1, &head(role)),
            Self::EmptyData => frame(HEADERS, END_HEADERS, 1, &head(role)),
            _ => Vec::new(),
        }
    }

    /// Returns the next frame or frames. `stream` is one that was not used before.
    fn next(self, role: Role, stream: u32) -> Vec<u8> {
        let of_stream = if role == Role::Asking { stream } else { 1 };
        match self {
            Self::Settings => frame(SETTINGS, 0, 0, &[]),
            Self::Pings => frame(PING, 0, 0, &u64::from(stream).to_be_bytes()),
            Self::Resets => {
                const CANCEL: [u8; 4] = [0, 0, 0, 8];
                let opened = match role {
                    Role::Asking => frame(HEADERS, END_HEADERS, of_stream, &head(role)),
                    Role::Answering => Vec::new(),
                };
                [opened, frame(RST_STREAM, 0, of_stream, &CANCEL)].concat()
            }
            Self::WindowUpdates => frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]),
            Self::Continuations => frame(CONTINUATION, 0, 1, &field(b"x", b"y")),
            Self::EmptyData => frame(DATA, 0, 1, &[]),
            Self::Priorities => frame(PRIORITY, 0, of_stream, &[0, 0, 0, 0, 1]),
            Self::LargeHeaders => {
                let large = field(b"x", &[b'y'; 1 << 16]);
                frame(HEADERS, END_HEADERS, of_stream, &[head(role), large].concat())
            }
            Self::Promises => frame(PUSH_PROMISE, END_HEADERS, 1, &[vec![0, 0, 0, 2], head(role)].concat()),
            Self::Unknown => frame(UNKNOWN, 0, of_stream, &[0; 1000]),
        }
    }
}

/// Returns a frame (section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns the header block of a plain request or answer (RFC 7541: the static table, and literals that are not
/// indexed).
fn head(role: Role) -> Vec<u8> {
    match role {
        // :status 200, content-type
        Role::Answering => [&[0x88, 0x0f, 0x10][..], &string(b"application/grpc")].concat(),
        // :method POST, :scheme https, :path, :authority, content-type
        Role::Asking => [
            &[0x83, 0x87, 0x04][..],
            &string(b"/postern.tunnel.v1.Enrollment/Enroll"),
            &[0x01],
            &string(b"server"),
            &[0x0f, 0x10],
            &string(b"application/grpc"),
        ]
        .concat(),
    }
}

/// Returns a literal field that is not indexed (RFC 7541 section 6.2.2).
fn field(name: &[u8], value: &[u8]) -> Vec<u8> {
    [&[0][..], &string(name), &string(value)].concat()
}

/// Returns a string without Huffman coding (RFC 7541 section 5.2); its length is an integer with a prefix of seven
/// bits.
fn string(text: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    let mut length = text.len();
    if length < 127 {
        encoded.push(u8::try_from(length).unwrap_or_default());
    } else {
        encoded.push(127);
        length -= 127;
        while length >= 128 {
            encoded.push(u8::try_from(length % 128).unwrap_or_default() | 128);
            length /= 128;
        }
        encoded.push(u8::try_from(length).unwrap_or_default());
    }
    [encoded, text.to_vec()].concat()
}

/// Result of a flood.
#[derive(Debug)]
pub(crate) struct Flooded {
    /// Number of bytes that the connection accepted.
    pub(crate) written: u64,
    /// True if the server closed the connection.
    pub(crate) ended: bool,
}

/// Floods, and reads nothing, until the server closes the connection or `limit` is over.
pub(crate) async fn flood(
    mut stream: TlsStream<TcpStream>,
    role: Role,
    kind: Flood,
    limit: Duration,
) -> Result<Flooded> {
    let settings = frame(SETTINGS, 0, 0, &[]);
    match role {
        Role::Asking => stream.write_all(&[PREFACE, &settings].concat()).await?,
        Role::Answering => {
            stream.write_all(&settings).await?;
            let asked = tokio::time::timeout(PATIENCE, wait_for_request(&mut stream)).await;
            asked.context("the server made no request")??;
        }
    }
    let mut flooded = Flooded { written: 0, ended: false };
    let mut frames = kind.beginning(role);
    let mut streams = (1..).step_by(2);
    let flood = async {
        loop {
            while frames.len() < BATCH {
                frames.extend(kind.next(role, streams.next().unwrap_or(1)));
            }
            if stream.write_all(&frames).await.is_err() {
                return;
            }
            flooded.written += frames.len() as u64;
            frames.clear();
        }
    };
    flooded.ended = tokio::time::timeout(limit, flood).await.is_ok();
    Ok(flooded)
}

/// Reads up to the HEADERS of stream 1.
async fn wait_for_request(stream: &mut TlsStream<TcpStream>) -> Result<()> {
    let mut preface = vec![0; PREFACE.len()];
    stream.read_exact(&mut preface).await.context("the preface")?;
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.context("a frame's header")?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.context("a frame")?;
        if header[3] == HEADERS {
            return Ok(());
        }
    }
}

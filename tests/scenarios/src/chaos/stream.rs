//! Connections whose bytes are known to both ends, in both directions, and whose target says on which node it is.
//!
//! The client sends `P`, the intended node, a seed and both lengths, then its bytes, and half-closes. The target
//! answers with its own node and its bytes, and after the last byte of the client, with `.`. Whatever happens on the
//! way, an end may see a connection fail, but never other bytes, and never a clean end before the last one.
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::PATIENCE;
use rand::Rng as _;
use rand::rngs::StdRng;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

/// A client's timeouts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Timeout of the connect.
    pub(super) connect: Duration,
    /// Timeout while the other end sends nothing.
    pub(super) stall: Duration,
}

impl Patience {
    /// During faults: a stuck connection is soon retried.
    pub(super) const SHORT: Self = Self { connect: Duration::from_secs(3), stall: Duration::from_secs(4) };
    /// Without faults, but with possible packet loss: a SYN is sent again after one second and after three.
    pub(super) const LONG: Self = Self { connect: PATIENCE, stall: PATIENCE };
}

/// Timeout of a target; no client has a longer one.
const STALL: Duration = Patience::LONG.stall;
/// First byte of a TLS handshake record (RFC 8446 section 5.1); the length of its header follows below.
const HANDSHAKE: u8 = 22;
const RECORD_HEADER: usize = 5;
/// First byte of a TLS alert record, with which the https listener refuses a connection.
const ALERT: u8 = 21;
const DONE: u8 = b'.';

/// Violations seen: events that must never happen.
#[derive(Clone, Debug, Default)]
pub(super) struct Wrong(Arc<Mutex<Vec<String>>>);

impl Wrong {
    fn add(&self, what: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// Fails if there was any violation.
    pub(super) fn expect_none(&self) -> Result<()> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(seen.is_empty(), "{} wrong connections: {}", seen.len(), seen.join("; "));
        Ok(())
    }
}

/// Reason for which an end gave up.
enum Failure {
    /// The connection failed.
    Lost,
    /// Nothing came in time.
    Slow(Elapsed),
    Wrong(String),
}

impl From<std::io::Error> for Failure {
    fn from(_: std::io::Error) -> Self {
        Self::Lost
    }
}

impl From<Elapsed> for Failure {
    fn from(elapsed: Elapsed) -> Self {
        Self::Slow(elapsed)
    }
}

/// The payload of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    seed: u64,
    up: u64,
    down: u64,
    /// Pause between two chunks of the client.
    pause: Duration,
}

impl Load {
    pub(super) const SMALL: Self = Self { seed: 1, up: 16, down: 16, pause: Duration::ZERO };

    /// Draws a load: mostly small, sometimes large, sometimes long.
    pub(super) fn any(rng: &mut StdRng) -> Self {
        let mut size = |most: u64| rng.random_range(1..=most);
        let (up, down, pause) = match size(20) {
            1 => (size(2_000_000), size(2_000_000), 0),
            2 => (size(20), size(4_000_000), 0),
            3 => (size(4_000_000), size(20), 0),
            4 => (400_000, size(2_000), size(300)),
            5..=8 => (size(100_000), size(100_000), 0),
            _ => (size(200), size(200), 0),
        };
        Self { seed: rng.random(), up, down, pause: Duration::from_millis(pause) }
    }
}

/// Fills the buffer. The byte at each offset depends only on the seed and the offset (splitmix64).
fn fill(seed: u64, from: u64, buffer: &mut [u8]) {
    let mut word = [0; 8];
    let mut known = None;
    for (at, byte) in (from..).zip(buffer) {
        if known != Some(at / 8) {
            known = Some(at / 8);
            let mut z = seed.wrapping_add((at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word = (z ^ (z >> 31)).to_le_bytes();
        }
        *byte = word[usize::try_from(at % 8).unwrap_or_default()];
    }
}

async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    seed: u64,
    length: u64,
    pause: Duration,
    stall: Duration,
) -> Result<(), Failure> {
    let mut buffer = vec![0; 16 * 1024];
    let mut sent = 0;
    while sent < length {
        let chunk = usize::try_from(length - sent).unwrap_or(usize::MAX).min(buffer.len());
        fill(seed, sent, &mut buffer[..chunk]);
        timeout(stall, stream.write_all(&buffer[..chunk])).await??;
        sent += chunk as u64;
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }
    Ok(())
}

/// Reads exactly this number of bytes; an earlier clean end is a violation.
async fn receive(
    stream: &mut (impl AsyncRead + Unpin),
    seed: u64,
    length: u64,
    stall: Duration,
) -> Result<(), Failure> {
    let (mut buffer, mut expected) = (vec![0; 16 * 1024], vec![0; 16 * 1024]);
    let mut got = 0;
    while got < length {
        let most = usize::try_from(length - got).unwrap_or(usize::MAX).min(buffer.len());
        let n = timeout(stall, stream.read(&mut buffer[..most])).await??;
        if n == 0 {
            return Err(Failure::Wrong(format!("a clean end after {got} of {length} bytes")));
        }
        fill(seed, got, &mut expected[..n]);
        if buffer[..n] != expected[..n] {
            return Err(Failure::Wrong(format!("other bytes after {got} of {length}")));
        }
        got += n as u64;
    }
    Ok(())
}

async fn expect_byte(
    stream: &mut (impl AsyncRead + Unpin),
    expected: u8,
    what: &str,
    stall: Duration,
) -> Result<(), Failure> {
    let mut byte = [0];
    match timeout(stall, stream.read(&mut byte)).await?? {
        1 if byte[0] == expected => Ok(()),
        1 => Err(Failure::Wrong(format!("{what} is {} instead of {expected}", byte[0]))),
        _ => Err(Failure::Wrong(format!("a clean end instead of {what}"))),
    }
}

async fn expect_end(stream: &mut (impl AsyncRead + Unpin), stall: Duration) -> Result<(), Failure> {
    let mut byte = [0];
    match timeout(stall, stream.read(&mut byte)).await?? {
        0 => Ok(()),
        _ => Err(Failure::Wrong("bytes after the last one".to_owned())),
    }
}

/// Returns the seed of the target's bytes.
fn answer(seed: u64) -> u64 {
    seed ^ u64::MAX
}

/// Exchanges `load` with edge `node` over a connection that was just made. `first` is sent ahead of everything else.
pub(super) async fn exchange(
    mut stream: TcpStream,
    node: u8,
    first: &[u8],
    load: Load,
    stall: Duration,
    wrong: &Wrong,
) -> Result<()> {
    let abandoned = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    abandoned.context("an abandoned connection is to be reset")?;
    stream.set_nodelay(true)?;
    let mut header = first.to_vec();
    header.extend([b'P', node]);
    for number in [load.seed, load.up, load.down] {
        header.extend(number.to_be_bytes());
    }
    let (mut read, mut write) = stream.split();
    let up = async {
        timeout(stall, write.write_all(&header)).await??;
        send(&mut write, load.seed, load.up, load.pause, stall).await?;
        timeout(stall, write.shutdown()).await??;
        Ok(())
    };
    let down = async {
        match timeout(stall, read.read_u8()).await?? {
            byte if byte == node => {}
            ALERT if !first.is_empty() => return Err(Failure::Lost),
            byte => return Err(Failure::Wrong(format!("the node {byte}"))),
        }
        receive(&mut read, answer(load.seed), load.down, stall).await
    };
    let outcome = match tokio::try_join!(up, down) {
        Ok(_) => {
            async {
                expect_byte(&mut read, DONE, "the last byte", stall).await?;
                expect_end(&mut read, stall).await
            }
            .await
        }
        Err(failure) => Err(failure),
    };
    match outcome {
        Ok(()) => SockRef::from(&stream).set_linger(None).context("a connection that has ended"),
        Err(Failure::Lost) => bail!("the connection was lost"),
        Err(Failure::Slow(elapsed)) => Err(elapsed).context("the connection stood still"),
        Err(Failure::Wrong(what)) => {
            wrong.add(format!("a client of edge {node} saw {what} ({load:?})"));
            bail!("{what}")
        }
    }
}

/// The targets of every edge, on all addresses of the edge.
pub(super) struct Targets {
    _tasks: JoinSet<()>,
}

impl Targets {
    pub(super) fn start(testbed: &Testbed, port: u16, wrong: &Wrong) -> Result<Self> {
        let mut tasks = JoinSet::new();
        for (node, edge) in (0..).zip(testbed.edges()) {
            let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
            let listener = edge.ns.run(|| std::net::TcpListener::bind(address).context("a target"))?;
            listener.set_nonblocking(true).context("a target")?;
            tasks.spawn(accept_all(TcpListener::from_std(listener)?, node, wrong.clone()));
        }
        Ok(Self { _tasks: tasks })
    }
}

async fn accept_all(listener: TcpListener, node: u8, wrong: Wrong) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let wrong = wrong.clone();
                connections.spawn(async move {
                    if let Err(Failure::Wrong(what)) = serve(stream, node).await {
                        wrong.add(format!("the target of edge {node} saw {what}"));
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(mut stream: TcpStream, node: u8) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    // A connection abandoned after a failure is reset.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    let mut kind = timeout(STALL, stream.read_u8()).await??;
    if kind == HANDSHAKE {
        let mut rest = [0; RECORD_HEADER - 1];
        timeout(STALL, stream.read_exact(&mut rest)).await??;
        let mut hello = vec![0; usize::from(u16::from_be_bytes([rest[2], rest[3]]))];
        timeout(STALL, stream.read_exact(&mut hello)).await??;
        kind = timeout(STALL, stream.read_u8()).await??;
    }
    if kind != b'P' {
        return Err(Failure::Wrong(format!("a connection that begins with {kind}")));
    }
    let meant = timeout(STALL, stream.read_u8()).await??;
    if meant != node {
        return Err(Failure::Wrong(format!("a connection for edge {meant}")));
    }
    let mut numbers = [0; 3];
    for number in &mut numbers {
        *number = timeout(STALL, stream.read_u64()).await??;
    }
    let [seed, up, down] = numbers;
    let (mut read, mut write) = stream.split();
    let answers = async {
        timeout(STALL, write.write_all(&[node])).await??;
        send(&mut write, answer(seed), down, Duration::ZERO, STALL).await
    };
    let takes = async {
        receive(&mut read, seed, up, STALL).await?;
        expect_end(&mut read, STALL).await
    };
    tokio::try_join!(answers, takes)?;
    timeout(STALL, write.write_all(&[DONE])).await??;
    timeout(STALL, write.shutdown()).await??;
    SockRef::from(&stream).set_linger(None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn received(bytes: &[u8]) -> Result<(), Failure> {
        receive(&mut &*bytes, 3, 100, STALL).await
    }

    #[tokio::test]
    async fn other_bytes_and_missing_ones_are_wrong() {
        let mut bytes = [0; 100];
        fill(3, 0, &mut bytes);
        let mut parts = [0; 100];
        let (first, second) = parts.split_at_mut(37);
        fill(3, 0, first);
        fill(3, 37, second);
        assert_eq!(parts, bytes, "in two parts they are others");
        assert!(received(&bytes).await.is_ok());
        assert!(matches!(received(&bytes[..99]).await, Err(Failure::Wrong(_))), "one is missing");
        bytes.swap(50, 51);
        assert!(matches!(received(&bytes).await, Err(Failure::Wrong(_))), "two are swapped");
        assert!(matches!(expect_end(&mut &b"x"[..], STALL).await, Err(Failure::Wrong(_))), "one too many");
        let last = expect_byte(&mut &[2][..], DONE, "the last byte", STALL).await;
        assert!(matches!(last, Err(Failure::Wrong(_))));
    }
}

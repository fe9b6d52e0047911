//! What a cloud client does: connect, exchange bytes, judge how a connection ended; and HTTP for the admin pages.
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::testbed::netns::Namespace;

/// How long one step of a client may take before the scenario fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long the kernel's routes may take to follow a session's coming or going; it is milliseconds.
const SETTLE: Duration = Duration::from_secs(1);

/// Connects, with a deadline. EHOSTUNREACH is tried again for [`SETTLE`].
pub async fn connect(address: impl Into<SocketAddr>) -> Result<TcpStream> {
    let address = address.into();
    let settled = Instant::now() + SETTLE;
    loop {
        let stream = timeout(PATIENCE, TcpStream::connect(address)).await;
        match stream.with_context(|| format!("connecting to {address} took more than {PATIENCE:?}"))? {
            Err(error) if is_unreachable(&error) && Instant::now() < settled => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            result => return result.with_context(|| format!("connecting to {address}")),
        }
    }
}

fn is_unreachable(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::EHOSTUNREACH)
}

/// Connects from another namespace.
pub fn connect_from(ns: &Namespace, address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = ns.run(|| Ok(std::net::TcpStream::connect_timeout(&address, limit)));
    let stream = stream.map_err(io::Error::other)??;
    stream.set_nonblocking(true)?;
    TcpStream::from_std(stream)
}

/// The error of a connect() that must not succeed.
pub async fn connect_error(address: impl Into<SocketAddr>, limit: Duration) -> Result<io::Error> {
    let address = address.into();
    match timeout(limit, TcpStream::connect(address)).await {
        Ok(Ok(_)) => bail!("connect() to {address} succeeded but must not"),
        Ok(Err(error)) => Ok(error),
        Err(_) => Ok(io::ErrorKind::TimedOut.into()),
    }
}

/// Fails unless connect() itself fails with EHOSTUNREACH, [`SETTLE`] from now at the latest.
pub async fn expect_unreachable(address: impl Into<SocketAddr>) -> Result<()> {
    let address = address.into();
    let settled = Instant::now() + SETTLE;
    loop {
        let result = timeout(PATIENCE, TcpStream::connect(address)).await;
        match result.with_context(|| format!("connecting to {address} took more than {PATIENCE:?}"))? {
            Err(error) if is_unreachable(&error) => return Ok(()),
            _ if Instant::now() < settled => tokio::time::sleep(Duration::from_millis(5)).await,
            other => bail!("connect() to {address} came to {other:?}, expected EHOSTUNREACH"),
        }
    }
}

/// Sends `text` and expects it back.
pub async fn echo(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &[u8]) -> Result<()> {
    timeout(PATIENCE, async {
        stream.write_all(text).await.context("sending to the echo")?;
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await.context("reading the echo")?;
        ensure!(back == text, "the echo came back changed");
        Ok(())
    })
    .await
    .with_context(|| format!("no echo within {PATIENCE:?}"))?
}

/// Connects, echoes once, closes; returns the time it took.
pub async fn visit(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = connect(address).await?;
    echo(&mut stream, b"0123456789abcdef").await?;
    stream.shutdown().await.context("closing")?;
    let mut rest = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut rest))
        .await
        .context("the end did not come")?
        .context("reading the end")?;
    ensure!(rest.is_empty(), "{} bytes nobody sent", rest.len());
    Ok(start.elapsed())
}

/// How a connection ended for its reader.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum End {
    /// A clean end of file, after that many bytes.
    Eof(usize),
    /// A reset.
    Reset,
}

/// Reads to the end.
pub async fn end_of(stream: &mut TcpStream, limit: Duration) -> Result<End> {
    let mut buffer = vec![0; 64 * 1024];
    let mut total = 0;
    timeout(limit, async {
        loop {
            match stream.read(&mut buffer).await {
                Ok(0) => return Ok(End::Eof(total)),
                Ok(n) => total += n,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Reset),
                Err(error) => return Err(error).context("reading to the end"),
            }
        }
    })
    .await
    .with_context(|| format!("the connection did not end within {limit:?}"))?
}

/// Reads to a clean end; returns count and SHA-256.
pub async fn digest(stream: &mut (impl AsyncRead + Unpin)) -> Result<(u64, String)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut total = 0;
    loop {
        let n = timeout(PATIENCE, stream.read(&mut buffer))
            .await
            .context("no more bytes came")?
            .context("reading")?;
        if n == 0 {
            return Ok((total, hex(&hash.finalize())));
        }
        hash.update(&buffer[..n]);
        total += n as u64;
    }
}

/// Bytes that are the same for the same seed and do not repeat.
#[derive(Debug)]
pub struct Pattern {
    rng: StdRng,
    left: u64,
    hash: Sha256,
}

impl Pattern {
    /// `length` bytes.
    pub fn new(seed: u64, length: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), left: length, hash: Sha256::new() }
    }

    /// The next chunk; None at the end.
    pub fn chunk<'a>(&mut self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        let n = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if n == 0 {
            return None;
        }
        self.rng.fill_bytes(&mut buffer[..n]);
        self.hash.update(&buffer[..n]);
        self.left -= n as u64;
        Some(&buffer[..n])
    }

    /// Writes all of it.
    pub async fn write_to(&mut self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
        let mut buffer = vec![0; 128 * 1024];
        while let Some(chunk) = self.chunk(&mut buffer) {
            timeout(PATIENCE, stream.write_all(chunk))
                .await
                .context("the stream took no more bytes")?
                .context("writing")?;
        }
        Ok(())
    }

    /// SHA-256 of what was made.
    pub fn digest(&self) -> String {
        hex(&self.hash.clone().finalize())
    }
}

/// SHA-256 of a whole pattern.
pub fn pattern_digest(seed: u64, length: u64) -> String {
    let mut pattern = Pattern::new(seed, length);
    let mut buffer = vec![0; 128 * 1024];
    while pattern.chunk(&mut buffer).is_some() {}
    pattern.digest()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One HTTP/1.1 request on a fresh connection: status and body.
pub async fn http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    let exchange = async {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.context("HTTP handshake")?;
        let driver = tokio::spawn(connection);
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("connection", "close")
            .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
            .context("building the request")?;
        let response = sender.send_request(request).await.with_context(|| format!("{method} {path}"))?;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.context("reading the body")?.to_bytes();
        driver.abort();
        Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
    };
    timeout(PATIENCE, exchange)
        .await
        .with_context(|| format!("{method} {path} took more than {PATIENCE:?}"))?
}

/// Times of healthy traffic beside something else, for printing.
#[derive(Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    /// Notes one.
    pub fn add(&mut self, latency: Duration) {
        self.0.push(latency);
    }

    /// How many were noted.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// `N visits, p50 …, p99 …, worst …`.
    pub fn report(&mut self) -> String {
        self.0.sort_unstable();
        let at = |part: f64| {
            let last = self.0.len().saturating_sub(1);
            // Quotes a position in a list far below 2^52 entries.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a position in a short list"
            )]
            let index = (last as f64 * part) as usize;
            self.0.get(index).copied().unwrap_or_default()
        };
        format!("{} visits, p50 {:?}, p99 {:?}, worst {:?}", self.0.len(), at(0.5), at(0.99), at(1.0))
    }
}

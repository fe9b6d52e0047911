//! A client on the cloud host: connects, exchanges bytes, checks how a connection ended; also HTTP for the admin pages.
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::netns::Namespace;
use crate::report::progress;
use crate::snapshot;
use crate::wait::wait_until;

/// Time limit for one step of a client before the scenario fails, far above what a busy machine needs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum delay of the kernel's routes behind a session's start; milliseconds in practice.
const SETTLE: Duration = Duration::from_secs(1);

/// End of the time in which the route to an address may still lag behind a session's start that the test saw.
static SETTLED: Mutex<BTreeMap<IpAddr, Instant>> = Mutex::new(BTreeMap::new());

/// Notes that a session of the node with these addresses has just begun.
pub(crate) fn session_began(addresses: &[IpAddr]) {
    let settled = Instant::now() + SETTLE;
    let mut all = SETTLED.lock().unwrap_or_else(PoisonError::into_inner);
    all.extend(addresses.iter().map(|address| (*address, settled)));
}

/// Connects, with a deadline. EHOSTUNREACH is retried, and reported, only right after a session of the address's node
/// has begun: at any other time it means a lost route.
pub async fn connect(address: impl Into<SocketAddr>) -> Result<TcpStream> {
    let address = address.into();
    let settled = SETTLED.lock().unwrap_or_else(PoisonError::into_inner).get(&address.ip()).copied();
    let (start, mut retries) = (Instant::now(), 0);
    // Not `wait_for`, whose future cannot be spawned.
    let result = loop {
        match attempt(address, PATIENCE).await {
            Err(error)
                if is_unreachable(&error) && settled.is_some_and(|settled| Instant::now() < settled) =>
            {
                retries += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            result => break result,
        }
    };
    if retries > 0 {
        progress(&format!("no route to {address} for {:.0?}, in {retries} connects", start.elapsed()));
    }
    result.with_context(|| format!("connecting to {address}"))
}

/// Makes one connect(); exceeding `limit` is an error of kind TimedOut.
pub async fn attempt(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    timeout(limit, TcpStream::connect(address)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Reports whether connect() failed because the node has no tunnel.
pub fn is_unreachable(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::EHOSTUNREACH)
}

pub async fn connect_from(ns: &Namespace, address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    // A socket stays in the namespace in which it was made.
    let made = || Ok(if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() });
    let socket = ns.run(made).map_err(io::Error::other)??;
    timeout(limit, socket.connect(address)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Returns the error of a connect() that must not succeed; TimedOut if there was no answer.
pub async fn connect_error(address: impl Into<SocketAddr>, limit: Duration) -> Result<io::Error> {
    let address = address.into();
    match attempt(address, limit).await {
        Ok(_) => bail!("connect() to {address} succeeded but must not"),
        Err(error) => Ok(error),
    }
}

/// Fails unless connect() fails with EHOSTUNREACH, after a wait for the routes, which lag behind a session's end.
/// Without the redirect there would be no answer: the router drops packets that bypass it.
pub async fn expect_unreachable(address: impl Into<SocketAddr>) -> Result<()> {
    let address = address.into();
    let connected = async || Ok(attempt(address, PATIENCE).await);
    let unreachable = |result: &io::Result<TcpStream>| result.as_ref().is_err_and(is_unreachable);
    let what = format!("connect() to {address} to fail with EHOSTUNREACH");
    wait_until(&what, PATIENCE, connected, unreachable).await.map(drop)
}

/// Waits for a step of a client. One that does not end leaves a snapshot: the programs are gone once the scenario has failed.
async fn in_time<T>(step: impl Future<Output = T>, failed: impl FnOnce() -> String) -> Result<T> {
    timeout(PATIENCE, step).await.map_err(|_| {
        snapshot::take_here();
        anyhow!("{}", failed())
    })
}

/// Sends `text` and expects it back.
pub async fn echo(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &[u8]) -> Result<()> {
    let exchange = async {
        stream.write_all(text).await.context("sending to the echo")?;
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await.context("reading the echo")?;
        ensure!(back == text, "the echo came back changed");
        Ok(())
    };
    in_time(exchange, || format!("no echo within {PATIENCE:?}")).await?
}

/// Connects, echoes, and returns the open connection.
pub async fn hold(address: SocketAddr, text: &[u8]) -> Result<TcpStream> {
    let mut stream = connect(address).await?;
    echo(&mut stream, text).await?;
    Ok(stream)
}

/// Connects, echoes once and closes; returns the time taken.
pub async fn visit(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = hold(address, b"0123456789abcdef").await?;
    stream.shutdown().await.context("closing")?;
    let mut rest = Vec::new();
    in_time(stream.read_to_end(&mut rest), || "the connection did not end".to_owned())
        .await?
        .context("reading the end")?;
    ensure!(rest.is_empty(), "{} bytes that were never sent", rest.len());
    Ok(start.elapsed())
}

/// The way a connection ended for its reader.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum End {
    /// A clean end of file after this many bytes.
    Eof(usize),
    Reset,
}

/// Reads to the end.
pub async fn end_of(stream: &mut TcpStream, limit: Duration) -> Result<End> {
    end_after(stream, usize::MAX, limit).await
}

/// Reads to the end, and closes its own half once so many bytes have come.
pub async fn end_after(stream: &mut TcpStream, last: usize, limit: Duration) -> Result<End> {
    let mut buffer = vec![0; 64 * 1024];
    let mut total = 0;
    timeout(limit, async {
        loop {
            match stream.read(&mut buffer).await {
                Ok(0) => return Ok(End::Eof(total)),
                Ok(n) => {
                    total += n;
                    if total >= last {
                        // This fails if the connection was reset meanwhile, which the next read tells.
                        stream.shutdown().await.ok();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Reset),
                Err(error) => return Err(error).context("reading to the end"),
            }
        }
    })
    .await
    .unwrap_or_else(|_| {
        snapshot::take_here();
        bail!("the connection did not end within {limit:?}; {total} bytes came")
    })
}

/// Returns the end of a connection that is to end at once: its reset may arrive before connect() returns.
pub async fn end_at_once(connected: io::Result<TcpStream>) -> Result<End> {
    match connected {
        Ok(mut stream) => end_of(&mut stream, PATIENCE).await,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(End::Reset),
        Err(error) => Err(error).context("connecting"),
    }
}

/// Reads to a clean end; returns the number of bytes and their SHA-256.
pub async fn digest(stream: &mut (impl AsyncRead + Unpin)) -> Result<(u64, String)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut total = 0;
    loop {
        let n = in_time(stream.read(&mut buffer), || format!("no more bytes arrived after {total}"))
            .await?
            .context("reading")?;
        if n == 0 {
            return Ok((total, hex(&hash.finalize())));
        }
        hash.update(&buffer[..n]);
        total += n as u64;
    }
}

/// Reads text to a clean end; `missing` is the error message if the end does not come.
pub async fn text(stream: &mut (impl AsyncRead + Unpin), missing: &'static str) -> Result<String> {
    let mut text = String::new();
    in_time(stream.read_to_string(&mut text), || missing.to_owned()).await??;
    Ok(text)
}

/// Non-repeating bytes determined by a seed.
#[derive(Debug)]
pub struct Pattern {
    rng: StdRng,
    left: u64,
    hash: Sha256,
}

impl Pattern {
    pub fn new(seed: u64, length: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), left: length, hash: Sha256::new() }
    }

    /// Returns the next chunk; None at the end.
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

    pub async fn write_to(&mut self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
        let mut buffer = vec![0; 128 * 1024];
        while let Some(chunk) = self.chunk(&mut buffer) {
            in_time(stream.write_all(chunk), || "the stream took no more bytes".to_owned())
                .await?
                .context("writing")?;
        }
        Ok(())
    }

    /// Returns the SHA-256 of the bytes so far.
    pub fn digest(&self) -> String {
        hex(&self.hash.clone().finalize())
    }
}

pub fn pattern_digest(seed: u64, length: u64) -> String {
    let mut pattern = Pattern::new(seed, length);
    let mut buffer = vec![0; 128 * 1024];
    while pattern.chunk(&mut buffer).is_some() {}
    pattern.digest()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes one HTTP/1.1 request on a fresh connection: status and body.
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

//! The load generator: the same for every peer, on one thread, bounded in count and time.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use postern_testbed::load_target::{ECHO, SINK, SOURCE, Target};
use postern_testbed::percentiles::Times;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::dial::{Dialer, PATIENCE, Stream};

/// Amount of work for one line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Time for which a line is measured.
    pub(crate) span: Duration,
    /// Connections that a line opens at most, one after the other.
    pub(crate) connections: usize,
    /// Connections that are held.
    pub(crate) held: usize,
    /// Bytes of the first transfer, from which the size of the measured one is estimated.
    pub(crate) first_bytes: u64,
    /// Bytes that a transfer moves at most.
    pub(crate) bytes: u64,
    /// Time that held connections stay idle before memory is measured.
    pub(crate) idle: Duration,
    /// Batches of connect() that are timed.
    pub(crate) batches: usize,
    /// Time for windows and socket buffers of many stalled readers of a slow peer to fill.
    pub(crate) fill: Duration,
}

impl Effort {
    /// For measuring.
    pub(crate) const FULL: Self = Self {
        span: Duration::from_millis(1500),
        connections: 6_000,
        held: 2_000,
        first_bytes: 64_000_000,
        bytes: 6_000_000_000,
        idle: Duration::from_secs(1),
        batches: 30,
        fill: Duration::from_secs(5),
    };
    /// For checking that it works.
    pub(crate) const SMOKE: Self = Self {
        span: Duration::from_millis(60),
        connections: 200,
        held: 200,
        first_bytes: 2_000_000,
        bytes: 8_000_000,
        idle: Duration::ZERO,
        batches: 2,
        fill: Duration::from_secs(2),
    };
}

/// Connections that were opened, used and closed.
#[derive(Debug)]
pub(crate) struct Visits {
    pub(crate) count: u64,
    /// Time of all together.
    pub(crate) elapsed: Duration,
    /// Time of each.
    pub(crate) times: Times,
}

impl Visits {
    pub(crate) fn rate(&self) -> f64 {
        as_f64(self.count) / self.elapsed.as_secs_f64()
    }
}

/// A percentile in microseconds; an error when nothing was measured.
pub(crate) fn micros(times: &mut Times, share: f64) -> Result<f64> {
    Ok(times.percentile(share).context("nothing was measured")?.as_secs_f64() * 1e6)
}

/// Counts and bytes here are far below 2^52.
#[expect(clippy::cast_precision_loss, reason = "see above")]
pub(crate) fn as_f64(count: u64) -> f64 {
    count as f64
}

/// Connects, echoes 16 bytes, closes.
pub(crate) async fn visit(dialer: &Dialer) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = dialer.dial(ECHO).await?;
    trip(&mut stream, &mut [7; 16]).await?;
    stream.close().await?;
    Ok(start.elapsed())
}

/// The same over a path that may lose packets repeatedly: it may take `patience`.
pub(crate) async fn visit_within(dialer: &Dialer, patience: Duration) -> Result<Duration> {
    let start = Instant::now();
    let visit = async {
        let mut stream = dialer.dial_patiently(ECHO).await?;
        exchange(&mut stream, &mut [7; 16]).await?;
        stream.close().await
    };
    timeout(patience, visit).await.with_context(|| format!("a visit took longer than {patience:?}"))??;
    Ok(start.elapsed())
}

/// Sends what is in the buffer and reads as much back.
pub(crate) async fn trip(stream: &mut Stream, buffer: &mut [u8]) -> Result<()> {
    timeout(PATIENCE, exchange(stream, buffer)).await.context("the echo did not arrive")?
}

async fn exchange(stream: &mut Stream, buffer: &mut [u8]) -> Result<()> {
    stream.write_all(buffer).await.context("sending")?;
    stream.read_exact(buffer).await.context("reading the echo")?;
    Ok(())
}

/// As many visits as fit, `concurrent` at a time.
pub(crate) async fn visits(dialer: &Dialer, concurrent: usize, effort: &Effort) -> Result<Visits> {
    for _ in 0..concurrent {
        visit(dialer).await.context("warming up")?;
    }
    let left = Arc::new(AtomicUsize::new(effort.connections));
    let start = Instant::now();
    let end = start + effort.span;
    let work = |dialer: Dialer| {
        let left = Arc::clone(&left);
        async move {
            let mut times = Times::default();
            while Instant::now() < end && take(&left) {
                times.add(visit(&dialer).await?);
            }
            anyhow::Ok(times)
        }
    };
    let times = concurrently((0..concurrent).map(|_| work(dialer.clone()))).await?;
    let elapsed = start.elapsed();
    let times = Times(times.into_iter().flat_map(|times| times.0).collect());
    Ok(Visits { count: times.count() as u64, elapsed, times })
}

/// Round trips of `size` bytes on as many connections, each waiting for its own answer.
pub(crate) async fn round_trips(
    dialer: &Dialer,
    size: usize,
    connections: usize,
    effort: &Effort,
) -> Result<Times> {
    let mut streams = Vec::new();
    for _ in 0..connections {
        let mut stream = dialer.dial(ECHO).await?;
        for _ in 0..10 {
            trip(&mut stream, &mut vec![1; size]).await?;
        }
        streams.push(stream);
    }
    let end = Instant::now() + effort.span;
    let work = |mut stream: Stream| async move {
        let mut buffer = vec![1; size];
        let mut times = Times::default();
        while Instant::now() < end {
            let start = Instant::now();
            trip(&mut stream, &mut buffer).await?;
            times.add(start.elapsed());
        }
        stream.close().await?;
        anyhow::Ok(times)
    };
    let times = concurrently(streams.into_iter().map(work)).await?;
    Ok(Times(times.into_iter().flat_map(|times| times.0).collect()))
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Down,
    Up,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) bytes: u64,
    /// From the first request to the last byte.
    pub(crate) elapsed: Duration,
}

impl Transfer {
    /// MB (10^6 bytes) per second.
    pub(crate) fn rate(&self) -> f64 {
        as_f64(self.bytes) / 1e6 / self.elapsed.as_secs_f64()
    }
}

/// Number of bytes that take about the time of a line.
pub(crate) async fn bytes_for(dialer: &Dialer, way: Way, effort: &Effort) -> Result<u64> {
    let first = bulk(dialer, way, 1, effort.first_bytes).await.context("warming up")?;
    let bytes = first.rate() * 1e6 * effort.span.as_secs_f64();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive and bounded")]
    Ok((bytes as u64).clamp(effort.first_bytes, effort.bytes))
}

/// Moves that many bytes, divided among the streams.
pub(crate) async fn bulk(dialer: &Dialer, way: Way, streams: usize, bytes: u64) -> Result<Transfer> {
    let open = open(dialer, way, streams).await?;
    moved(open, way, bytes, PATIENCE, &Arc::default()).await
}

/// The same, but cut after `limit`: bytes that have arrived until then count.
pub(crate) async fn bulk_within(
    dialer: &Dialer,
    way: Way,
    streams: usize,
    bytes: u64,
    limit: Duration,
    target: &Target<'_>,
) -> Result<Transfer> {
    let open = open(dialer, way, streams).await?;
    let (downloaded, before) = (Arc::default(), target.received().await?);
    let start = Instant::now();
    // On a full line a stream may get nothing for long: the others have it.
    if let Ok(moved) = timeout(limit, moved(open, way, bytes, limit, &downloaded)).await {
        return moved;
    }
    let elapsed = start.elapsed();
    let bytes = match way {
        Way::Down => downloaded.load(Ordering::Relaxed),
        Way::Up => target.received().await? - before,
    };
    ensure!(bytes > 0, "nothing arrived within {limit:?}");
    Ok(Transfer { bytes, elapsed })
}

async fn open(dialer: &Dialer, way: Way, streams: usize) -> Result<Vec<Stream>> {
    let port = match way {
        Way::Down => SOURCE,
        Way::Up => SINK,
    };
    let mut open = Vec::new();
    for _ in 0..streams {
        open.push(dialer.dial(port).await?);
    }
    Ok(open)
}

/// Moves the bytes; `downloaded` counts those that arrive here. No stream may stall for longer than `patience`.
async fn moved(
    open: Vec<Stream>,
    way: Way,
    bytes: u64,
    patience: Duration,
    downloaded: &Arc<AtomicU64>,
) -> Result<Transfer> {
    let streams = open.len() as u64;
    let each = bytes / streams;
    let start = Instant::now();
    let transfers = open.into_iter().map(|stream| {
        let downloaded = downloaded.clone();
        async move {
            match way {
                Way::Down => download(stream, each, patience, &downloaded).await,
                Way::Up => upload(stream, each, patience).await,
            }
        }
    });
    let streams_back = concurrently(transfers).await?;
    let transfer = Transfer { bytes: each * streams, elapsed: start.elapsed() };
    for stream in streams_back {
        stream.close().await?;
    }
    Ok(transfer)
}

const CHUNK: usize = 256 * 1024;

async fn download(
    mut stream: Stream,
    bytes: u64,
    patience: Duration,
    downloaded: &AtomicU64,
) -> Result<Stream> {
    stream.write_all(&bytes.to_be_bytes()).await.context("asking for bytes")?;
    let mut chunk = vec![0; CHUNK];
    let mut left = bytes;
    while left > 0 {
        let n = timeout(patience, stream.read(&mut chunk)).await.context("no more bytes arrived")?;
        let n = n.context("reading")? as u64;
        ensure!(n > 0, "the download ended {left} bytes early");
        downloaded.fetch_add(n, Ordering::Relaxed);
        left = left.checked_sub(n).with_context(|| format!("{n} bytes arrived where {left} were left"))?;
    }
    Ok(stream)
}

async fn upload(mut stream: Stream, bytes: u64, patience: Duration) -> Result<Stream> {
    stream.write_all(&bytes.to_be_bytes()).await.context("announcing bytes")?;
    let chunk = vec![0x5a; CHUNK];
    let mut left = bytes;
    while left > 0 {
        let n = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        timeout(patience, stream.write_all(&chunk[..n])).await.context("no more bytes were taken")??;
        left -= n as u64;
    }
    // Bytes in flight may take a while.
    let answer = timeout(5 * patience, stream.read_u64()).await.context("the sink did not answer")?;
    ensure!(answer.context("reading the sink's answer")? == bytes, "not all bytes arrived");
    Ok(stream)
}

/// Opens connections until there are `count`, each used once.
pub(crate) async fn hold(dialer: &Dialer, count: usize) -> Result<Vec<Stream>> {
    const CONCURRENT: usize = 50;
    let left = Arc::new(AtomicUsize::new(count));
    let work = |dialer: Dialer| {
        let left = Arc::clone(&left);
        async move {
            let mut streams = Vec::new();
            while take(&left) {
                let mut stream = dialer.dial(ECHO).await?;
                trip(&mut stream, &mut [3; 16]).await?;
                streams.push(stream);
            }
            anyhow::Ok(streams)
        }
    };
    let streams = concurrently((0..CONCURRENT).map(|_| work(dialer.clone()))).await?;
    Ok(streams.into_iter().flatten().collect())
}

/// Takes one, if there is one left.
fn take(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// Runs all concurrently on the runtime's thread; the first error ends all.
pub(crate) async fn concurrently<T: Send + 'static>(
    work: impl Iterator<Item = impl Future<Output = Result<T>> + Send + 'static>,
) -> Result<Vec<T>> {
    let mut tasks: JoinSet<Result<T>> = work.collect();
    let mut results = Vec::new();
    while let Some(one) = tasks.join_next().await {
        results.push(one.map_err(|error| anyhow!("the load generator failed: {error}"))??);
    }
    Ok(results)
}

//! Round trips and new connections while another connection through the same peer misbehaves.
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use postern_testbed::load_target::{ECHO, HOLE, SINK, SOURCE};
use postern_testbed::percentiles::Times;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::dial::{Dialer, PATIENCE, Stream};
use crate::line::Peer;
use crate::load::{self, Effort};
use crate::record::Record;

/// Maximum time of a black-holed dial before the next one.
const HOLE_PATIENCE: Duration = Duration::from_secs(10);
/// Time for windows and socket buffers of a stalled reader to fill; milliseconds in practice.
const FILLS: Duration = Duration::from_millis(300);
/// The number of readers in `stalled-500`.
const MANY: usize = 500;
/// Bytes that each of them requests beyond those that its own end buffers: more than any peer's window, and less than
/// would exhaust the kernel's memory for sockets, which would slow every connection.
const MANY_BYTES: u64 = 2_000_000;
/// Maximum time to open them: some peers hang after a few.
const MANY_OPEN: Duration = Duration::from_secs(5);
/// Maximum wait until the disturbance is in effect.
const IN_EFFECT: Duration = Duration::from_secs(15);
/// Measuring ends after so many unanswered operations.
const ENOUGH_FAILED: usize = 3;

/// Measures during one of [`crate::catalogue::DISTURBANCES`]: lines and their values.
pub(crate) async fn measure(dialer: &Dialer, what: &str, effort: &Effort) -> Result<[(String, Others); 2]> {
    let mut held = dialer.dial(ECHO).await?;
    load::trip(&mut held, &mut [9; 64]).await?;
    let disturbance = Disturbance::start(dialer, what, effort.fill).await?;
    let mut trips = others(effort, async || load::trip(&mut held, &mut [9; 64]).await).await;
    let mut visits = others(effort, async || load::visit(dialer).await.map(drop)).await;
    drop(held);
    trips.remark.clone_from(&disturbance.remark);
    visits.remark.clone_from(&disturbance.remark);
    disturbance.stop()?;
    Ok([(format!("beside-{what}-trip"), trips), (format!("beside-{what}-visit"), visits)])
}

/// Times of the other connections' operations, and the errors of those that were not answered.
#[derive(Debug)]
pub(crate) struct Others {
    times: Times,
    failures: Vec<String>,
    remark: Option<String>,
}

async fn others(effort: &Effort, mut once: impl AsyncFnMut() -> Result<()>) -> Others {
    let (mut times, mut failures) = (Times::default(), Vec::new());
    let end = Instant::now() + effort.span;
    while failures.len() < ENOUGH_FAILED {
        let start = Instant::now();
        match once().await {
            Ok(()) => times.add(start.elapsed()),
            Err(error) => {
                times.add(PATIENCE);
                failures.push(format!("{error:#}"));
            }
        }
        // At least one of each, however slow.
        if Instant::now() >= end {
            break;
        }
    }
    Others { times, failures, remark: None }
}

impl Others {
    /// Records the p99; an unanswered operation counts with the time waited for it.
    pub(crate) fn note(mut self, record: &mut Record, peer: Peer, line: &str) -> Result<()> {
        let p99 = load::micros(&mut self.times, 0.99)?;
        match self.failures.last() {
            Some(last) if p99 >= PATIENCE.as_secs_f64() * 1e6 => {
                let failed = self.failures.len();
                record.at_least(
                    line,
                    peer,
                    p99,
                    format!("{failed} not answered within {PATIENCE:?}: {last}"),
                );
            }
            _ => record.value(line, peer, p99),
        }
        if let Some(remark) = &self.remark {
            record.missing(line, peer, remark);
        }
        Ok(())
    }
}

/// The misbehaving connections, on a thread of their own so that they do not delay the measurement.
pub(crate) struct Disturbance {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
    /// Part of it that could not be set up.
    remark: Option<String>,
}

impl Disturbance {
    /// Starts it and waits until it is in effect. `fill`: time for many stalled readers to fill the buffers in between.
    pub(crate) async fn start(dialer: &Dialer, what: &str, fill: Duration) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (in_effect, waiting) = oneshot::channel();
        let (dialer, what) = (dialer.clone(), what.to_owned());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.context("runtime")?.block_on(async {
                tokio::select! {
                    _ = stopped => Ok(()),
                    result = disturb(dialer, &what, fill, in_effect) => result,
                }
            })
        });
        let mut disturbance = Self { stop: Some(stop), thread: Some(thread), remark: None };
        match timeout(IN_EFFECT, waiting).await {
            Ok(Ok(remark)) => {
                disturbance.remark = remark;
                Ok(disturbance)
            }
            // Joining the thread returns its error.
            Ok(Err(_)) => disturbance.stop().and(Err(anyhow!("the disturbance ended early"))),
            Err(_) => disturbance.stop().and(Err(anyhow!("the disturbance did not start"))),
        }
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.stop.take();
        match self.thread.take() {
            Some(thread) => thread.join().map_err(|_| anyhow!("the disturbing thread panicked"))?,
            None => Ok(()),
        }
    }
}

impl Drop for Disturbance {
    fn drop(&mut self) {
        // Report the error that led here, not this one.
        self.end().ok();
    }
}

async fn disturb(
    dialer: Dialer,
    what: &str,
    fill: Duration,
    in_effect: oneshot::Sender<Option<String>>,
) -> Result<()> {
    let report_with = move |remark| {
        // The receiver is gone only when the run is ending.
        in_effect.send(remark).ok();
    };
    if what == "stalled-500" {
        let (_stalled, remark) = many_stalled(&dialer).await;
        tokio::time::sleep(fill).await;
        report_with(remark);
        return std::future::pending().await;
    }
    let report = || report_with(None);
    match what {
        "stalled" => {
            let _stalled = unending(&dialer).await?;
            tokio::time::sleep(FILLS).await;
            report();
            std::future::pending().await
        }
        "hole" => {
            report();
            loop {
                let dial = async {
                    let mut stream = dialer.dial_patiently(HOLE).await?;
                    // A proxy may accept before it dials.
                    stream.read_u8().await.context("reading from a black hole")
                };
                timeout(HOLE_PATIENCE, dial).await.ok();
                tokio::task::yield_now().await;
            }
        }
        "bulk-1" | "down-1" => downloads(&dialer, 1, report).await,
        "bulk-4" | "down-4" => downloads(&dialer, 4, report).await,
        "up-1" => uploads(&dialer, 1, report).await,
        "up-4" => uploads(&dialer, 4, report).await,
        _ => {
            report();
            std::future::pending().await
        }
    }
}

/// An endless download.
async fn unending(dialer: &Dialer) -> Result<Stream> {
    asked(dialer, u64::MAX).await
}

async fn asked(dialer: &Dialer, bytes: u64) -> Result<Stream> {
    let mut stream = dialer.dial(SOURCE).await?;
    stream.write_all(&bytes.to_be_bytes()).await.context("asking for bytes")?;
    Ok(stream)
}

/// Opens as many of [`MANY`] as possible; returns them, and the reason if there are fewer.
async fn many_stalled(dialer: &Dialer) -> (Vec<Stream>, Option<String>) {
    let mut open = Vec::new();
    let bytes = MANY_BYTES + dialer.taken_unread();
    let opening = async {
        while open.len() < MANY {
            open.push(asked(dialer, bytes).await?);
        }
        anyhow::Ok(())
    };
    let why_not = match timeout(MANY_OPEN, opening).await {
        Ok(Ok(())) => return (open, None),
        Ok(Err(error)) => format!("{error:#}"),
        Err(_) => format!("more took longer than {MANY_OPEN:?}"),
    };
    let remark = format!("beside {} of {MANY} readers: {why_not}", open.len());
    (open, Some(remark))
}

/// Endless uploads, over connections that are reset at the end: sending their buffered data would take long.
async fn uploads(dialer: &Dialer, count: usize, report: impl FnOnce()) -> Result<()> {
    let mut tasks = JoinSet::new();
    for _ in 0..count {
        let mut stream = dialer.dial(SINK).await?;
        stream.reset_at_end()?;
        stream.write_all(&u64::MAX.to_be_bytes()).await.context("announcing bytes")?;
        tasks.spawn(async move {
            let chunk = vec![0x5a; 64 * 1024];
            while stream.write_all(&chunk).await.is_ok() {}
        });
    }
    report();
    tasks.join_next().await;
    Err(anyhow!("an endless upload ended"))
}

/// Endless downloads that are read from the start: one that is not would be a stalled reader.
async fn downloads(dialer: &Dialer, count: usize, report: impl FnOnce()) -> Result<()> {
    let mut tasks = JoinSet::new();
    let mut begun = Vec::new();
    for _ in 0..count {
        let mut stream = unending(dialer).await?;
        let (first, came) = oneshot::channel();
        begun.push(came);
        tasks.spawn(async move {
            let mut chunk = vec![0; 256 * 1024];
            let mut first = Some(first);
            while stream.read(&mut chunk).await.is_ok_and(|n| n > 0) {
                if let Some(first) = first.take() {
                    first.send(()).ok();
                }
            }
        });
    }
    for came in begun {
        came.await.context("a download ended before its first byte")?;
    }
    report();
    tasks.join_next().await;
    Err(anyhow!("an endless download ended"))
}

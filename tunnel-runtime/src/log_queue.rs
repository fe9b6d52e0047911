//! Queue between the threads that log and the one that writes, so that no thread blocks on a standard error that
//! nobody reads or that fails. Lines that do not fit are dropped and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::fmt::MakeWriter;

use crate::gauges::Gauges;

/// Maximum number of waiting lines: about 2 MiB.
const LINES: usize = 4096;
/// Maximum time for which the end of the process waits for earlier lines to be written.
const LAST_WRITE: Duration = Duration::from_millis(1500);
/// Interval at which [`LostLines::written`] looks.
const LOOK: Duration = Duration::from_millis(1);

/// On drop, writes the lines that still wait, as far as they are read.
#[derive(Debug)]
#[must_use = "dropping it ends the log"]
pub struct LogGuard(Option<WorkerGuard>);

impl Drop for LogGuard {
    fn drop(&mut self) {
        let worker = self.0.take();
        let (written, done) = mpsc::channel();
        // In its own thread: a blocked worker is reported on standard output, which may be blocked as well.
        let flush = thread::Builder::new().name("log-end".into()).spawn(move || {
            drop(worker);
            written.send(()).ok();
        });
        if flush.is_ok() {
            done.recv_timeout(LAST_WRITE).ok();
        }
    }
}

/// Number of log lines that were not written, by reason. Clones share the numbers.
#[derive(Clone, Debug, Default)]
pub struct LostLines(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// The queue's own counter, set once the queue exists.
    dropped: OnceLock<ErrorCounter>,
    failed: AtomicU64,
    /// Lines that were logged, and those that the writing thread is done with.
    logged: AtomicU64,
    done: AtomicU64,
}

impl LostLines {
    /// Waits until all lines that were logged are written or lost.
    pub(crate) async fn written(self) {
        let logged = self.0.logged.load(Ordering::Acquire);
        // Those that are being queued now are counted by then.
        tokio::time::sleep(LOOK).await;
        let dropped = self.dropped();
        while self.0.done.load(Ordering::Acquire) + dropped < logged {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Returns the number of lines that found the queue full.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.get().map_or(0, |dropped| dropped.dropped_lines() as u64)
    }

    /// Returns the number of lines whose writing failed, for example because the disk is full.
    pub fn failed(&self) -> u64 {
        self.0.failed.load(Ordering::Relaxed)
    }
}

impl Collector for LostLines {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Log lines that were not written, by reason";
        let lost = [("queue_full", self.dropped()), ("write_failed", self.failed())];
        let labelled = lost.map(|(reason, lines)| ([("reason", reason)], lines));
        Gauges(encoder).counters("log_lines_lost", help, labelled)
    }
}

/// The queue, to which the log's layer writes one line at a time.
#[derive(Clone)]
pub(crate) struct Queue {
    queue: NonBlocking,
    lines: LostLines,
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Before the line, or `written` would not wait for it.
        self.lines.0.logged.fetch_add(1, Ordering::Release);
        self.queue.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.queue.flush()
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Starts the thread that writes to `to`.
pub(crate) fn start(to: impl Write + Send + 'static) -> (Queue, LogGuard, LostLines) {
    start_with(to, LINES)
}

fn start_with(to: impl Write + Send + 'static, lines: usize) -> (Queue, LogGuard, LostLines) {
    let lost = LostLines::default();
    let output = Output { to, lost: lost.clone(), reported: 0 };
    let (queue, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(lines)
        .thread_name("log")
        .finish(output);
    // The lock was just created, so it is not set yet.
    lost.0.dropped.set(queue.error_counter()).ok();
    (Queue { queue, lines: lost.clone() }, LogGuard(Some(guard)), lost)
}

/// The output, as used by the writing thread.
struct Output<W> {
    to: W,
    lost: LostLines,
    /// Number of lost lines that were reported.
    reported: u64,
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    /// Writes a whole line.
    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        let written = self.to.write_all(line).inspect_err(|_| {
            self.lost.0.failed.fetch_add(1, Ordering::Relaxed);
        });
        self.lost.0.done.fetch_add(1, Ordering::Release);
        written
    }

    /// Called when the queue is empty, so there is room for a line about lost lines.
    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()?;
        let lost = self.lost.dropped() + self.lost.failed();
        if lost > self.reported {
            tracing::warn!(
                lines = lost - self.reported,
                "dropped log lines: standard error is slow or not writable"
            );
            self.reported = lost;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::sync::Mutex;
    use std::time::Instant;

    const LIMIT: Duration = Duration::from_secs(20);

    fn wait_until(mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !condition() {
            assert!(Instant::now() < deadline, "the condition did not come");
            thread::yield_now();
        }
    }

    /// Writes `count` lines of 100 bytes.
    fn log(queue: &Queue, count: usize) {
        let mut queue = queue.clone();
        for number in 0..count {
            queue.write_all(format!("{number:099}\n").as_bytes()).unwrap();
        }
    }

    #[test]
    fn a_pipe_that_nobody_reads_blocks_nobody() {
        let (reader, writer) = io::pipe().unwrap();
        let (queue, guard, lost) = start_with(std::fs::File::from(OwnedFd::from(writer)), 8);
        // The pipe holds 64 KiB.
        log(&queue, 2000);
        wait_until(|| lost.dropped() > 0);
        assert_eq!(lost.failed(), 0);
        let started = Instant::now();
        drop(guard);
        assert!(started.elapsed() < LIMIT, "the end waits for a bounded time");
        drop(reader);
    }

    #[test]
    fn lost_lines_are_reported_once_there_is_room() {
        let (reader, writer) = io::pipe().unwrap();
        let (queue, _guard, lost) = start_with(std::fs::File::from(OwnedFd::from(writer)), 8);
        let subscriber = tracing_subscriber::fmt().with_writer(queue.clone()).with_ansi(false).finish();
        // The writing thread reports to the process's subscriber, which only this test sets.
        tracing::subscriber::set_global_default(subscriber).unwrap();
        log(&queue, 2000);
        wait_until(|| lost.dropped() > 0);
        let mut lines = io::BufRead::lines(io::BufReader::new(reader));
        let line = lines.find(|line| line.as_ref().unwrap().contains("dropped log lines")).unwrap().unwrap();
        assert!(line.contains("WARN") && line.contains("lines="), "{line}");
    }

    #[test]
    fn failed_writes_are_counted_and_do_not_end_the_log() {
        /// A disk that is full for the first two lines.
        struct Disk(usize, Arc<Mutex<Vec<u8>>>);
        impl Write for Disk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                if self.0 > 0 {
                    self.0 -= 1;
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.1.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = Arc::default();
        let (queue, guard, lost) = start(Disk(2, Arc::clone(&written)));
        log(&queue, 3);
        drop(guard);
        assert_eq!(lost.failed(), 2);
        assert_eq!(written.lock().unwrap().len(), 100);
    }

    #[tokio::test]
    async fn a_line_is_waited_for_until_it_is_written() {
        /// Takes its time, as a slow disk.
        struct Slow(Arc<Mutex<Vec<u8>>>);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                thread::sleep(Duration::from_millis(2));
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = Arc::default();
        let (queue, _guard, lost) = start_with(Slow(Arc::clone(&written)), 8);
        lost.clone().written().await;
        // Some do not fit, and are waited for as little as those that fail.
        log(&queue, 100);
        lost.clone().written().await;
        let lines = written.lock().unwrap().len() as u64 / 100;
        assert_eq!(lines + lost.dropped(), 100);
        log(&queue, 1);
        lost.written().await;
        assert_eq!(written.lock().unwrap().len() as u64 / 100, lines + 1);
    }
}

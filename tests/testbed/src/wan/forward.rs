//! The thread that forwards packets in one direction.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::SyncDevice;

use super::line::Line;

/// Maximum number of packets read before due packets are delivered: a device's whole queue (`txqueuelen`), so that the time
/// since which they were sent is known.
const BATCH: u32 = 2000;
/// Polling interval while packets flow: a wakeup per packet costs more CPU than forwarding it. A packet on an idle line
/// is not delayed by it if the line's delay is longer.
const GATHERED: Duration = Duration::from_micros(500);
/// Longest wait before the thread checks whether to stop.
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// Larger than any MTU.
const LARGEST_PACKET: usize = 1 << 16;

/// The thread of one direction. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Forwarder {
    line: Arc<Mutex<Line>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    pub(super) fn start(name: &str, line: Line, from: Arc<SyncDevice>, to: Arc<SyncDevice>) -> Result<Self> {
        let line = Arc::new(Mutex::new(line));
        let stop = Arc::new(AtomicBool::new(false));
        let (its_line, its_stop) = (line.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&its_line, &from, &to, &its_stop))
            .context("starting a thread")?;
        Ok(Self { line, stop, thread: Some(thread) })
    }

    pub(super) fn line(&self) -> MutexGuard<'_, Line> {
        lock(&self.line)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("wan: a forwarder has panicked");
        }
    }
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(line: &Mutex<Line>, from: &SyncDevice, to: &SyncDevice, stop: &AtomicBool) {
    // The default slack of 50 µs would be part of every delay. If this fails, delays are a little longer: no reason to
    // stop.
    let _ = nix::sys::prctl::set_timerslack(1);
    let start = Instant::now();
    let mut buffer = vec![0; LARGEST_PACKET];
    let (mut read, mut arrived) = (Vec::new(), Vec::new());
    // Time at which nothing was left to read.
    let mut before = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let mut count = 0;
        while count < BATCH {
            // Reading fails while the namespace is being removed: there is nothing left to forward.
            let Ok(n) = from.recv(&mut buffer) else { break };
            read.push(buffer[..n].to_vec());
            count += 1;
        }
        let now = start.elapsed();
        // They were sent one after the other, however long this thread waited for a processor meanwhile.
        let apart = (now - before).checked_div(count).unwrap_or_default();
        let next = {
            let mut line = lock(line);
            for packet in read.drain(..) {
                before += apart;
                line.offer(before, now, packet);
            }
            arrived.extend(std::iter::from_fn(|| line.take(now)));
            line.next()
        };
        before = now;
        let delivered = arrived.len();
        for packet in arrived.drain(..) {
            // A device that is down drops it, as a real one would.
            let _ = to.send(&packet);
        }
        if count == BATCH {
            continue;
        }
        if count > 0 || delivered > 0 {
            std::thread::sleep(GATHERED);
            continue;
        }
        let wait = next.map_or(LONGEST_WAIT, |next| next.saturating_sub(start.elapsed()).min(LONGEST_WAIT));
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        // Timeout and interruption are the same: the loop checks again.
        let _ = poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&wait));
    }
}

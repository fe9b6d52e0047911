//! The data path's threads. Each has its own runtime, so that a link, its streams and their sockets never change threads.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// Number of ready tasks polled before the sockets are polled again; a small number keeps a busy link from starving
/// others.
const EVENT_INTERVAL: u32 = 8;

/// The data path's threads. Dropping it stops them.
pub struct Workers {
    handles: Vec<Handle>,
    next: AtomicUsize,
    stop: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// If a thread or its runtime cannot be created.
    pub fn start(count: usize) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let mut workers = Self { handles: Vec::new(), next: AtomicUsize::new(0), stop, threads: Vec::new() };
        for index in 0..count.max(1) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .event_interval(EVENT_INTERVAL)
                .build()?;
            workers.handles.push(runtime.handle().clone());
            let stop = workers.stop.clone();
            let thread = std::thread::Builder::new()
                .name(format!("link-{index}"))
                .spawn(move || runtime.block_on(stop.cancelled()))?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// The runtimes of all threads.
    pub fn runtimes(&self) -> &[Handle] {
        &self.handles
    }

    /// Returns the thread for the next link, round-robin.
    pub fn next(&self) -> &Handle {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        // `start` creates at least one.
        &self.handles[turn % self.handles.len()]
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.cancel();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("data path thread panicked");
            }
        }
    }
}

//! The data path's threads. Each has its own runtime, so that a link, its streams and their sockets never change threads.
//! Handshakes, which anybody can ask for and which take long, have threads of their own, where callers' TLS and HTTP are
//! served too.

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
    /// Those of the links first.
    handles: Vec<Handle>,
    /// Number of those of the links.
    links: usize,
    next: AtomicUsize,
    next_handshake: AtomicUsize,
    stop: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads, and half as many for handshakes.
    ///
    /// # Errors
    /// If a thread or its runtime cannot be created.
    pub fn start(count: usize) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let links = count.max(1);
        let mut workers = Self {
            handles: Vec::new(),
            links,
            next: AtomicUsize::new(0),
            next_handshake: AtomicUsize::new(0),
            stop,
            threads: Vec::new(),
        };
        for index in 0..links {
            workers.add(format!("link-{index}"))?;
        }
        for index in 0..links.div_ceil(2) {
            workers.add(format!("handshake-{index}"))?;
        }
        Ok(workers)
    }

    /// Uses the current runtime for everything, without threads.
    pub fn here() -> Self {
        let handles = vec![Handle::current(); 2];
        let (next, next_handshake) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (stop, threads) = (CancellationToken::new(), Vec::new());
        Self { handles, links: 1, next, next_handshake, stop, threads }
    }

    fn add(&mut self, name: String) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(EVENT_INTERVAL)
            .build()?;
        self.handles.push(runtime.handle().clone());
        let stop = self.stop.clone();
        let thread =
            std::thread::Builder::new().name(name).spawn(move || runtime.block_on(stop.cancelled()))?;
        self.threads.push(thread);
        Ok(())
    }

    /// The runtimes of all threads.
    pub fn runtimes(&self) -> &[Handle] {
        &self.handles
    }

    /// Number of threads for handshakes.
    pub fn handshakes(&self) -> usize {
        self.handles.len() - self.links
    }

    /// Returns the thread for the next link, round-robin.
    pub fn next(&self) -> &Handle {
        in_turn(&self.handles[..self.links], &self.next)
    }

    /// Returns the thread for the next handshake, round-robin.
    pub fn next_handshake(&self) -> &Handle {
        in_turn(&self.handles[self.links..], &self.next_handshake)
    }
}

/// `handles` is not empty: [`Workers::start`] creates at least one of each.
fn in_turn<'a>(handles: &'a [Handle], next: &AtomicUsize) -> &'a Handle {
    &handles[next.fetch_add(1, Ordering::Relaxed) % handles.len()]
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

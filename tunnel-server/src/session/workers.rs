//! The data path's threads. Each has its own runtime, so that a link, its streams and their sockets never change threads.
//! Handshakes, which anybody can ask for and which take long, have threads of their own, where callers' TLS and HTTP are
//! served too.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::lifecycle::THREADS_END;

/// Number of ready tasks polled before the sockets are polled again; a small number keeps a busy link from starving
/// others.
const EVENT_INTERVAL: u32 = 8;

/// The runtimes of the data path's threads. It may be held by what runs there.
#[derive(Debug)]
pub struct Workers {
    /// Those of the links first.
    handles: Vec<Handle>,
    /// Number of those of the links.
    links: usize,
    next: AtomicUsize,
    next_handshake: AtomicUsize,
}

/// The threads. Dropping it stops them.
#[derive(Debug, Default)]
pub struct Threads {
    stop: CancellationToken,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `count` threads, and half as many for handshakes.
    ///
    /// # Errors
    /// If a thread or its runtime cannot be created.
    pub fn start(count: usize) -> io::Result<(Arc<Self>, Threads)> {
        let (links, mut threads) = (count.max(1), Threads::default());
        let mut handles = Vec::new();
        for index in 0..links {
            handles.push(threads.add(format!("link-{index}"))?);
        }
        for index in 0..links.div_ceil(2) {
            handles.push(threads.add(format!("handshake-{index}"))?);
        }
        Ok((Self::of(handles, links), threads))
    }

    /// Uses the current runtime for everything, without threads.
    pub fn here() -> Arc<Self> {
        Self::of(vec![Handle::current(); 2], 1)
    }

    fn of(handles: Vec<Handle>, links: usize) -> Arc<Self> {
        Arc::new(Self { handles, links, next: AtomicUsize::new(0), next_handshake: AtomicUsize::new(0) })
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

impl Threads {
    fn add(&mut self, name: String) -> io::Result<Handle> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(EVENT_INTERVAL)
            .build()?;
        let (handle, stop) = (runtime.handle().clone(), self.stop.clone());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            runtime.block_on(stop.cancelled());
            runtime.shutdown_timeout(THREADS_END);
        })?;
        self.threads.push(thread);
        Ok(handle)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop.cancel();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("data path thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_lookup_that_never_returns_does_not_keep_the_server() {
        let (workers, threads) = Workers::start(1).unwrap();
        let ((mut held, _open), (begun, is_begun)) = (io::pipe().unwrap(), mpsc::channel());
        workers.next().spawn_blocking(move || {
            begun.send(()).unwrap();
            held.read(&mut [0])
        });
        is_begun.recv().unwrap();
        let started = Instant::now();
        drop(threads);
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}

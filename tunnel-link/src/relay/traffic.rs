//! Counts the relayed bytes and reports waiting receivers.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;

/// Payload bytes of one connection so far, and its waiting receivers. May be read while the connection runs.
#[derive(Debug, Default)]
pub struct Traffic {
    from_socket: AtomicU64,
    to_socket: AtomicU64,
    /// The last bytes came from the socket.
    from_socket_last: AtomicBool,
    /// State of data from the tunnel that the socket does not take.
    pub for_socket: Waiting,
    /// State of data from the socket that the tunnel does not take.
    pub for_tunnel: Waiting,
    totals: Vec<Totals>,
}

/// Bytes of many connections, counted as they pass.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Bytes read from the sockets and handed to the tunnel.
    pub from_socket: Counter,
    /// Bytes taken from the tunnel and written to the sockets.
    pub to_socket: Counter,
}

impl Traffic {
    /// Also adds to each of these totals, for example those of a session and of the process.
    pub fn part_of(totals: Vec<Totals>) -> Self {
        Self { totals, ..Self::default() }
    }

    /// Bytes read from the socket and handed to the tunnel.
    pub fn from_socket(&self) -> u64 {
        self.from_socket.load(Ordering::Relaxed)
    }

    /// Bytes taken from the tunnel and written to the socket.
    pub fn to_socket(&self) -> u64 {
        self.to_socket.load(Ordering::Relaxed)
    }

    /// Reports whether the last bytes came from the socket.
    pub(super) fn is_from_socket_last(&self) -> bool {
        self.from_socket_last.load(Ordering::Relaxed)
    }

    pub fn count_from_socket(&self, bytes: usize) {
        self.from_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        self.from_socket_last.store(true, Ordering::Relaxed);
        for total in &self.totals {
            total.from_socket.inc_by(bytes as u64);
        }
    }

    pub fn count_to_socket(&self, bytes: usize) {
        self.to_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        self.from_socket_last.store(false, Ordering::Relaxed);
        for total in &self.totals {
            total.to_socket.inc_by(bytes as u64);
        }
    }
}

impl Traffic {
    /// Returns for how long the slower receiver has taken nothing.
    pub(crate) fn blocked(&self) -> Option<Duration> {
        let time = |waiting: &Waiting| waiting.now().map(|(time, _)| time);
        time(&self.for_socket).max(time(&self.for_tunnel))
    }
}

/// One direction of a connection, which may wait for its receiver.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Milliseconds since [`EPOCH`] plus one; 0 if it does not wait.
    since: AtomicU64,
    held: AtomicUsize,
}

/// A moment before anything waited.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

fn now_ms() -> u64 {
    u64::try_from(EPOCH.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

impl Waiting {
    /// Marks the receiver as blocked until the returned value is dropped. `held`: bytes that wait here for it.
    pub(super) fn begin(&self, held: usize) -> Wait<'_> {
        self.held.store(held, Ordering::Relaxed);
        self.since.store(now_ms(), Ordering::Relaxed);
        Wait(self)
    }

    /// Returns for how long the receiver has taken nothing, and the bytes that wait here for it; `None` if it is not
    /// blocked.
    pub fn now(&self) -> Option<(Duration, usize)> {
        match self.since.load(Ordering::Relaxed) {
            0 => None,
            since => {
                let lasts = Duration::from_millis(now_ms().saturating_sub(since));
                Some((lasts, self.held.load(Ordering::Relaxed)))
            }
        }
    }
}

/// A blocked receiver, until this is dropped.
#[derive(Debug)]
pub(super) struct Wait<'a>(&'a Waiting);

impl Wait<'_> {
    /// Sets the number of bytes that wait for it.
    pub(super) fn holds(&self, bytes: usize) {
        self.0.held.store(bytes, Ordering::Relaxed);
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.since.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_waits_until_it_takes_something() {
        let traffic = Traffic::default();
        assert_eq!(traffic.for_socket.now(), None);
        let wait = traffic.for_socket.begin(7);
        let (first, held) = traffic.for_socket.now().unwrap();
        assert_eq!(held, 7);
        wait.holds(9);
        let (later, held) = traffic.for_socket.now().unwrap();
        assert!(later >= first && held == 9);
        assert_eq!(traffic.for_tunnel.now(), None, "the other direction");
        drop(wait);
        assert_eq!(traffic.for_socket.now(), None);
    }
}

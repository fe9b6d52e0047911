//! Counts of dials and connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;

/// Dials and connections of one session, or of one stream of konnectivity's.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    count: AtomicUsize,
    changed: Notify,
}

/// A dial or a connection, which counts until this is dropped.
#[derive(Debug)]
pub(crate) struct BusyGuard(Arc<Busy>);

impl Busy {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) fn hold(self: &Arc<Self>) -> BusyGuard {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_waiters();
        BusyGuard(self.clone())
    }

    /// Waits until there has been none for this long.
    pub(crate) async fn quiet(&self, long: Duration) {
        loop {
            let changed = self.changed.notified();
            if self.count() > 0 {
                changed.await;
                continue;
            }
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(long) => return,
            }
        }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
        self.0.changed.notify_waiters();
    }
}

/// Counts in a gauge until it is dropped.
pub(crate) struct Counted(Gauge);

impl Counted {
    pub(crate) fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn quiet_counts_from_the_last_end() {
        const LONG: Duration = Duration::from_secs(1);
        let (busy, started) = (Arc::<Busy>::default(), Instant::now());
        let held = busy.hold();
        let other = busy.clone();
        let waiting = tokio::spawn(async move { other.quiet(LONG).await });
        tokio::time::sleep(LONG * 3).await;
        drop(held);
        // Too short for a poll to see.
        tokio::time::sleep(LONG / 2).await;
        drop(busy.hold());
        waiting.await.unwrap();
        assert_eq!(started.elapsed(), LONG * 3 + LONG / 2 + LONG);
    }
}

//! Detects that this machine was suspended: CLOCK_BOOTTIME counts that time, and CLOCK_MONOTONIC does not.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

/// Interval of checks.
const CHECK: Duration = Duration::from_millis(500);
/// Minimum suspension that counts. No server and no NAT forgets anything sooner.
const SHORTEST: Duration = Duration::from_secs(1);

/// Counts resumes of this machine. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Resumed(Arc<watch::Sender<u64>>);

impl Resumed {
    /// Follows the clocks.
    pub(crate) async fn watch(self) -> Infallible {
        let mut suspended = Suspended { before: suspended_since_boot() };
        loop {
            tokio::time::sleep(CHECK).await;
            if let Some(time) = suspended.since_then(suspended_since_boot()) {
                let asleep_s = (time + Duration::from_millis(500)).as_secs();
                tracing::info!(asleep_s, "machine resumed, checking the links");
                self.0.send_modify(|times| *times += 1);
            }
        }
    }

    /// Changes whenever this machine is resumed from now on.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

struct Suspended {
    /// Total suspended time since boot, as of the last call.
    before: Duration,
}

impl Suspended {
    /// Returns the suspended time since the last call, if it is long enough.
    fn since_then(&mut self, now: Duration) -> Option<Duration> {
        // The clocks are read one after the other, so the difference may also become smaller.
        let before = std::mem::replace(&mut self.before, now);
        now.checked_sub(before).filter(|time| *time >= SHORTEST)
    }
}

/// Total suspended time since boot. Needs Linux 2.6.39.
fn suspended_since_boot() -> Duration {
    // Reading fails only for unknown clocks.
    let read = |clock| clock_gettime(clock).map(Duration::from).unwrap_or_default();
    let running = read(ClockId::CLOCK_MONOTONIC);
    read(ClockId::CLOCK_BOOTTIME).saturating_sub(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_more_time_asleep_counts() {
        let s = Duration::from_secs;
        let mut suspended = Suspended { before: s(100) };
        assert_eq!(suspended.since_then(s(100)), None);
        assert_eq!(
            suspended.since_then(s(100) + SHORTEST / 2),
            None,
            "the clocks are read one after the other"
        );
        assert_eq!(suspended.since_then(s(100)), None);
        assert_eq!(suspended.since_then(s(3700)), Some(s(3600)));
        assert_eq!(suspended.since_then(s(3700)), None, "it is said once");
        assert_eq!(suspended.since_then(s(3702)), Some(s(2)));
    }

    #[test]
    fn this_machine_is_awake() {
        let first = suspended_since_boot();
        assert!(suspended_since_boot().abs_diff(first) < Duration::from_secs(60));
    }
}

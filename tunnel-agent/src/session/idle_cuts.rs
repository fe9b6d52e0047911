//! Detects a proxy that closes idle links.

use std::time::Duration;

use tokio::time::Instant;

use super::session_end::SessionEnd;

/// Interval of checks for received bytes.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// Minimum idle time. A link that was cut earlier was not idle.
const SHORTEST: Duration = Duration::from_secs(1);
/// Maximum difference between two cuts by one timeout. Some proxies count whole seconds.
const TOLERANCE: Duration = Duration::from_secs(1);
/// Number of cuts in a row that are no coincidence.
const ENOUGH: u32 = 3;

/// Time since the last byte was received. All sent data is answered, so this is also the idle time of the link.
#[derive(Debug)]
pub(super) struct Idle {
    received: u64,
    since: Instant,
}

impl Idle {
    pub(super) fn new() -> Self {
        Self { received: 0, since: Instant::now() }
    }

    /// `received` is the number of bytes so far.
    pub(super) fn look(&mut self, received: u64) {
        if received != self.received {
            *self = Self { received, since: Instant::now() };
        }
    }

    pub(super) fn lasts(&self) -> Duration {
        self.since.elapsed()
    }
}

/// Successive links that were cut after the same idle time.
#[derive(Debug, Default)]
pub(super) struct IdleCuts {
    count: u32,
    idle: Duration,
}

impl IdleCuts {
    /// Judges the end of a session through `proxy` after this idle time. The cause of the cuts is clear only after
    /// several. Any other end in between, such as a server that cannot be reached, starts anew.
    pub(super) fn judge(&mut self, end: SessionEnd, proxy: &str, idle: Duration) -> SessionEnd {
        if !end.is_cut() || idle < SHORTEST {
            *self = Self::default();
            return end;
        }
        let alike = self.count > 0 && idle.abs_diff(self.idle) <= TOLERANCE;
        self.count = if alike { self.count.saturating_add(1) } else { 1 };
        self.idle = idle;
        if self.count < ENOUGH {
            return end;
        }
        SessionEnd::CutWhenIdle { proxy: proxy.to_owned(), idle }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True if the proxy is named after the last of these cuts. `idle` holds idle times in milliseconds.
    fn named_after(cuts: &mut IdleCuts, idle: &[u64]) -> bool {
        let judged =
            idle.iter().map(|ms| cuts.judge(SessionEnd::Closed, "proxy:3128", Duration::from_millis(*ms)));
        matches!(judged.last(), Some(SessionEnd::CutWhenIdle { .. }))
    }

    #[test]
    fn three_cuts_after_the_same_time_name_the_proxy() {
        let mut cuts = IdleCuts::default();
        assert!(!named_after(&mut cuts, &[3000, 3200]));
        assert!(named_after(&mut cuts, &[3900]));
        assert!(named_after(&mut cuts, &[3000]), "and each one after that");
        let end = cuts.judge(SessionEnd::Closed, "proxy:3128", Duration::from_millis(3100));
        let text = "the proxy proxy:3128 closes links that are idle for about 3 s: \
                    it has to let CONNECT tunnels be idle for more than 10 s";
        assert_eq!(end.to_string(), text);
    }

    #[test]
    fn other_ends_do_not() {
        assert!(!named_after(&mut IdleCuts::default(), &[3000, 6000, 9000, 3000]), "at any time");
        assert!(!named_after(&mut IdleCuts::default(), &[100, 100, 100, 100]), "in use");
        let mut cuts = IdleCuts::default();
        assert!(!named_after(&mut cuts, &[3000, 3000]));
        cuts.judge(SessionEnd::Draining, "proxy:3128", Duration::from_secs(3));
        assert!(!named_after(&mut cuts, &[3000, 3000]));
        assert!(named_after(&mut cuts, &[3000]));
    }

    #[test]
    fn what_arrives_ends_idleness() {
        let mut idle = Idle::new();
        idle.since = Instant::now() - Duration::from_secs(5);
        idle.look(0);
        assert!(idle.lasts() >= Duration::from_secs(5));
        let before = idle.since;
        idle.look(17);
        assert!(idle.since > before);
    }
}

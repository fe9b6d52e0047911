//! Notices a proxy that closes links on which nothing is sent for a while.

use std::time::{Duration, Instant};

use super::session_end::SessionEnd;

/// How often to look whether something has arrived.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// A link that was cut after less was not idle.
const SHORTEST: Duration = Duration::from_secs(1);
/// How far apart two cuts by one timeout may be: some proxies count whole seconds.
const TOLERANCE: Duration = Duration::from_secs(1);
/// So many in a row are no chance.
const ENOUGH: u32 = 3;

/// Since when nothing has arrived on a link. What is sent is answered, so that this is for how long it was idle.
#[derive(Debug)]
pub(super) struct Idle {
    received: u64,
    since: Instant,
}

impl Idle {
    pub(super) fn new() -> Self {
        Self { received: 0, since: Instant::now() }
    }

    /// `received`: bytes so far.
    pub(super) fn look(&mut self, received: u64) {
        if received != self.received {
            *self = Self { received, since: Instant::now() };
        }
    }

    pub(super) fn lasts(&self) -> Duration {
        self.since.elapsed()
    }
}

/// Links in a row that were cut after the same time without a byte.
#[derive(Debug, Default)]
pub(super) struct IdleCuts {
    count: u32,
    idle: Duration,
}

impl IdleCuts {
    /// How a session through `proxy` has ended, after nothing had arrived for so long: who cut it is clear only after
    /// several. Any other end in between, such as a server that is not reached, begins anew.
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

    /// Whether the proxy is named after the last of these cuts, which were idle for so many milliseconds.
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

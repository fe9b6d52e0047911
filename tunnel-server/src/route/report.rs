//! Conflicts in the log and in the metrics.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::conflict::{Conflict, ConflictKind};

/// Conflicts that one reload may log; the rest are counted in one line. `status` lists them all.
pub(super) const MAX_LOGGED: usize = 20;
/// Lines about conflicts that may come at once; a node that flips for hours must not fill the log.
const BURST: u32 = 100;
/// One more line may come after this time.
const REFILL: Duration = Duration::from_secs(10);

/// Reports what changed.
#[derive(Debug)]
pub(super) struct Reports {
    counts: Family<[(&'static str, &'static str); 1], Gauge>,
    reported: BTreeSet<Conflict>,
    lines: u32,
    refilled: Option<Instant>,
    /// Lines left out since the last one.
    left_out: usize,
}

impl Reports {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let counts = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        for kind in ConflictKind::ALL {
            counts.get_or_create(&[("kind", kind.as_str())]).set(0);
        }
        let help = "Contradictions in the inventory, by kind (see status)";
        registry.register("inventory_conflicts", help, counts.clone());
        Self { counts, reported: BTreeSet::new(), lines: BURST, refilled: None, left_out: 0 }
    }

    pub(super) fn report(&mut self, conflicts: BTreeSet<Conflict>, now: Instant) {
        for kind in ConflictKind::ALL {
            let count = conflicts.iter().filter(|conflict| conflict.kind == kind).count();
            self.counts
                .get_or_create(&[("kind", kind.as_str())])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let before = std::mem::replace(&mut self.reported, conflicts);
        let new: Vec<Conflict> = self.reported.difference(&before).cloned().collect();
        for conflict in new.iter().take(MAX_LOGGED) {
            if self.may_log(now) {
                tracing::warn!(kind = conflict.kind.as_str(), "inventory: {conflict}");
            }
        }
        let more = new.len().saturating_sub(MAX_LOGGED);
        if more > 0 && self.may_log(now) {
            tracing::warn!("inventory: {more} more conflicts; tunnel-server status -o json lists them");
        }
        let gone = before.difference(&self.reported).count();
        if gone > 0 && self.may_log(now) {
            tracing::info!("inventory: {gone} conflicts are gone, {} remain", self.reported.len());
        }
    }

    fn may_log(&mut self, now: Instant) -> bool {
        let refilled = *self.refilled.get_or_insert(now);
        let periods = now.saturating_duration_since(refilled).as_secs() / REFILL.as_secs();
        if let Ok(periods @ 1..) = u32::try_from(periods) {
            self.lines = self.lines.saturating_add(periods).min(BURST);
            self.refilled = Some(now);
        }
        if self.lines == 0 {
            self.left_out += 1;
            return false;
        }
        self.lines -= 1;
        if self.left_out > 0 {
            let left_out = std::mem::take(&mut self.left_out);
            tracing::warn!("inventory: {left_out} lines about conflicts that came and went were left out");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_that_come_and_go_do_not_fill_the_log() {
        let mut reports = Reports::register(&mut Registry::default());
        let start = Instant::now();
        let mut lines = |now: Instant, times: usize| (0..times).filter(|_| reports.may_log(now)).count();
        assert_eq!(lines(start, 1000), BURST as usize);
        assert_eq!(lines(start + REFILL - Duration::from_millis(1), 10), 0);
        assert_eq!(lines(start + REFILL, 10), 1);
        assert_eq!(lines(start + 5 * REFILL, 10), 4);
        assert_eq!(lines(start + 1000 * REFILL, 1000), BURST as usize);
    }
}

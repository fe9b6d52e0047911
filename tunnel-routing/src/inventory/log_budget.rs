//! A rate limit for log lines that a node can cause at will: a node that changes for hours must not fill the log.

use std::time::{Duration, Instant};

/// Maximum burst of lines.
const BURST: u32 = 100;
/// Time until one more line is allowed.
const REFILL: Duration = Duration::from_secs(10);

/// Budget of log lines about one subject.
#[derive(Debug)]
pub struct LogBudget {
    /// Subject of the lines.
    about: &'static str,
    lines: u32,
    refilled: Option<Instant>,
    /// Lines dropped since the last one.
    left_out: usize,
}

impl LogBudget {
    pub fn new(about: &'static str) -> Self {
        Self { about, lines: BURST, refilled: None, left_out: 0 }
    }

    /// Returns true if one more line may be logged. Logs the number of dropped lines first.
    pub fn may_log(&mut self, now: Instant) -> bool {
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
            let lines = std::mem::take(&mut self.left_out);
            tracing::warn!(lines, about = self.about, "dropped log lines about the inventory");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_many_lines_they_come_one_by_one() {
        let mut budget = LogBudget::new("tests");
        let start = Instant::now();
        let mut lines = |now: Instant, times: usize| (0..times).filter(|_| budget.may_log(now)).count();
        assert_eq!(lines(start, 1000), BURST as usize);
        assert_eq!(lines(start + REFILL - Duration::from_millis(1), 10), 0);
        assert_eq!(lines(start + REFILL, 10), 1);
        assert_eq!(lines(start + 5 * REFILL, 10), 4);
        assert_eq!(lines(start + 1000 * REFILL, 1000), BURST as usize);
    }
}

//! Durations of single operations and their percentiles.
use std::time::Duration;

/// Durations in any order.
#[derive(Clone, Debug, Default)]
pub struct Times(pub Vec<Duration>);

impl Times {
    pub fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the duration that this share (0 to 1) of all did not exceed; None if there are none.
    pub fn percentile(&mut self, share: f64) -> Option<Duration> {
        self.0.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a position in a list far below 2^52 entries"
        )]
        let at = (self.0.len().checked_sub(1)? as f64 * share).round() as usize;
        self.0.get(at).copied()
    }

    /// Formats `p50 …, p99 …, worst …`.
    pub fn summary(&mut self) -> String {
        let [p50, p99, worst] = [0.5, 0.99, 1.0].map(|share| self.percentile(share).unwrap_or_default());
        format!("p50 {p50:?}, p99 {p99:?}, worst {worst:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_unsorted_times() {
        let mut times = Times((1..=101).rev().map(Duration::from_micros).collect());
        assert_eq!(times.percentile(0.5), Some(Duration::from_micros(51)));
        assert_eq!(times.percentile(0.99), Some(Duration::from_micros(100)));
        assert_eq!(times.percentile(1.0), Some(Duration::from_micros(101)));
        assert_eq!(Times::default().percentile(0.5), None);
    }
}

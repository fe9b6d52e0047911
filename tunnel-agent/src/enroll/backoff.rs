use std::time::Duration;

use rand::Rng;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);

/// Pauses that double up to a minute, each between half and all of its length, so that a thousand agents whose
/// server came back do not come at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Backoff {
    pub(crate) fn next_delay(&mut self) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(LONGEST);
        full.mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_a_minute_and_no_further() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..20).map(|_| backoff.next_delay()).collect();
        assert!(delays[0] >= FIRST / 2 && delays[0] <= FIRST);
        assert!(delays[19] >= LONGEST / 2 && delays[19] <= LONGEST);
    }
}

//! Delays between attempts at something that fails.

use std::time::Duration;

/// Delays that double up to a limit. A part of each is random, so that a fleet that lost its server does not return in
/// step.
#[derive(Clone, Debug)]
pub struct Backoff {
    shortest: Duration,
    longest: Duration,
    jitter: f64,
    next: Duration,
}

impl Backoff {
    /// Creates delays that are between half and all of a time growing from `shortest` to `longest`.
    pub const fn new(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest, jitter: 0.5, next: shortest }
    }

    /// Creates delays that are anywhere between zero and that time, which spreads a fleet as widely as possible.
    pub const fn full_jitter(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest, jitter: 1.0, next: shortest }
    }

    /// Returns the delay after another failure.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = delay.saturating_mul(2).min(self.longest);
        jittered(delay, self.jitter)
    }

    /// Makes the next delay the shortest again. Call it after a success.
    pub const fn reset(&mut self) {
        self.next = self.shortest;
    }
}

/// Shortens `delay` by a random part of up to `share` (0 to 1) of it.
pub fn jittered(delay: Duration, share: f64) -> Duration {
    delay.mul_f64(1.0 - share * rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(60);

    #[test]
    fn delays_grow_to_a_limit_and_start_over() {
        let mut backoff = Backoff::new(SHORTEST, LONGEST);
        let delays: Vec<_> = (0..200).map(|_| backoff.next_delay()).collect();
        assert!(delays[0] >= SHORTEST / 2 && delays[0] <= SHORTEST, "{:?}", delays[0]);
        assert!(delays[1] >= SHORTEST && delays[1] <= SHORTEST * 2, "{:?}", delays[1]);
        assert!(delays[20..].iter().all(|delay| *delay >= LONGEST / 2 && *delay <= LONGEST));
        backoff.reset();
        assert!(backoff.next_delay() <= SHORTEST);
    }

    #[test]
    fn full_jitter_uses_all_of_the_range() {
        let mut backoff = Backoff::full_jitter(LONGEST, LONGEST);
        let delays: Vec<_> = (0..200).map(|_| backoff.next_delay()).collect();
        assert!(delays.iter().any(|delay| *delay < LONGEST / 4));
        assert!(delays.iter().any(|delay| *delay > LONGEST * 3 / 4));
        assert!(delays.iter().all(|delay| *delay <= LONGEST));
    }
}

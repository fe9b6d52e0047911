//! The round-trip time of a link.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Round-trip time of a link, in microseconds; 0 until the first answer.
#[derive(Debug, Default)]
pub struct Rtt {
    last: AtomicU32,
    shortest: AtomicU32,
}

impl Rtt {
    /// Returns the last measurement; `None` before the first.
    pub fn last(&self) -> Option<Duration> {
        duration(&self.last)
    }

    /// Returns the shortest recent measurement: that of the path without queueing.
    pub fn shortest(&self) -> Option<Duration> {
        duration(&self.shortest).or_else(|| self.last())
    }

    /// Uses the kernel's value until there is a measurement. It covers only the path to the first proxy.
    pub fn assume(&self, kernels: Duration) {
        self.last.store(micros(kernels), Ordering::Relaxed);
    }

    /// Adds a measurement.
    pub fn add(&self, sample: Duration) {
        let micros = micros(sample);
        self.last.store(micros, Ordering::Relaxed);
        // A longer path is believed after some minutes.
        let shortest = match self.shortest.load(Ordering::Relaxed) {
            0 => micros,
            before => micros.min(before.saturating_add(micros.saturating_sub(before) / 16)),
        };
        self.shortest.store(shortest, Ordering::Relaxed);
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX).max(1)
}

fn duration(micros: &AtomicU32) -> Option<Duration> {
    match micros.load(Ordering::Relaxed) {
        0 => None,
        micros => Some(Duration::from_micros(micros.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_is_that_of_the_path_and_not_of_what_waits_before_it() {
        let rtt = Rtt::default();
        assert_eq!((rtt.last(), rtt.shortest()), (None, None));
        let ms = Duration::from_millis;
        rtt.add(ms(50));
        rtt.add(ms(850));
        assert_eq!((rtt.last(), rtt.shortest()), (Some(ms(850)), Some(ms(100))));
        rtt.add(ms(20));
        assert_eq!(rtt.shortest(), Some(ms(20)));
    }

    #[test]
    fn what_the_kernel_measured_counts_until_a_ping_is_answered() {
        let (rtt, ms) = (Rtt::default(), Duration::from_millis);
        rtt.assume(ms(1));
        assert_eq!((rtt.last(), rtt.shortest()), (Some(ms(1)), Some(ms(1))));
        rtt.add(ms(40));
        assert_eq!((rtt.last(), rtt.shortest()), (Some(ms(40)), Some(ms(40))));
    }
}

//! The round-trip time of a link.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The round-trip time of a link. Kept in microseconds; 0 until the first answer.
#[derive(Debug, Default)]
pub struct Rtt {
    last: AtomicU32,
    shortest: AtomicU32,
}

impl Rtt {
    /// The last measurement; `None` before the first.
    pub fn last(&self) -> Option<Duration> {
        duration(&self.last)
    }

    /// The shortest lately: that of the path without what waits in front of it.
    pub fn shortest(&self) -> Option<Duration> {
        duration(&self.shortest)
    }

    /// Adds a measurement.
    pub fn add(&self, sample: Duration) {
        let micros = u32::try_from(sample.as_micros()).unwrap_or(u32::MAX).max(1);
        self.last.store(micros, Ordering::Relaxed);
        // A path that has become longer is believed after some minutes.
        let shortest = match self.shortest.load(Ordering::Relaxed) {
            0 => micros,
            before => micros.min(before.saturating_add(micros.saturating_sub(before) / 16)),
        };
        self.shortest.store(shortest, Ordering::Relaxed);
    }
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
}

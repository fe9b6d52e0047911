//! Logs a lasting condition once, not each time it is seen.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Remembers the last message about something that may fail repeatedly.
#[derive(Clone, Debug, Default)]
pub struct LogOnce {
    last: Option<String>,
}

impl LogOnce {
    /// True if `message` differs from the previous one, and so must be logged.
    pub fn is_new(&mut self, message: impl Display) -> bool {
        let message = message.to_string();
        let new = self.last.as_ref() != Some(&message);
        if new {
            self.last = Some(message);
        }
        new
    }

    /// Forgets the message after a success. True if there was a failure before.
    pub fn clear(&mut self) -> bool {
        self.last.take().is_some()
    }
}

/// Time between two messages of a [`LogRarely`].
const PAUSE: Duration = Duration::from_secs(60);

/// Limits a message that others can cause any number of times.
#[derive(Debug, Default)]
pub struct LogRarely {
    /// Time of the last message, and the number of those left out since.
    last: Mutex<Option<(Instant, u64)>>,
}

impl LogRarely {
    /// Returns the number of messages left out since the last one; `None` if this one is to be left out too.
    pub fn due(&self, now: Instant) -> Option<u64> {
        let mut last = self.last.lock();
        match &mut *last {
            Some((at, left_out)) if now.saturating_duration_since(*at) < PAUSE => {
                *left_out += 1;
                None
            }
            last => Some(last.replace((now, 0)).map_or(0, |(_, left_out)| left_out)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_others_cause_is_logged_once_a_minute() {
        let (rarely, now) = (LogRarely::default(), Instant::now());
        assert_eq!(rarely.due(now), Some(0));
        assert_eq!((0..1000).filter_map(|_| rarely.due(now + PAUSE / 2)).count(), 0);
        assert_eq!(rarely.due(now + PAUSE), Some(1000));
        assert_eq!(rarely.due(now + PAUSE), None);
        assert_eq!(rarely.due(now + PAUSE * 2), Some(1));
    }

    #[test]
    fn a_message_is_new_until_it_repeats() {
        let mut once = LogOnce::default();
        assert!(!once.clear());
        assert!(once.is_new("a"));
        assert!(!once.is_new("a"));
        assert!(once.is_new("b"));
        assert!(once.clear());
        assert!(once.is_new("b"));
    }
}

//! Logging a condition that lasts once, not each time it is seen.

use std::fmt::Display;

/// Remembers the last message about something that may fail again and again.
#[derive(Clone, Debug, Default)]
pub struct LogOnce {
    last: Option<String>,
}

impl LogOnce {
    /// Whether `message` differs from the one before, and so is to be logged.
    pub fn is_new(&mut self, message: impl Display) -> bool {
        let message = message.to_string();
        let new = self.last.as_ref() != Some(&message);
        if new {
            self.last = Some(message);
        }
        new
    }

    /// After a success. Whether there was a failure before it.
    pub fn clear(&mut self) -> bool {
        self.last.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! Logs a lasting condition once, not each time it is seen.

use std::fmt::Display;

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

//! Words by which programs written in Go distinguish errors.

use crate::outcome::Outcome;

/// Returns the reason for a failure, with those words.
pub fn in_words_of_go(outcome: Outcome, reason: String) -> String {
    let words = match outcome {
        Outcome::TimedOut => "i/o timeout",
        Outcome::Refused => "connection refused",
        Outcome::NoTunnel => "No agent available",
        _ => "",
    };
    if reason.contains(words) { reason } else { format!("{reason}: {words}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_has_the_words_once() {
        for (outcome, reason, expected) in [
            (Outcome::TimedOut, "10.0.0.1:1 timed out", "10.0.0.1:1 timed out: i/o timeout"),
            (Outcome::Refused, "connection refused by 10.0.0.1:1", "connection refused by 10.0.0.1:1"),
            (Outcome::Denied, "it may not be dialled", "it may not be dialled"),
        ] {
            assert_eq!(in_words_of_go(outcome, reason.to_owned()), expected);
        }
    }
}

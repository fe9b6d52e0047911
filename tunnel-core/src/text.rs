//! Makes text from the other end safe for logs and terminals.

/// At most `max` characters of `text`, without control characters: no forged lines in our log, no escape sequences on an
/// operator's terminal.
pub fn printable(text: &str, max: usize) -> String {
    harmless(&text.chars().take(max).collect::<String>())
}

/// `text` without control characters.
pub fn harmless(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_are_replaced_and_the_length_is_limited() {
        assert_eq!(printable("1.2\n\x1b[2Jé", 6), "1.2\u{fffd}\u{fffd}[");
        assert_eq!(printable("plain", 64), "plain");
    }
}

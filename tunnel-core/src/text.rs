//! Text from the other end, made fit for logs and terminals.

/// At most `max` characters of `text`, without control characters: nobody writes lines into our log, or escape sequences
/// to an operator's terminal.
pub fn printable(text: &str, max: usize) -> String {
    harmless(&text.chars().take(max).collect::<String>())
}

/// `text` without control characters, whatever its length.
pub fn harmless(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_and_length_are_cut() {
        assert_eq!(printable("1.2\n\x1b[2Jé", 6), "1.2\u{fffd}\u{fffd}[");
        assert_eq!(printable("plain", 64), "plain");
    }
}

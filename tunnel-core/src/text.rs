//! Text from the other end, made fit for logs and terminals.

/// At most `max` characters of `text`, without control characters: nobody writes lines into our log, or escape sequences
/// to an operator's terminal.
pub fn printable(text: &str, max: usize) -> String {
    text.chars().take(max).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
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

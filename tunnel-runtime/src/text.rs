//! Text for logs and terminals: text from the other end made safe, and formats of durations and byte counts.

/// Returns at most `max` characters of `text`, without control characters: no forged lines in the log, no escape
/// sequences on an operator's terminal.
pub fn printable(text: &str, max: usize) -> String {
    harmless(&text.chars().take(max).collect::<String>())
}

/// Returns `text` without control characters.
pub fn harmless(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Returns the text of a file without the byte order mark with which PowerShell begins it.
pub fn without_bom(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Formats a number of seconds in its two largest units, such as `1h1m`.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// Formats a number of bytes in binary units.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
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

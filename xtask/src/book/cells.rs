//! Cells of a Markdown table.

/// Text as a cell of a table.
pub(super) fn cell(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace('|', "\\|").replace('<', "&lt;")
}

/// Code as a cell of a table.
pub(super) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}

//! The chart's values, from the file with their defaults and comments.
use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};

use super::cells::{cell, code};

#[derive(Debug, PartialEq, Eq)]
struct Value {
    key: String,
    default: String,
    comment: String,
}

/// One table for each top-level key.
pub(super) fn table(yaml: &str) -> Result<String> {
    let values = parse(yaml)?;
    ensure!(!values.is_empty(), "no values");
    let (mut text, mut part) = (String::new(), "");
    for Value { key, default, comment } in &values {
        let first = key.split('.').next().unwrap_or_default();
        if first != part {
            part = first;
            write!(text, "\n## {part}\n\n| value | default | |\n|---|---|---|\n")?;
        }
        writeln!(text, "| {} | {} | {} |", code(key), code(default), linked(&cell(comment)))?;
    }
    Ok(text)
}

/// Makes links of the pages that a comment names, as in `docs/metrics.md`.
fn linked(text: &str) -> String {
    let link = |word: &str| {
        let path = word.trim_end_matches([',', '.', ':', ';', ')']);
        match path.strip_prefix("docs/").filter(|page| page.ends_with(".md")) {
            Some(page) => format!("[{path}](../{page}){}", &word[path.len()..]),
            None => word.to_owned(),
        }
    };
    text.split(' ').map(link).collect::<Vec<_>>().join(" ")
}

/// A comment belongs to the key below it. A key with others below it has a row only for its comment.
fn parse(yaml: &str) -> Result<Vec<Value>> {
    let mut values: Vec<Value> = Vec::new();
    let mut parents: Vec<(usize, &str)> = Vec::new();
    let mut comment = Vec::new();
    for line in yaml.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if content.is_empty() {
            comment.clear();
        } else if let Some(text) = content.strip_prefix('#') {
            comment.push(text.trim());
        } else if content.starts_with("- ") {
            let Some(list) = values.last_mut() else { bail!("a list without a key: {line:?}") };
            list.default += if list.default.is_empty() { content } else { " …" };
        } else {
            let Some((key, value)) = content.split_once(':') else { bail!("{line:?} has no key") };
            parents.retain(|(column, _)| *column < indent);
            parents.push((indent, key));
            let key = parents.iter().map(|(_, key)| *key).collect::<Vec<_>>().join(".");
            let default = value.trim().to_owned();
            values.push(Value { key, default, comment: std::mem::take(&mut comment).join(" ") });
        }
    }
    let keys: Vec<String> = values.iter().map(|value| value.key.clone()).collect();
    let is_parent = |key: &str| keys.iter().any(|other| other.starts_with(&format!("{key}.")));
    values.retain(|value| !value.comment.is_empty() || !is_parent(&value.key));
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_comments_and_defaults() {
        let yaml = "# About the file.\n\n# About a.\na:\n  # b, in\n  # two lines: <x>\n  b: \"\"\n  c:\n    - d: 1\n\n# Any | of docs/x.md: these.\ne: []\n#  - example\n\nf:\n  g:\n    h: 2\n";
        let expected = [
            ("a", "", "About a."),
            ("a.b", "\"\"", "b, in two lines: <x>"),
            ("a.c", "- d: 1", ""),
            ("e", "[]", "Any | of docs/x.md: these."),
            ("f.g.h", "2", ""),
        ];
        let found = parse(yaml).unwrap();
        let found: Vec<_> =
            found.iter().map(|value| (&*value.key, &*value.default, &*value.comment)).collect();
        assert_eq!(found, expected);
        let text = table(yaml).unwrap();
        assert!(
            text.contains(
                "\n## e\n\n| value | default | |\n|---|---|---|\n| `e` | `[]` | Any \\| of [docs/x.md](../x.md): these. |\n"
            ),
            "{text}"
        );
        assert!(text.contains("| `a.b` | `\"\"` | b, in two lines: &lt;x> |\n"), "{text}");
        assert!(parse("nonsense\n").is_err() && table("").is_err());
    }
}

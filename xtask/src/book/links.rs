//! Links of Markdown files: where they lead, and the headings that they can lead to.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A link or an image, as byte ranges of the text that it is in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// All of it, from `[` or `!` to `)`.
    pub(super) whole: Range<usize>,
    pub(super) label: Range<usize>,
    pub(super) target: Range<usize>,
}

/// Returns the inline links of a text in order, without those in code.
pub(super) fn links(text: &str) -> Vec<Link> {
    let masked = without_code(text);
    let mut found = Vec::new();
    for (middle, _) in masked.match_indices("](") {
        let Some(end) = masked[middle..].find(')').map(|length| middle + length) else { continue };
        let target = middle + 2..end;
        let Some(open) = opening(&masked[..middle]) else { continue };
        if !text[target.clone()].contains(char::is_whitespace) {
            let is_image = open > 0 && masked.as_bytes()[open - 1] == b'!';
            found.push(Link {
                whole: open - usize::from(is_image)..end + 1,
                label: open + 1..middle,
                target,
            });
        }
    }
    found
}

/// Returns the place of the `[` whose `]` follows this text.
fn opening(before: &str) -> Option<usize> {
    let mut depth = 0;
    before.bytes().enumerate().rev().find_map(|(place, byte)| {
        match byte {
            b']' => depth += 1,
            b'[' if depth == 0 => return Some(place),
            b'[' => depth -= 1,
            _ => {}
        }
        None
    })
}

/// Returns the text with spaces in place of fenced blocks and code spans; every other byte keeps its place.
fn without_code(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut fence = None;
    let mut prose = String::new();
    for line in text.split_inclusive('\n') {
        let start = line.trim_start();
        let fences = ["```", "~~~"].into_iter().find(|marker| start.starts_with(marker));
        if fence.is_none() && fences.is_none() {
            prose.push_str(line);
            continue;
        }
        masked += &without_spans(&std::mem::take(&mut prose));
        masked += &blank(line);
        fence = match fence {
            None => fences,
            open if open == fences => None,
            open => open,
        };
    }
    masked + &without_spans(&prose)
}

fn without_spans(prose: &str) -> String {
    let mut masked = String::with_capacity(prose.len());
    let mut rest = prose;
    while let Some(start) = rest.find('`') {
        let run = rest[start..].bytes().take_while(|&byte| byte == b'`').count();
        let (before, from) = rest.split_at(start);
        masked += before;
        let (ticks, after) = from.split_at(run);
        // A paragraph ends what has no second half.
        let paragraph = &after[..after.find("\n\n").unwrap_or(after.len())];
        let length = paragraph.find(ticks).map_or(run, |length| run + length + run);
        let (span, after) = from.split_at(length);
        masked += &blank(span);
        rest = after;
    }
    masked + rest
}

fn blank(text: &str) -> String {
    text.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect()
}

/// Returns the anchors of a page, as mdBook and GitHub make them of its headings, and those of `<a id="…">`.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    let masked = without_code(text);
    let mut seen = BTreeMap::<String, usize>::new();
    let mut anchors = BTreeSet::new();
    let mut start = 0;
    for line in masked.split_inclusive('\n') {
        let whole = &text[start..start + line.len()];
        start += line.len();
        if line.starts_with('#') {
            let slug = slug(whole.trim_start_matches('#'));
            let times = seen.entry(slug.clone()).or_default();
            anchors.insert(if *times == 0 { slug } else { format!("{slug}-{times}") });
            *times += 1;
        }
        let ids = whole.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next());
        anchors.extend(ids.map(str::to_owned));
    }
    anchors
}

fn slug(heading: &str) -> String {
    let mut text = heading.trim().to_owned();
    while let Some(link) = links(&text).pop() {
        let label = text[link.label.clone()].to_owned();
        text.replace_range(link.whole, &label);
    }
    let kept = text.chars().filter_map(|character| match character {
        ' ' => Some('-'),
        '_' | '-' => Some(character),
        _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_of_code() {
        let text = "See [the `a](b)` part](one.md#two) and ![picture](p.svg).\n```\n[no](x.md)\n```\n`[no](y.md)` [z](z.md)\n";
        let targets: Vec<_> = links(text).into_iter().map(|link| &text[link.target]).collect();
        assert_eq!(targets, ["one.md#two", "p.svg", "z.md"]);
        let first = links(text).remove(0);
        assert_eq!(&text[first.label], "the `a](b)` part");
        assert_eq!(&text[first.whole], "[the `a](b)` part](one.md#two)");
        assert_eq!(&text[links(text).remove(1).whole], "![picture](p.svg)");
        assert_eq!(links("a lone ` tick\n\n[x](y.md)").len(), 1);
        assert_eq!(links("[brackets [in] it](a.md), [a](b c)").len(), 1);
    }

    #[test]
    fn anchors_are_those_of_headings() {
        let text = "# A `--flag`, and more\n## 2. Step\n## 2. Step\n```\n# no\n```\n## [kubectl top](x.md)\n<a id=\"here\"></a>\n";
        let expected = ["2-step", "2-step-1", "a---flag-and-more", "here", "kubectl-top"];
        assert_eq!(anchors(text), expected.map(str::to_owned).into());
    }
}

//! The table of the mutation tests, docs/mutants.csv: the last result of each group, with its day and commit.
use anyhow::{Context as _, Result};

/// Result of one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) total: u64,
    pub(super) caught: u64,
    pub(super) hung: u64,
    pub(super) unviable: u64,
    pub(super) missed: u64,
}

/// A row of the table.
pub(super) struct Group<'a> {
    pub(super) name: &'a str,
    pub(super) files: &'a [&'a str],
    /// None: it was not measured now.
    pub(super) counts: Option<Counts>,
}

const HEAD: &str =
    "group,files,changes,made a test fail,made tests hang,do not compile,went unnoticed,measured\n";
const AT: &str = " at ";

/// Returns the document with new rows for the groups that were measured, on `day` at `commit`. The row of another group
/// stays if `unchanged` says that its files are those of its commit, and else says that it was not measured since.
///
/// # Errors
/// The document is no such table.
pub(super) fn updated(
    document: &str,
    groups: &[Group<'_>],
    (day, commit): (&str, &str),
    unchanged: impl Fn(&str, &[&str]) -> bool,
) -> Result<String> {
    let old = document.strip_prefix(HEAD).context("the table's head is missing")?;
    let mut text = HEAD.to_owned();
    for group in groups {
        let begins = row_head(group);
        let old = old.lines().find(|line| line.starts_with(&begins));
        let measured_at = |line: &&str| {
            let cell = line.rsplit(',').next()?;
            Some(cell.split_once(AT)?.1.to_owned())
        };
        let row = match (group.counts, old.as_ref().and_then(measured_at)) {
            (Some(counts), _) => row(group, &counts.cells(), &format!("{day}{AT}{commit}")),
            (None, Some(at)) if unchanged(&at, group.files) => old.unwrap_or_default().to_owned(),
            (None, _) => row(group, &["–"; 5].join(","), "not as it is now"),
        };
        text.push_str(&row);
        text.push('\n');
    }
    Ok(text)
}

fn row(group: &Group<'_>, cells: &str, measured: &str) -> String {
    format!("{}{cells},{measured}", row_head(group))
}

/// Begin of the row of this group with these files.
fn row_head(group: &Group<'_>) -> String {
    format!("{},{},", group.name, group.files.join(" "))
}

impl Counts {
    fn cells(self) -> String {
        let cells = [self.total, self.caught, self.hung, self.unviable, self.missed];
        cells.map(|count| count.to_string()).join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_of_the_code_that_was_measured_or_says_that_it_is_not() {
        let group = |name, files, counts| Group { name, files, counts };
        let counts = Counts { total: 7, caught: 5, hung: 1, unviable: 1, missed: 0 };
        let document = format!("{HEAD}gone,x.rs,–,–,–,–,–,not as it is now\n");
        let first = [group("a", &["a.rs", "b.rs"][..], Some(counts)), group("c", &["c.rs"], None)];
        let text = updated(&document, &first, ("2026-01-02", "abc"), |_, _| true).unwrap();
        let measured = "a,a.rs b.rs,7,5,1,1,0,2026-01-02 at abc\n";
        let none = |row: &str| format!("{row},–,–,–,–,–,not as it is now\n");
        assert_eq!(text, format!("{HEAD}{measured}{}", none("c,c.rs")));

        let second = [group("a", &["a.rs", "b.rs"][..], None), group("c", &["c.rs"], Some(counts))];
        let same = |at: &str, files: &[&str]| at == "abc" && files == ["a.rs", "b.rs"];
        let kept = updated(&text, &second, ("2026-02-03", "def"), same).unwrap();
        assert!(kept.contains(measured) && kept.contains(",0,2026-02-03 at def\n"), "{kept}");
        let changed = updated(&kept, &second, ("2026-02-03", "def"), |_, _| false).unwrap();
        assert!(changed.contains(&none("a,a.rs b.rs")), "{changed}");
        let other_files = [group("a", &["a.rs"][..], None)];
        let other_files = updated(&kept, &other_files, ("", ""), |_, _| true).unwrap();
        assert!(other_files.contains(&none("a,a.rs")), "{other_files}");
        assert!(updated("text\n", &second, ("", ""), same).is_err());
    }
}

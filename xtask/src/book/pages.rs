//! The pages of the book and the repository's other documents: every link between them has to lead somewhere.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::links::{Link, anchors, links};
use crate::files::{self, files_below, write};

/// Has the book's pages.
pub(super) const DOCS: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";

/// Markdown files by their path in the repository: those in docs/ and those in the root.
pub(super) struct Pages {
    root: PathBuf,
    pub(super) texts: BTreeMap<String, String>,
}

impl Pages {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut pages = files::paths_in(root)?;
        pages.extend(files_below(&root.join(DOCS))?);
        pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
        let mut texts = BTreeMap::new();
        for path in pages {
            let text = files::text(&path)?;
            texts.insert(path.strip_prefix(root)?.to_string_lossy().into_owned(), text);
        }
        Ok(Self { root: root.to_owned(), texts })
    }

    /// Fails, with all reasons, if a link leads nowhere or if SUMMARY.md does not name a page.
    pub(super) fn check(&self) -> Result<()> {
        let mut wrong = Vec::new();
        let listed = self.listed()?;
        for page in self.texts.keys().filter(|page| page.starts_with("docs/") && *page != SUMMARY) {
            if !listed.contains(page) {
                wrong.push(format!("{page}: {SUMMARY} does not name it, so nobody finds it"));
            }
        }
        for (page, text) in &self.texts {
            for link in links(text) {
                if let Err(error) = self.follow(page, &text[link.target.clone()]) {
                    let line = text[..link.whole.start].matches('\n').count() + 1;
                    wrong.push(format!("{page}:{line}: {error:#}"));
                }
            }
        }
        ensure!(wrong.is_empty(), "{} faults in the documents:\n{}", wrong.len(), wrong.join("\n"));
        Ok(())
    }

    fn follow(&self, page: &str, target: &str) -> Result<()> {
        let Some((path, anchor)) = resolve(page, target) else { return Ok(()) };
        ensure!(self.root.join(&path).exists(), "{target}: there is no {path}");
        if let Some(anchor) = anchor {
            let text = self.texts.get(&path).with_context(|| format!("{target}: {path} has no headings"))?;
            ensure!(anchors(text).contains(&anchor), "{target}: {path} has no heading of that name");
        }
        Ok(())
    }

    /// Returns the pages that SUMMARY.md names, in its order.
    fn listed(&self) -> Result<Vec<String>> {
        let summary = self.texts.get(SUMMARY).with_context(|| format!("{SUMMARY} is missing"))?;
        let targets = links(summary).into_iter().map(|link| &summary[link.target]);
        Ok(targets.filter_map(|target| resolve(SUMMARY, target)).map(|(path, _)| path).collect())
    }

    /// Writes the pages in the book, with links that hold there, to a folder that mdBook reads: pages of the root are beside
    /// those of docs/, and links to files that are in no book become their labels.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let listed = self.listed()?;
        let is_in_book = |path: &str| path.starts_with("docs/") || listed.iter().any(|page| page == path);
        for path in files_below(&self.root.join(DOCS))? {
            let name = path.strip_prefix(&self.root)?.to_string_lossy().into_owned();
            if !self.texts.contains_key(&name) {
                write(&folder.join(in_book(&name)), files::bytes(&path)?)?;
            }
        }
        for (page, text) in self.texts.iter().filter(|(page, _)| is_in_book(page)) {
            let text = rewritten(text, |link| {
                let (path, anchor) = resolve(page, &text[link.target.clone()])?;
                if !is_in_book(&path) {
                    return Some(text[link.label.clone()].to_owned());
                }
                let up = "../".repeat(in_book(page).matches('/').count());
                let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
                let image = if text[link.whole.clone()].starts_with('!') { "!" } else { "" };
                Some(format!("{image}[{}]({up}{}{anchor})", &text[link.label.clone()], in_book(&path)))
            });
            write(&folder.join(in_book(page)), text.as_bytes())?;
        }
        Ok(())
    }
}

/// Replaces the links for which there is something else.
fn rewritten(text: &str, other: impl Fn(&Link) -> Option<String>) -> String {
    let mut result = text.to_owned();
    for link in links(text).into_iter().rev() {
        if let Some(other) = other(&link) {
            result.replace_range(link.whole, &other);
        }
    }
    result
}

fn in_book(path: &str) -> &str {
    path.strip_prefix("docs/").unwrap_or(path)
}

/// Returns the path in the repository and the anchor to which a page's link leads; None for a URL.
fn resolve(page: &str, target: &str) -> Option<(String, Option<String>)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let mut parts: Vec<&str> = page.split('/').collect();
    if !path.is_empty() {
        parts.pop();
    }
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    Some((parts.join("/"), anchor.map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn repository(files: &[(&str, &str)]) -> (tempfile::TempDir, Pages) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            write(&dir.path().join(path), text.as_bytes()).unwrap();
        }
        let pages = Pages::read(dir.path()).unwrap();
        (dir, pages)
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let good = [
            (SUMMARY, "[A](a.md)\n[B](sub/b.md)\n[D](../DESIGN.md)"),
            (
                "docs/a.md",
                "# A\n[b](sub/b.md#two-words) [self](#a) [code](../src/x.rs) [web](https://a.example/#b)",
            ),
            ("docs/sub/b.md", "# B\n## Two words\n[a](../a.md) ![p](../p.svg)"),
            ("docs/p.svg", "<svg/>"),
            ("DESIGN.md", "# Design\n[a](docs/a.md#a)"),
            ("src/x.rs", ""),
        ];
        let (_dir, pages) = repository(&good);
        pages.check().unwrap();

        let (_dir, pages) = repository(&[
            (SUMMARY, "[A](a.md)"),
            ("docs/a.md", "# A\n\n[b](gone.md) [c](#nothing) [d](../src/x.rs#l1)"),
            ("docs/lost.md", "# Lost"),
            ("src/x.rs", ""),
        ]);
        let faults = pages.check().unwrap_err().to_string();
        let faults: Vec<&str> = faults.lines().collect();
        assert_eq!(
            faults,
            [
                "4 faults in the documents:",
                "docs/lost.md: docs/SUMMARY.md does not name it, so nobody finds it",
                "docs/a.md:3: gone.md: there is no docs/gone.md",
                "docs/a.md:3: #nothing: docs/a.md has no heading of that name",
                "docs/a.md:3: ../src/x.rs#l1: src/x.rs has no headings",
            ]
        );
    }

    #[test]
    fn links_of_the_book_lead_to_its_pages() {
        let (_dir, pages) = repository(&[
            (SUMMARY, "[A](sub/a.md)\n[D](../DESIGN.md)"),
            (
                "docs/sub/a.md",
                "[d](../../DESIGN.md#x), [`x.rs`](../../src/x.rs), [r](../../README.md), ![p](../p.svg)",
            ),
            ("docs/p.svg", "<svg/>"),
            ("DESIGN.md", "[a](docs/sub/a.md)"),
            ("README.md", ""),
        ]);
        let book = tempfile::tempdir().unwrap();
        pages.write(book.path()).unwrap();
        let read = |name: &str| fs::read_to_string(book.path().join(name)).unwrap();
        assert_eq!(read("SUMMARY.md"), "[A](sub/a.md)\n[D](DESIGN.md)");
        assert_eq!(read("sub/a.md"), "[d](../DESIGN.md#x), `x.rs`, r, ![p](../p.svg)");
        assert_eq!(read("DESIGN.md"), "[a](sub/a.md)");
        assert_eq!(read("p.svg"), "<svg/>");
        assert!(!book.path().join("README.md").exists(), "SUMMARY.md does not name it");
    }
}

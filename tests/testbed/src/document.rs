//! Fenced code blocks of a document, for tests that run its commands unchanged.
use anyhow::{Context as _, Result, ensure};

/// A fenced code block of a document.
#[derive(Debug, PartialEq, Eq)]
pub struct Block<'a> {
    /// Title of its section.
    pub section: &'a str,
    /// Info string after the opening fence; may be empty.
    pub language: &'a str,
    pub text: &'a str,
}

impl Block<'_> {
    /// Reports whether the block is to be run unchanged.
    pub fn is_commands(&self) -> bool {
        self.language == "sh"
    }
}

/// Returns the blocks of a document in order.
pub fn blocks(document: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    for section in document.split("\n## ") {
        let title = section.lines().next().unwrap_or_default();
        let mut rest = section;
        while let Some((_, fenced)) = rest.split_once("\n```") {
            let (language, fenced) = fenced.split_once('\n').unwrap_or((fenced, ""));
            let (text, after) = fenced.split_once("\n```").unwrap_or((fenced, ""));
            blocks.push(Block { section: title, language, text });
            rest = after;
        }
    }
    blocks
}

/// Returns the commands of the section whose title begins with `title`.
pub fn commands(document: &str, title: &str) -> Result<String> {
    let blocks = blocks(document);
    let section = blocks.iter().map(|block| block.section).find(|section| section.starts_with(title));
    let section = section.with_context(|| format!("the document has no section {title:?} with a block"))?;
    let commands = blocks.iter().filter(|block| block.section == section && block.is_commands());
    let commands: Vec<&str> = commands.map(|block| block.text).collect();
    ensure!(!commands.is_empty(), "the section {title:?} has no commands");
    Ok(commands.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUIDE: &str = "\
# Title
```
first
```
## One
text
```sh
a
b
```
  ```
  in a list
  ```
## Two
```yaml
c: d
```
```sh
e
```
";

    #[test]
    fn a_documents_blocks_are_found() {
        let found = blocks(GUIDE);
        let found: Vec<_> = found.iter().map(|block| (block.section, block.language, block.text)).collect();
        let expected =
            [("# Title", "", "first"), ("One", "sh", "a\nb"), ("Two", "yaml", "c: d"), ("Two", "sh", "e")];
        assert_eq!(found, expected);
        assert_eq!(commands(GUIDE, "One").unwrap(), "a\nb");
        assert!(commands(GUIDE, "Three").is_err());
    }
}

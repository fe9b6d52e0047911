//! The instructions of a Containerfile that ours use.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use crate::files;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recipe {
    /// Paths in the image, and the files of the build's directory that go there.
    pub(super) files: BTreeMap<String, String>,
    pub(super) user: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) entrypoint: Vec<String>,
}

impl Recipe {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = files::text(path)?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut recipe = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let understood = recipe.instruction(line);
            understood.with_context(|| format!("line {}: {line}", number + 1))?;
        }
        ensure!(!recipe.entrypoint.is_empty(), "no ENTRYPOINT");
        Ok(recipe)
    }

    fn instruction(&mut self, line: &str) -> Result<()> {
        let (name, rest) = line.split_once(' ').context("an instruction without a value")?;
        match name {
            "FROM" => ensure!(rest == "scratch", "only FROM scratch: the image is the binary"),
            "COPY" => {
                let (from, to) = rest.split_once(' ').context("want COPY FILE /PATH")?;
                let path = to.strip_prefix('/').context("the path in the image has to begin with /")?;
                self.files.insert(path.to_owned(), from.to_owned());
            }
            "USER" => rest.clone_into(&mut self.user),
            "LABEL" => {
                let (key, value) = rest.split_once('=').context("want LABEL KEY=\"VALUE\"")?;
                let value = serde_json::from_str(value).context("the value has to be in double quotes")?;
                self.labels.insert(key.to_owned(), value);
            }
            "ENTRYPOINT" => {
                self.entrypoint = serde_json::from_str(rest).context("want a JSON list of strings")?;
            }
            _ => bail!("xtask understands FROM, COPY, USER, LABEL and ENTRYPOINT"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_refused_by_its_line() {
        for (text, expected) in [
            ("FROM debian", "line 1: FROM debian: only FROM scratch: the image is the binary"),
            (
                "FROM scratch\nRUN true",
                "line 2: RUN true: xtask understands FROM, COPY, USER, LABEL and ENTRYPOINT",
            ),
            ("COPY a b", "line 1: COPY a b: the path in the image has to begin with /"),
            (
                "LABEL a=b",
                "line 1: LABEL a=b: the value has to be in double quotes: expected value at line 1 column 1",
            ),
            ("FROM scratch", "no ENTRYPOINT"),
        ] {
            assert_eq!(format!("{:#}", Recipe::parse(text).unwrap_err()), expected);
        }
    }
}

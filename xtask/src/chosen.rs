//! Which tests a command line chooses, and which packages may have them.

use anyhow::Result;

use crate::command::default_packages;
use crate::files::{self, files_below};

/// Names on the command line.
#[derive(clap::Args, Clone, Default)]
pub(crate) struct Names {
    /// Only tests whose name contains one of these, such as `path::` or `https::tls_ends_at_the_edge`.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// No test whose name contains this. May be given more than once.
    #[arg(long, value_name = "NAME")]
    skip: Vec<String>,
}

impl Names {
    /// The same with this name, or with none.
    pub(crate) fn with(&self, name: Option<&str>) -> Self {
        Self { names: name.map(str::to_owned).into_iter().collect(), skip: self.skip.clone() }
    }

    pub(crate) fn are_given(&self) -> bool {
        !self.names.is_empty()
    }

    /// Reports whether they leave any test out.
    pub(crate) fn restrict(&self) -> bool {
        !self.names.is_empty() || !self.skip.is_empty()
    }

    pub(crate) fn select(&self, name: &str) -> bool {
        let in_name = |part: &String| name.contains(part.as_str());
        (self.names.is_empty() || self.names.iter().any(in_name)) && !self.skip.iter().any(in_name)
    }

    /// Returns the names that none of these tests has.
    pub(crate) fn unknown<'a>(&self, tests: impl IntoIterator<Item = &'a str>) -> Vec<&str> {
        let mut unknown: Vec<_> = self.names.iter().map(String::as_str).collect();
        for test in tests {
            unknown.retain(|name| !test.contains(name));
        }
        unknown
    }

    pub(crate) fn given(&self) -> &[String] {
        &self.names
    }

    /// `--skip` as libtest and `scenarios` take it.
    pub(crate) fn skips(&self) -> impl Iterator<Item = &str> {
        self.skip.iter().flat_map(|name| ["--skip", name])
    }

    /// All of them, as libtest and `scenarios` take them.
    pub(crate) fn arguments(&self) -> impl Iterator<Item = &str> {
        self.skips().chain(self.names.iter().map(String::as_str))
    }

    /// Packages that may have such a test: their sources contain every part of one of the names.
    pub(crate) fn packages(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for package in default_packages()? {
            let mut text = String::new();
            for file in files_below(&package.folder)? {
                if file.extension().is_some_and(|extension| extension == "rs") {
                    text += &file.to_string_lossy();
                    text += &files::text(&file)?;
                }
            }
            let has = |name: &String| name.split("::").all(|part| text.contains(part));
            if self.names.is_empty() || self.names.iter().any(has) {
                found.push(package.name);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(names: &[&str], skip: &[&str]) -> Names {
        let owned = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        Names { names: owned(names), skip: owned(skip) }
    }

    #[test]
    fn names_select_the_packages_whose_sources_have_their_words() {
        let own = "names_select_the_packages_whose_sources_have_their_words";
        assert_eq!(names(&[own], &[]).packages().unwrap(), ["xtask"]);
        let two = names(&[own, "connects::ipv6"], &[]).packages().unwrap();
        assert!(
            two.contains(&"xtask".to_owned()) && two.contains(&"postern-kernel-tests".to_owned()),
            "{two:?}"
        );
    }

    #[test]
    fn one_of_the_names_is_enough_and_none_that_is_skipped() {
        let some = names(&["path::", "demo"], &["slow"]);
        assert!(some.select("path::half_close") && some.select("demo::kubernetes"));
        assert!(!some.select("path::slow") && !some.select("http::upgrades"));
        assert_eq!(some.arguments().collect::<Vec<_>>(), ["--skip", "slow", "path::", "demo"]);
        assert_eq!(some.unknown(["demo::kubernetes", "http::path"]), ["path::"]);
        assert!(
            some.unknown(["a::path::b", "demo"]).is_empty() && names(&[], &["slow"]).unknown([]).is_empty()
        );
        assert!(names(&[], &["slow"]).select("any") && !names(&[], &["slow"]).select("slow"));
    }

    /// Doctests are off: rustdoc would compile each library once more to find none.
    #[test]
    fn libraries_have_no_examples_that_nobody_runs() {
        for package in default_packages().unwrap() {
            let manifest = fs::read_to_string(package.folder.join("Cargo.toml")).unwrap();
            let library = package.folder.join("src/lib.rs").exists();
            assert_eq!(manifest.contains("\ndoctest = false\n"), library, "{}", package.name);
            for file in files_below(&package.folder.join("src")).unwrap() {
                let text = fs::read_to_string(&file).unwrap();
                let lines = text.lines().map(str::trim_start);
                let comments =
                    lines.filter_map(|line| line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! ")));
                let mut opening = comments.filter(|line| line.starts_with("```")).step_by(2);
                assert!(opening.all(|line| line == "```text"), "{} has an example", file.display());
            }
        }
    }
}

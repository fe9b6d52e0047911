//! The reference pages of the programs' commands and flags.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::cells::{cell, code};
use crate::help::{self, Help};

/// Lists the flags of the program and all its commands.
pub(super) fn page(path: &Path, name: &str) -> Result<String> {
    let all = help::of_program(path, name)?;
    let of_program = all.first().map(|(_, help)| help.names()).unwrap_or_default();
    let mut text = String::new();
    for (words, help) in &all {
        let known = if words.len() == 1 { BTreeSet::new() } else { of_program.clone() };
        text += &section(words, help, &known)?;
    }
    Ok(text)
}

/// A command that takes the program's own flags names those together.
fn section(words: &[String], help: &Help, known: &BTreeSet<&str>) -> Result<String> {
    let mut text = format!("\n## {}\n\n{}\n\n```\n{}\n```\n", words.join(" "), cell(&help.about), help.usage);
    if help.takes_all(known) {
        write!(text, "\nAlso takes the flags of `{}`, as the running program has them.\n", words[0])?;
    }
    for (heading, flags) in help.listed(known) {
        if heading != "Options" && heading != "Arguments" {
            write!(text, "\n### {heading}\n")?;
        }
        text += "\n| flag | default | |\n|---|---|---|\n";
        for flag in flags {
            // A default may be a sentence.
            let is_value = !flag.default.contains(' ') || flag.default.starts_with('"');
            let default = if is_value { code(&flag.default) } else { cell(&flag.default) };
            writeln!(text, "| {} | {default} | {} |", code(&flag.name), cell(&flag.text))?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_a_table() {
        let help = help::parse(
            "Lets\n\nUsage: a\n\nRedirect:\n      --on [<on|off>]\n          On [default: x; y]. Else\n  -h, --help\n",
        );
        let text = section(&["a".to_owned()], &help, &BTreeSet::new()).unwrap();
        assert!(text.contains("\n### Redirect\n\n| flag | default | |\n|---|---|---|\n| `--on [<on\\|off>]` | x; y | On. Else |\n"), "{text}");
        assert!(!text.contains("--help"), "{text}");
    }
}

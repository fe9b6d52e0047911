//! `cargo xtask docs`: the book of docs/ as HTML. Pages of the reference are made of what they describe, so that they are never
//! stale: a line `<!-- made of: NAME -->` stands for such a part.
mod cells;
mod flags;
mod links;
mod pages;
mod tables;
mod values;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use self::pages::Pages;
use crate::command::{build_programs, need_program, program, root, run, target_dir};
use crate::files;
use crate::shell;

const VERSION: &str = "0.5.4";
/// Without its server and without optimisation: it compiles in less time, and builds the book in a few seconds.
const INSTALL: &[&str] = &["--locked", "--debug", "--no-default-features", "--features", "search"];
const MARK: &str = "<!-- made of: ";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Also tries man pages and completion with real shells, as `test --all` does (root, if those have to be installed).
    #[arg(long)]
    shells: bool,
}

pub(crate) fn run_docs(options: &Options) -> Result<ExitCode> {
    build_programs(&["tunnel-server", "tunnel-agent"])?;
    let programs = target_dir()?.join("debug");
    let target = shell::build(&programs)?;
    if options.shells {
        shell::check(&target)?;
    }
    println!("{}", build(&programs)?.join("index.html").display());
    Ok(ExitCode::SUCCESS)
}

/// Checks the documents and builds the book into <target dir>/book, which it returns. The programs are in that folder.
pub(crate) fn build(programs: &Path) -> Result<PathBuf> {
    let mut pages = Pages::read(&root())?;
    for (page, text) in &mut pages.texts {
        *text = complete(text, |part| made(part, programs)).with_context(|| page.clone())?;
    }
    pages.check()?;
    let mdbook = tool()?;
    let (source, book) = (target_dir()?.join("book-source"), target_dir()?.join("book"));
    for folder in [&source, &book] {
        // Of another run.
        fs::remove_dir_all(folder).ok();
    }
    pages.write(&source)?;
    run(program(&mdbook).arg("build").arg(&source).arg("--dest-dir").arg(&book))?;
    Ok(book)
}

/// Path of mdbook, which is installed if it is missing.
pub(crate) fn tool() -> Result<PathBuf> {
    need_program("mdbook", VERSION, INSTALL)
}

/// Puts the parts in place of their marks.
fn complete(text: &str, made: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut complete = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match line.strip_prefix(MARK).and_then(|rest| rest.trim_end().strip_suffix(" -->")) {
            Some(part) => complete += &made(part).with_context(|| format!("the part {part:?}"))?,
            None => complete += line,
        }
    }
    Ok(complete)
}

fn made(part: &str, programs: &Path) -> Result<String> {
    let read = |path: &str| files::text(&root().join(path));
    match part {
        "tunnel-server --help" | "tunnel-agent --help" => {
            let name = part.trim_end_matches(" --help");
            flags::page(&programs.join(name), name)
        }
        "values.yaml" => values::table(&read("deploy/helm/postern/values.yaml")?),
        "metrics.json" => tables::metrics(&read("deploy/prometheus/metrics.json")?),
        "boundaries.csv" => tables::boundaries(&read("docs/boundaries.csv")?),
        "exit codes" => tables::exit_codes(&read("tunnel-runtime/src/config/mod.rs")?),
        "roles" => tables::permissions(&root().join("deploy")),
        _ => anyhow::bail!("nothing makes it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_take_the_place_of_their_marks() {
        let text = "# A\n<!-- made of: b c -->\n<!-- a comment -->\nend\n";
        let complete = |made: fn(&str) -> Result<String>| complete(text, made);
        assert_eq!(
            complete(|part| Ok(format!("{part}!\n"))).unwrap(),
            "# A\nb c!\n<!-- a comment -->\nend\n"
        );
        let error = complete(|part| made(part, Path::new(""))).unwrap_err();
        assert_eq!(format!("{error:#}"), "the part \"b c\": nothing makes it");
    }

    /// `cargo xtask docs` also checks them with the flags, for which the programs have to be built.
    #[test]
    fn documents_lead_to_files_and_headings_that_exist() {
        let mut pages = Pages::read(&root()).unwrap();
        for text in pages.texts.values_mut() {
            let without_flags = |part: &str| {
                if part.ends_with(" --help") { Ok(String::new()) } else { made(part, Path::new("")) }
            };
            *text = complete(text, without_flags).unwrap();
        }
        pages.check().unwrap();
    }
}

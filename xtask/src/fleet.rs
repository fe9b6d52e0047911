//! `cargo xtask fleet`: the simulated fleet of tests/fleet.
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::command::{build_programs, built, program};
use crate::source::{Source, git};

const PROGRAM: &str = "postern-fleet";
/// Of a whole run, on all processors.
const SECONDS: u32 = 60;

/// Those of the program.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    given: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    build_programs(&[PROGRAM])?;
    let status = program(built(PROGRAM)?).args(&options.given).status().context("starting the fleet")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs new seeds as a part of the tests. They follow from the committed files, so that a commit that fails fails again; with other
/// files the time decides. The error has the first seed that failed: it is all that a later run needs.
pub(crate) fn run_new_seeds(is_built: bool) -> Result<ExitCode> {
    if !is_built {
        build_programs(&[PROGRAM])?;
    }
    let committed = Source::read()?.revision.is_some_and(|revision| !revision.ends_with("-dirty"));
    let tree = git(&["rev-parse", "HEAD^{tree}"]).filter(|_| committed);
    let first = tree.and_then(|tree| first_seed(&tree)).map(|first| format!("--first={first}"));
    let mut fleet = program(built(PROGRAM)?)
        .arg(format!("--seconds={SECONDS}"))
        .args(first)
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the fleet")?;
    let mut failed = Vec::new();
    for line in BufReader::new(fleet.stdout.take().context("no standard output")?).lines() {
        let line = line.context("reading the fleet's output")?;
        println!("{line}");
        if line.contains(": FAILED: ") {
            failed.push(line.trim().to_owned());
        }
    }
    let status = fleet.wait().context("waiting for the fleet")?;
    ensure!(status.success(), "{}", failed.first().cloned().unwrap_or_else(|| status.to_string()));
    Ok(ExitCode::SUCCESS)
}

/// The first seed of a tree of files with this hash. A million further seeds are before that of any other.
fn first_seed(tree: &str) -> Option<u64> {
    Some(u64::from_str_radix(tree.get(..11)?, 16).ok()? << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_of_two_trees_are_far_from_each_other() {
        let [one, other] =
            ["4b825dc642cb6eb9a060e54bf8d69288fbee4904", "4b825dc642dcb6eb9a060e54bf8d6928"].map(first_seed);
        assert_eq!(other.unwrap() - one.unwrap(), 1 << 20);
        assert_eq!(first_seed("not a hash"), None);
    }
}

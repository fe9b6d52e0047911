//! `cargo xtask fleet`: the simulated fleet of tests/fleet.
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::command::{build_programs, built, program};

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

/// Runs seeds that no run has had, as a part of the tests. The error has the seeds that failed: they are all that a later run needs.
pub(crate) fn run_new_seeds(is_built: bool) -> Result<ExitCode> {
    if !is_built {
        build_programs(&[PROGRAM])?;
    }
    let mut fleet = program(built(PROGRAM)?)
        .arg(format!("--seconds={SECONDS}"))
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

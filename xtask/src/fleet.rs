//! `cargo xtask fleet`: the simulated fleet of tests/fleet.
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

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
    start(&options.given)
}

/// Runs seeds that no run has had, as a part of the tests.
pub(crate) fn run_new_seeds(is_built: bool) -> Result<ExitCode> {
    if !is_built {
        build_programs(&[PROGRAM])?;
    }
    start(&[format!("--seconds={SECONDS}").into()])
}

fn start(args: &[OsString]) -> Result<ExitCode> {
    let status = program(built(PROGRAM)?).args(args).status().context("starting the fleet")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

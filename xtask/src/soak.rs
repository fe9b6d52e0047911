//! `cargo xtask soak` and `cargo xtask chaos`: the scenarios with faults, for as long as wanted instead of a part of a minute.
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};

use crate::command::{build_programs, built, is_root, program, run_in_foreground};
use crate::demo::PROGRAMS;
use crate::{build_ebpf, packages};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long, such as 0.5.
    #[arg(long, default_value_t = 1.0, value_name = "N")]
    hours: f64,
}

#[derive(clap::Args)]
pub(crate) struct ChaosOptions {
    /// How long, such as 0.5; what was begun is ended, and checked.
    #[arg(long, default_value_t = 5.0, value_name = "N")]
    minutes: f64,
    /// The sequence of events; another one each time unless given.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// One run each for so many seeds, from --seed on.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seeds: u64,
}

pub(crate) fn run_soak(options: &Options) -> Result<ExitCode> {
    ensure!(
        (0.005..=10_000.0).contains(&options.hours),
        "--hours={}: give a number from 0.005 (18 s) to 10000",
        options.hours
    );
    let mut command = scenario("soak", "soak::what_is_held_does_not_grow")?;
    command.env("POSTERN_SOAK_SECONDS", format!("{:.0}", (options.hours * 3600.0).round()));
    run_in_foreground(&mut command)
}

pub(crate) fn run_chaos(options: &ChaosOptions) -> Result<ExitCode> {
    ensure!(
        (0.1..=1_000.0).contains(&options.minutes),
        "--minutes={}: give a number from 0.1 to 1000",
        options.minutes
    );
    ensure!((1..=1_000).contains(&options.seeds), "--seeds={}: give a number from 1 to 1000", options.seeds);
    let mut failed = Vec::new();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).context("this machine's clock");
    let first = options.seed.map_or_else(|| now().map(|now| now.as_secs()), Ok)?;
    for seed in (first..).take(usize::try_from(options.seeds)?) {
        let mut command = scenario("chaos", "chaos::nothing_is_wrong_after_everything_went_wrong")?;
        command.env("POSTERN_CHAOS_SECONDS", format!("{:.0}", (options.minutes * 60.0).round()));
        command.env("POSTERN_CHAOS_SEED", seed.to_string());
        if run_in_foreground(&mut command)? != ExitCode::SUCCESS {
            failed.push(seed);
        }
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed with the seeds {failed:?}: `cargo xtask chaos --seed N` runs one of them again");
    Ok(ExitCode::FAILURE)
}

/// Builds what the scenario needs, and returns the command that runs it.
fn scenario(what: &str, name: &str) -> Result<Command> {
    ensure!(is_root(), "needs root, as `cargo xtask test` does: run `sudo -E cargo xtask {what}`");
    packages::install(&[packages::TESTBED, packages::NAT])?;
    build_ebpf::run()?;
    build_programs(&[&["scenarios"], PROGRAMS].concat())?;
    let mut command = program(built("scenarios")?);
    command.args(["--exact", name]);
    Ok(command)
}

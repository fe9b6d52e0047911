//! `cargo xtask soak`: the scenario with mixed load and faults, for hours instead of a minute.
use std::process::ExitCode;

use anyhow::{Result, ensure};

use crate::command::{build, built, is_root, program, run_in_foreground};
use crate::demo::PROGRAMS;
use crate::{build_ebpf, packages};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long, such as 0.5.
    #[arg(long, default_value_t = 1.0, value_name = "N")]
    hours: f64,
}

pub(crate) fn run_soak(options: &Options) -> Result<ExitCode> {
    ensure!(
        (0.005..=10_000.0).contains(&options.hours),
        "--hours={}: give a number from 0.005 (18 s) to 10000",
        options.hours
    );
    ensure!(is_root(), "the soak needs root, as `cargo xtask test` does: run `sudo -E cargo xtask soak`");
    packages::install(&[packages::TESTBED])?;
    build_ebpf::run()?;
    build(&[&["postern-scenarios"], PROGRAMS].concat())?;
    let seconds = (options.hours * 3600.0).round();
    let mut command = program(built("scenarios")?);
    command.args(["--exact", "soak::what_is_held_does_not_grow"]);
    command.env("POSTERN_SOAK_SECONDS", format!("{seconds:.0}"));
    // What is resident is to be what is held: glibc's allocator keeps what was freed, for each thread (mallopt(3)).
    for (key, value) in
        [("ARENA_MAX", 1), ("TRIM_THRESHOLD_", 65536), ("TOP_PAD_", 0), ("MMAP_THRESHOLD_", 65536)]
    {
        command.env(format!("MALLOC_{key}"), value.to_string());
    }
    run_in_foreground(&mut command)
}

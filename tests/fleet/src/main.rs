//! A simulated fleet: servers and agents with their real code in one thread, on a paused clock, over a network of memory. All
//! of it follows from one seed, which does the same again.
#![forbid(unsafe_code)]

mod agent;
mod client;
mod cluster;
mod fleet;
mod konnectivity;
mod model;
mod network;
mod plan;
mod revocations;
mod seeds;
mod server;
mod view;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;

/// Runs fleets from seeds, and says which fail.
#[derive(Debug, Parser)]
struct Cli {
    /// Run this seed only, and show what happens.
    #[arg(long)]
    seed: Option<u64>,
    /// Only show its plan.
    #[arg(long, requires = "seed")]
    plan: bool,
    /// Leave these steps of its plan out.
    #[arg(long, value_delimiter = ',', requires = "seed")]
    without: Vec<usize>,
    /// Log filter of the programs with --seed, in the syntax of RUST_LOG.
    #[arg(long, default_value = "postern_fleet=info")]
    log: String,
    /// Number of the first of many seeds. Without it, the time decides.
    #[arg(long)]
    first: Option<u64>,
    /// How many seeds to run.
    #[arg(long, default_value_t = 100)]
    count: u64,
    /// Run seeds for this many seconds instead.
    #[arg(long)]
    seconds: Option<u64>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.seed {
        Some(seed) if cli.plan => {
            println!("{:#?}", plan::Plan::of(seed));
            Ok(true)
        }
        Some(seed) if seeds::is_seeded(seed) => seeds::run(seed, &cli.without, &cli.log),
        Some(seed) => seeds::again(seed, &cli),
        None => many(&cli),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn many(cli: &Cli) -> Result<bool> {
    let first = cli.first.unwrap_or_else(seeds::of_now);
    let limit = cli.seconds.map(Duration::from_secs);
    let count = if limit.is_some() { u64::MAX } else { cli.count };
    let failed = seeds::many(first, count, limit)?;
    if let Some(seed) = failed.iter().min() {
        seeds::shrink(*seed)?;
    }
    Ok(failed.is_empty())
}

//! The project's only entry point: `cargo xtask COMMAND`. CI runs exactly these commands.
#![forbid(unsafe_code)]

mod archive;
mod bench;
mod beside;
mod book;
mod build_ebpf;
mod cache;
mod chosen;
mod circles;
mod command;
mod cross;
mod deb_rpm;
mod demo;
mod ebpf_sources;
mod files;
mod fleet;
mod fuzz;
mod help;
mod image;
mod kernel;
mod lint;
mod mutants;
mod needs;
mod one_shot;
mod options;
mod packages;
mod peer_tests;
mod peers;
mod plugin;
mod previous;
mod provenance;
mod registry;
mod release;
mod sbom;
mod scenarios;
mod services;
mod shell;
mod soak;
mod source;
mod tally;
mod test;
mod times;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::tally::Tally;

/// Bounds on two cores, in minutes: of CI, and of what a new developer runs, from the clone and after a change.
const CI_BOUND: &str = "45";
const TEST_BOUND: &str = "25 from the clone, 10 warm";

/// Builds, shows and tests Postern.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Builds the eBPF programs that tunnel-server embeds; installs what is missing for that.
    BuildEbpf,
    /// A real Prometheus scrapes node exporters on two edges behind NAT; with --kubernetes, kubectl and Prometheus work on
    /// such a node of a real cluster (root).
    Demo(demo::Options),
    /// Unit and property tests, the redirect on the real kernel, and scenarios of every subject, with one cluster; or
    /// everything, or what is named (root, but for unit tests).
    Test(options::Options),
    /// rustfmt --check, import circles, clippy -D warnings, cargo deny.
    Lint,
    /// Runs what CI runs: lint, then `test --all`.
    Ci,
    /// The real Kubernetes, Prometheus, metrics-server, konnectivity, Helm, kube-router's network policies and Cilium's loader that tests, demo and benchmark run, built once and kept in the user's cache;
    /// `peers test` runs konnectivity's own tests against tunnel-agent.
    Peers(peer_tests::Options),
    /// Static binaries for amd64 and arm64, and an OCI archive of each program in <target dir>/image/; installs what is missing for
    /// that.
    Image(image::Options),
    /// Binaries, packages (.deb, .rpm), images, SBOMs, manifests, chart, plugin, book, notes, provenance and checksums in <target dir>/postern-VERSION/, of a clone
    /// without changes, and prints that folder. Publishes nothing: docs/releases.md has the steps before and after.
    Release(release::Options),
    /// Checks the documents' links, builds the book of docs/ in <target dir>/book and prints its first page's path; installs what is
    /// missing for that. Man pages and completion scripts get into <target dir>/man and completion.
    Docs(book::Options),
    /// Measures Postern and what a user would pick instead, on one testbed in one run (root).
    Bench(bench::Options),
    /// Runs fuzz targets.
    Fuzz(fuzz::Options),
    /// Changes one operator, branch or result at a time in the code that decides: a unit test has to notice each.
    Mutants(mutants::Options),
    /// A simulated fleet of servers and agents: new seeds, or one of them.
    Fleet(fleet::Options),
    /// Mixed load with faults for hours; fails if memory, sockets, tasks or map entries grow (root).
    Soak(soak::Options),
    /// Builds what `test` builds beside its scenarios.
    #[command(hide = true)]
    Beside(beside::Options),
    /// Several servers and agents while everything goes wrong in an order that a seed determines (root).
    Chaos(soak::ChaosOptions),
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::BuildEbpf => build_ebpf::run().map(|object| {
            println!("{}", object.display());
            ExitCode::SUCCESS
        }),
        Command::Demo(options) => demo::run_demo(&options),
        Command::Test(options) => {
            let tally = if options.is_short() { Tally::bounded(TEST_BOUND) } else { Tally::new() };
            test::run_tests(&options, tally)
        }
        Command::Lint => lint::run_lint(&mut Tally::new()).map(|()| ExitCode::SUCCESS),
        Command::Ci => {
            let mut tally = Tally::bounded(CI_BOUND);
            tally.heading("lint");
            lint::run_lint(&mut tally)?;
            test::run_tests(&options::Options::everything(), tally)
        }
        Command::Peers(options) => peer_tests::run(&options),
        Command::Image(options) => image::run_image(&options),
        Command::Release(options) => release::run_release(&options),
        Command::Docs(options) => book::run_docs(&options),
        Command::Bench(options) => bench::run_bench(&options),
        Command::Fuzz(options) => fuzz::run_all(&options),
        Command::Mutants(options) => mutants::run_all(&options),
        Command::Fleet(options) => fleet::run(&options),
        Command::Soak(options) => soak::run_soak(&options),
        Command::Beside(options) => beside::run(&options),
        Command::Chaos(options) => soak::run_chaos(&options),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn every_command_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}

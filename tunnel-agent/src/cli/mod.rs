//! The command line: the flags, what becomes of them, and the commands.

mod args;
mod doctor;
mod konnectivity;
mod konnectivity_args;
mod outbound;
mod parse;
mod status;

use clap::{Parser, Subcommand};
use tunnel_core::bundle::BundleCommand;
use tunnel_core::doctor::DoctorCommand;

pub use args::{DEFAULT_ADMIN_ADDRESS, DEFAULT_STATE_DIR, RunArgs};
pub use doctor::ExamineFlags;
pub use konnectivity_args::KonnectivityArgs;
pub use status::StatusCommand;

/// Runs on an edge node, dials the tunnel-servers, and lets them reach this node.
#[derive(Debug, Parser)]
#[command(
    name = "tunnel-agent",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the running agent's servers, certificate and connections.
    Status(StatusCommand),
    /// Examine this agent, its node and the way to the servers, and say how to fix what is wrong. Exit code: 0 fine,
    /// 1 warnings, 2 broken.
    Doctor(Box<DoctorCommand<ExamineFlags>>),
    /// Write a support bundle: state, metrics, flags, log, facts of the node, and doctor's report; no keys and no tokens.
    Bundle(Box<BundleCommand<ExamineFlags>>),
}

#[cfg(test)]
mod tests;

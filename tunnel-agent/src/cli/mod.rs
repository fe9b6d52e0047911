//! The command line: the flags, what becomes of them, and `tunnel-agent status`.

mod args;
mod parse;
mod status;

use clap::{Parser, Subcommand};

pub use args::{DEFAULT_ADMIN_ADDRESS, DEFAULT_STATE_DIR, IgnoredArgs, RunArgs};
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
}

#[cfg(test)]
mod tests;

//! The command line: flags, configuration and commands.

mod doctor;
mod status;

use clap::{Parser, Subcommand};
use tunnel_doctor::DoctorCommand;
use tunnel_doctor::bundle::BundleCommand;
use tunnel_runtime::completion::CompletionCommand;
use tunnel_runtime::service::{Service, ServiceCommand};

pub use doctor::ExamineFlags;
pub use status::StatusCommand;

use crate::config::Flags;

/// Flags and commands that `-h` shows: those that most people need.
pub const SHORT_HELP: &str = "config server node-name token-file ca-hash proxy kubeconfig allow-target state-dir log-level \
                              status doctor bundle service";

pub const SERVICE: Service = Service {
    name: "agent",
    unit: include_str!("../../../deploy/systemd/postern-agent@.service"),
    environment: include_str!("../../../deploy/systemd/agent.env"),
};

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
    pub run: Flags,
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
    // Described by its struct.
    #[command(name = "service")]
    Service(ServiceCommand),
    /// Print a script with which a shell completes commands and flags.
    Completion(CompletionCommand),
}

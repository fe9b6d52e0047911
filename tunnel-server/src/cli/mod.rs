//! The command line: the server's flags and its subcommands.

mod agent;
mod bench;
mod ca;
mod cleanup;
mod cluster_args;
mod doctor;
mod import;
mod output;
mod policy;
mod redact;
mod running;
mod status;
mod test_node;
mod token;

#[cfg(test)]
mod command_tests;

use clap::{Parser, Subcommand};
use tunnel_doctor::DoctorCommand;
use tunnel_doctor::bundle::BundleCommand;
use tunnel_runtime::completion::CompletionCommand;
use tunnel_runtime::service::{Service, ServiceCommand};

pub use agent::AgentCommand;
pub use bench::BenchCommand;
pub use ca::CaCommand;
pub use cleanup::CleanupCommand;
pub use doctor::ExamineFlags;
pub use import::ImportCommand;
pub use policy::PolicyCommand;
pub use redact::redact;
pub use status::StatusCommand;
pub use test_node::TestCommand;
pub use token::TokenCommand;

use crate::config::{Config, RedirectorFlags};

/// Flags and commands shown by `-h`: those that most people need.
pub const SHORT_HELP: &str = "inventory peers kubeconfig config state-dir bind-address redirect-ports exclude log-level \
                              status doctor test token redirector";

pub const SERVICE: Service = Service {
    name: "server",
    unit: include_str!("../../../deploy/systemd/postern-server@.service"),
    environment: include_str!("../../../deploy/systemd/server.env"),
};

/// Lets cloud components reach edge nodes that only dial out.
#[derive(Debug, Parser)]
#[command(name = "tunnel-server", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: Config,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    // Described by its flags' struct.
    #[command(name = "redirector")]
    Redirector(Box<RedirectorFlags>),
    /// Show the running server's nodes, tunnels, listeners, redirect and inventory.
    Status(StatusCommand),
    /// Examine this server and its host, and say how to fix what is wrong. Exit code: 0 fine, 1 warnings, 2 broken.
    Doctor(Box<DoctorCommand<ExamineFlags>>),
    /// Follow the way to a node: its tunnel, its kubelet and each tunnelled port. Exit code as of doctor.
    Test(TestCommand),
    /// Write a support bundle: state, metrics, flags, log, facts of the host, and doctor's report; no keys and no tokens.
    Bundle(Box<BundleCommand<ExamineFlags>>),
    /// Redact keys, tokens and passwords in standard input, as in a bundle.
    Redact,
    /// Measure the way to a node's agent: round trip, loss, throughput each way, and what limits it.
    Bench(BenchCommand),
    /// Remove the programs and redirect routes that a killed server left behind.
    Cleanup(CleanupCommand),
    /// Create, list and revoke the tokens with which agents and redirectors enrol.
    Token(TokenCommand),
    /// Revoke identities of agents, redirectors and servers, readmit them, and list both.
    Agent(AgentCommand),
    /// Show and rotate the CA.
    Ca(CaCommand),
    /// Check the file of --policy.
    Policy(PolicyCommand),
    /// Print the maps of another system's configuration as --maps reads them.
    Import(ImportCommand),
    // Described by its struct.
    #[command(name = "service")]
    Service(ServiceCommand),
    /// Print a script with which a shell completes commands and flags.
    Completion(CompletionCommand),
}

//! The command line: the server's flags and its subcommands.

mod agent;
mod args;
mod bench;
mod ca;
mod cleanup;
mod cluster_args;
mod command;
mod doctor;
mod door_args;
mod egress_args;
mod foreign_args;
mod import;
mod konnectivity_args;
mod kube_args;
mod output;
mod policy;
mod reach_args;
mod redact;
mod role_args;
mod running;
mod status;
mod test_node;
mod token;

#[cfg(test)]
mod args_tests;
#[cfg(test)]
mod command_tests;
#[cfg(test)]
mod help_tests;

pub use agent::AgentCommand;
pub use args::RunArgs;
pub use bench::BenchCommand;
pub use ca::CaCommand;
pub use cleanup::CleanupCommand;
pub use command::{Cli, Command};
pub use doctor::ExamineFlags;
pub use import::ImportCommand;
pub use policy::PolicyCommand;
pub use redact::redact;
pub use status::StatusCommand;
pub use test_node::TestCommand;
pub use token::TokenCommand;

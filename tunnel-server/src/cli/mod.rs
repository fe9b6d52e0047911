//! The command line: the server's flags and its subcommands.

mod agent;
mod bench;
mod ca;
mod cleanup;
mod cluster_args;
mod command;
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

pub use agent::AgentCommand;
pub use bench::BenchCommand;
pub use ca::CaCommand;
pub use cleanup::CleanupCommand;
pub use command::{Cli, Command, SERVICE, SHORT_HELP};
pub use doctor::ExamineFlags;
pub use import::ImportCommand;
pub use policy::PolicyCommand;
pub use redact::redact;
pub use status::StatusCommand;
pub use test_node::TestCommand;
pub use token::TokenCommand;

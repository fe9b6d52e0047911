//! The command line: the server's flags and its subcommands.

mod agent;
mod args;
mod ca;
mod cleanup;
mod cluster_args;
mod kube_args;
mod output;
mod status;
mod token;

#[cfg(test)]
mod args_tests;
#[cfg(test)]
mod command_tests;

pub use agent::AgentCommand;
pub use args::{Cli, Command, RunArgs};
pub use ca::CaCommand;
pub use cleanup::CleanupCommand;
pub use status::StatusCommand;
pub use token::TokenCommand;

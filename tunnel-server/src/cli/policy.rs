//! `tunnel-server policy`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::read;

use crate::policy::Policy;

#[derive(Args, Clone, Debug)]
pub struct PolicyCommand {
    #[command(subcommand)]
    action: PolicyAction,
}

#[derive(Clone, Debug, Subcommand)]
enum PolicyAction {
    /// Check a file for --policy, and report its errors.
    Check {
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

impl PolicyCommand {
    /// Checks the file and prints the number of rules.
    ///
    /// # Errors
    /// If the file cannot be used: with the place and the reason.
    pub fn run(&self) -> Result<(), ConfigError> {
        let PolicyAction::Check { file } = &self.action;
        let policy = read(file).and_then(|text| Policy::parse(&text));
        let wrong = |reason| ConfigError::without_value(file.display().to_string(), reason);
        println!("{}: {} rules", file.display(), policy.map_err(wrong)?.len());
        Ok(())
    }
}

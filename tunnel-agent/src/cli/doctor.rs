//! `tunnel-agent doctor` and `tunnel-agent bundle`.

use std::path::PathBuf;

use clap::Args;
use tunnel_doctor::{Asked, Examine, Report, bad_flags, parse_flags};
use tunnel_runtime::config::value::ListenAddress;

use super::Cli;
use crate::config::Flags;
use crate::doctor;
use crate::status::AgentStatus;

#[derive(Args, Clone, Debug)]
pub struct ExamineFlags {
    // Flags of the agent running at --admin-address take precedence.
    #[command(flatten, next_help_heading = "The agent's flags, if it does not run")]
    run: Flags,
}

impl Examine for ExamineFlags {
    type Status = AgentStatus;
    const UNITS: &'static str = "postern-agent@*";

    fn admin_address(&self) -> ListenAddress {
        self.run.admin_address
    }

    async fn examine(&self, running: &Asked<AgentStatus>) -> (Report, PathBuf) {
        let flags = flags_of(running).unwrap_or_else(|| self.run.clone());
        let state_dir = flags.state_dir.clone();
        let report = match flags.config(Vec::new()) {
            Ok(config) => doctor::examine(&config, running).await,
            Err(error) => bad_flags("tunnel-agent", env!("CARGO_PKG_VERSION"), &error),
        };
        (report, state_dir)
    }
}

/// The flags of a running agent. They lack the proxy's password, but this process may have the proxy from the same
/// environment.
fn flags_of(running: &Asked<AgentStatus>) -> Option<Flags> {
    let flags = running.as_ref().ok()?.flags.as_deref()?;
    let from_environment = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    let flags = flags.iter().filter(|flag| !(from_environment && flag.starts_with("--proxy=")));
    parse_flags::<Cli>(flags).map(|cli| cli.run)
}

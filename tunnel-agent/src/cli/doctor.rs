//! `tunnel-agent doctor`.

use std::path::PathBuf;

use clap::{Args, Parser};
use tunnel_core::config::{ConfigError, parse_loopback_door};
use tunnel_core::doctor::{DoctorOutput, Report, Running, ask};

use super::args::RunArgs;
use crate::doctor;
use crate::status::AgentStatus;

#[derive(Args, Clone, Debug)]
pub struct DoctorCommand {
    #[command(flatten)]
    output: DoctorOutput,
    #[command(flatten)]
    flags: DoctorFlags,
}

/// What the examination is given.
#[derive(Args, Clone, Debug)]
pub(super) struct DoctorFlags {
    // Those of the agent that runs at --admin-address count instead, if one does.
    #[command(flatten, next_help_heading = "The agent's flags, if it does not run")]
    run: RunArgs,
}

/// The flags alone.
#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    run: RunArgs,
}

impl DoctorCommand {
    /// Examines and prints. Returns the exit code: 0 fine, 1 warnings, 2 broken.
    ///
    /// # Errors
    /// A bad `--admin-address`, or standard output fails.
    pub async fn run(&self) -> anyhow::Result<u8> {
        let (report, _) = self.flags.examine().await?;
        self.output.print(&report)?;
        Ok(report.exit_code())
    }
}

/// What was asked of the running agent, or why there is no answer.
pub(super) type Asked = Result<Running<AgentStatus>, String>;

impl DoctorFlags {
    /// Also returns what the running agent said.
    ///
    /// # Errors
    /// A bad `--admin-address`.
    pub(super) async fn examine(&self) -> Result<(Report, Asked), ConfigError> {
        let running = match parse_loopback_door("--admin-address", &self.run.admin_address)? {
            Some(address) => ask(address).await.map_err(|error| error.to_string()),
            None => Err("--admin-address: port 0 means that the agent has no admin endpoints".to_owned()),
        };
        let report = match args_of(&running).as_ref().unwrap_or(&self.run).to_config() {
            Ok(config) => doctor::examine(&config, running.clone()).await,
            Err(error) => doctor::bad_flags(&error.to_string()),
        };
        Ok((report, running))
    }

    /// The state directory, of the running agent if there is one.
    pub(super) fn state_dir(&self, running: &Asked) -> PathBuf {
        args_of(running).map_or_else(|| self.run.state_dir.clone(), |args| args.state_dir)
    }
}

/// A running agent's flags. Its proxy's password is not among them, but this process may have it from the same environment.
fn args_of(running: &Asked) -> Option<RunArgs> {
    let flags = running.as_ref().ok()?.flags.as_deref()?;
    let from_environment = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    let flags =
        flags.iter().map(String::as_str).filter(|flag| !(from_environment && flag.starts_with("--proxy=")));
    Flags::try_parse_from(std::iter::once("tunnel-agent").chain(flags)).ok().map(|flags| flags.run)
}

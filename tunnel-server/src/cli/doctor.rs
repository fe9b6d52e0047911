//! `tunnel-server doctor`.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::ConfigError;
use tunnel_core::doctor::{DoctorOutput, Report, Running};

use super::args::RunArgs;
use super::running::{args_of, ask_server};
use crate::doctor;
use crate::status::StatusReport;

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
    /// Look for the rule that explains a failure in these outputs of iptables-save or `nft list ruleset`, where those tools are not,
    /// as in a pod; repeatable.
    #[arg(long, value_name = "FILE")]
    rules: Vec<PathBuf>,
    // Those of the server that runs at --admin-address count instead, if one does.
    #[command(flatten, next_help_heading = "The server's flags, if it does not run")]
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

/// What was asked of the running server, or why there is no answer.
pub(super) type Asked = Result<Running<StatusReport>, String>;

impl DoctorFlags {
    /// Also returns what the running server said.
    ///
    /// # Errors
    /// A bad `--admin-address`.
    pub(super) async fn examine(&self) -> Result<(Report, Asked), ConfigError> {
        let running = ask_server(&self.run.admin_address).await?;
        let args = running.as_ref().ok().and_then(args_of);
        let report = match args.as_ref().unwrap_or(&self.run).config() {
            Ok(config) => doctor::examine(&config, running.clone(), &self.rules).await,
            Err(error) => doctor::bad_flags(&error.to_string()),
        };
        Ok((report, running))
    }

    /// The state directory, of the running server if there is one.
    pub(super) fn state_dir(&self, running: &Asked) -> PathBuf {
        let args = running.as_ref().ok().and_then(args_of);
        args.map_or_else(|| self.run.state_dir.clone(), |args| args.state_dir)
    }
}

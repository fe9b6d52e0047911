//! `tunnel-server doctor` and `tunnel-server bundle`.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::doctor::{Asked, Examine, Report, bad_flags};

use super::args::RunArgs;
use super::running::args_of;
use crate::doctor;
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub struct ExamineFlags {
    /// Look for the rule that explains a failure in these outputs of iptables-save or `nft list ruleset`, where those tools are not,
    /// as in a pod; repeatable.
    #[arg(long, value_name = "FILE")]
    rules: Vec<PathBuf>,
    // Those of the server that runs at --admin-address count instead, if one does.
    #[command(flatten, next_help_heading = "The server's flags, if it does not run")]
    run: RunArgs,
}

impl Examine for ExamineFlags {
    type Status = StatusReport;
    const UNITS: &'static str = "postern-server@*";

    fn admin_address(&self) -> &str {
        &self.run.admin_address
    }

    async fn examine(&self, running: &Asked<StatusReport>) -> (Report, PathBuf) {
        let args = running.as_ref().ok().and_then(args_of).unwrap_or_else(|| self.run.clone());
        let report = match args.config() {
            Ok(config) => doctor::examine(&config, running, &self.rules).await,
            Err(error) => bad_flags("tunnel-server", env!("CARGO_PKG_VERSION"), &error),
        };
        (report, args.state_dir)
    }
}

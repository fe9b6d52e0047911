//! `tunnel-server doctor` and `tunnel-server bundle`.

use std::path::PathBuf;

use clap::Args;
use tunnel_doctor::{Asked, Examine, Report, bad_flags};
use tunnel_runtime::config::value::ListenAddress;

use super::running::config_of;
use crate::config::Config;
use crate::doctor;
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub struct ExamineFlags {
    /// Look for the rule that explains a failure in these outputs of iptables-save or `nft list ruleset`, where those tools are not,
    /// as in a pod; repeatable.
    #[arg(long, value_name = "FILE")]
    rules: Vec<PathBuf>,
    // If a server runs at --admin-address, its flags are used instead.
    #[command(flatten, next_help_heading = "The server's flags, if it does not run")]
    run: Config,
}

impl Examine for ExamineFlags {
    type Status = StatusReport;
    const UNITS: &'static str = "postern-server@*";

    fn admin_address(&self) -> ListenAddress {
        self.run.listeners.common.admin_address
    }

    async fn examine(&self, running: &Asked<StatusReport>) -> (Report, PathBuf) {
        let config = running.as_ref().ok().and_then(config_of);
        match config.unwrap_or_else(|| self.run.clone().check(Vec::new())) {
            Ok(config) => {
                let report = doctor::examine(&config, running, &self.rules).await;
                (report, config.process.state_dir)
            }
            Err(error) => {
                let report = bad_flags("tunnel-server", env!("CARGO_PKG_VERSION"), &error);
                (report, self.run.process.state_dir.clone())
            }
        }
    }
}

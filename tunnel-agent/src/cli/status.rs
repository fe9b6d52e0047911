//! `tunnel-agent status`.

use std::time::SystemTime;

use clap::Args;
use tunnel_core::admin::{Show, ShowError};

use super::args::DEFAULT_ADMIN_ADDRESS;
use crate::status::AgentStatus;

#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    #[command(flatten)]
    show: Show,
    /// The running agent's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

impl StatusCommand {
    /// Prints once, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// As [`Show::run`].
    pub async fn run(&self) -> Result<(), ShowError> {
        let to_text = |status: AgentStatus| status.to_text(SystemTime::now());
        self.show.run("tunnel-agent", &self.admin_address, to_text).await
    }
}

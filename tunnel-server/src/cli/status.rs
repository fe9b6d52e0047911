//! `tunnel-server status`.

use clap::Args;
use tunnel_core::admin::{Show, ShowError};

use crate::config::DEFAULT_ADMIN_ADDRESS;
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    #[command(flatten)]
    show: Show,
    /// Show every node, not only the first 50.
    #[arg(long)]
    all: bool,
    /// The running server's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

impl StatusCommand {
    /// Prints once, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// As [`Show::run`].
    pub async fn run(&self) -> Result<(), ShowError> {
        let to_text = |report: StatusReport| report.to_text(self.all);
        self.show.run("tunnel-server", &self.admin_address, to_text).await
    }
}

//! `tunnel-agent status`.

use std::time::SystemTime;

use clap::Args;
use tunnel_runtime::admin::{Show, ShowError};
use tunnel_runtime::config::value::{self, ListenAddress};
use tunnel_runtime::output::Output;

use crate::config::DEFAULT_ADMIN_ADDRESS;
use crate::connections::ConnectionsReport;
use crate::status::AgentStatus;

#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    show: Show,
    /// Show the connections that are relayed for servers now instead; 1,000 at most, first those whose receiver has taken
    /// nothing for longest.
    #[arg(long)]
    connections: bool,
    /// The running agent's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS,
          value_parser = value::listen_on_loopback)]
    admin_address: ListenAddress,
}

impl StatusCommand {
    /// Prints once, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// Those of [`Show::run`].
    pub async fn run(&self) -> Result<(), ShowError> {
        if self.connections {
            let to_text = |report: ConnectionsReport| report.to_text();
            return self
                .show
                .run(self.output.output, "tunnel-agent", self.admin_address, "/connections", to_text)
                .await;
        }
        let to_text = |status: AgentStatus| status.to_text(SystemTime::now());
        self.show.run(self.output.output, "tunnel-agent", self.admin_address, "/status", to_text).await
    }
}

//! `tunnel-server status`.

use clap::Args;
use tunnel_core::admin::Show;
use tunnel_core::config::parse_loopback_door;

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
    /// Prints the status once, or with `--watch` until Ctrl-C.
    ///
    /// # Errors
    /// A bad `--admin-address`, or, without `--watch`, no answer there.
    pub async fn run(&self) -> anyhow::Result<()> {
        let Some(address) = parse_loopback_door("--admin-address", &self.admin_address)? else {
            anyhow::bail!(
                "--admin-address={}: port 0 means that the server has no admin endpoints",
                self.admin_address
            );
        };
        Ok(self.show.run("tunnel-server", address, |report: StatusReport| report.to_text(self.all)).await?)
    }
}

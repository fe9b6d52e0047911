//! Asks the running server for its flags and its state.

use clap::Args;
use tunnel_doctor::{Running, ask_at, parse_flags};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::config::value::{self, ListenAddress};

use super::{Cli, Command};
use crate::config::Config;
use crate::listen::DEFAULT_ADMIN_ADDRESS;
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub(super) struct AskArgs {
    /// The running server's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS,
          value_parser = value::listen_on_loopback)]
    pub(super) admin_address: ListenAddress,
}

impl AskArgs {
    /// Returns the running server's configuration and state.
    ///
    /// # Errors
    /// If it is not running, or is too old to report its flags.
    pub(super) async fn configured(&self) -> anyhow::Result<(Config, Running<StatusReport>)> {
        let running = ask_at(self.admin_address).await.map_err(|reason| anyhow::anyhow!(reason))?;
        let config = config_of(&running).ok_or_else(|| {
            anyhow::anyhow!("the running server is of a version that does not report its flags; upgrade it")
        })?;
        Ok((config?, running))
    }
}

/// Returns a running server's configuration. None if it has a flag that this version does not know.
pub(super) fn config_of(running: &Running<StatusReport>) -> Option<Result<Config, ConfigError>> {
    let flags = running.flags.clone()?;
    let cli: Cli = parse_flags(&flags)?;
    match cli.command {
        None => Some(cli.run.check(flags)),
        Some(Command::Redirector(redirector)) => Some(redirector.config(flags)),
        // No other command has an admin port.
        Some(_) => None,
    }
}

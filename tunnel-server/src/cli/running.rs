//! Asks the running server for its flags and its state.

use clap::Args;
use tunnel_core::doctor::{Running, ask_at, flags_of};

use super::args::RunArgs;
use crate::config::{Config, DEFAULT_ADMIN_ADDRESS};
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub(super) struct AskArgs {
    /// The running server's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

impl AskArgs {
    /// The configuration of the running server, and its state.
    ///
    /// # Errors
    /// It does not run, or is too old to say its flags.
    pub(super) async fn configured(&self) -> anyhow::Result<(Config, Running<StatusReport>)> {
        let running = ask_at(&self.admin_address).await?.map_err(|reason| anyhow::anyhow!(reason))?;
        let args = args_of(&running).ok_or_else(|| {
            anyhow::anyhow!("the running server is of another version and does not say its flags; upgrade it")
        })?;
        Ok((args.config()?, running))
    }
}

pub(super) fn args_of(running: &Running<StatusReport>) -> Option<RunArgs> {
    flags_of(running.flags.as_deref()?)
}

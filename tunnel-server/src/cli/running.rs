//! Asks the running server for its flags and its state.

use clap::{Args, Parser};
use tunnel_core::config::{ConfigError, parse_loopback_door};
use tunnel_core::doctor::{Running, ask};

use super::args::RunArgs;
use crate::config::{Config, DEFAULT_ADMIN_ADDRESS};
use crate::status::StatusReport;

#[derive(Args, Clone, Debug)]
pub(super) struct AskArgs {
    /// The running server's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

/// The flags alone.
#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    run: RunArgs,
}

impl AskArgs {
    /// The configuration of the running server, and its state.
    ///
    /// # Errors
    /// It does not run, or is too old to say its flags.
    pub(super) async fn configured(&self) -> anyhow::Result<(Config, Running<StatusReport>)> {
        let running = ask_server(&self.admin_address).await?.map_err(|reason| anyhow::anyhow!(reason))?;
        let args = args_of(&running).ok_or_else(|| {
            anyhow::anyhow!("the running server is of another version and does not say its flags; upgrade it")
        })?;
        Ok((args.config()?, running))
    }
}

/// The server's answers, or why there are none.
///
/// # Errors
/// The address is wrong.
pub(super) async fn ask_server(admin: &str) -> Result<Result<Running<StatusReport>, String>, ConfigError> {
    match parse_loopback_door("--admin-address", admin)? {
        Some(address) => Ok(ask(address).await.map_err(|error| error.to_string())),
        None => Ok(Err("--admin-address: port 0 means that the server has no admin endpoints".to_owned())),
    }
}

/// A running server's flags. Of another version's there may be some that this one does not know.
pub(super) fn args_of(running: &Running<StatusReport>) -> Option<RunArgs> {
    let flags = running.flags.as_deref()?;
    let line = std::iter::once("tunnel-server").chain(flags.iter().map(String::as_str));
    Flags::try_parse_from(line).ok().map(|flags| flags.run)
}

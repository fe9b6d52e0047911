//! `tunnel-server cleanup`.

use std::io;
use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::ConfigError;

use crate::config::{self, DEFAULT_BPFFS, DEFAULT_TOKEN_RANGE, DEFAULT_TOKEN_RANGE_V6};
use crate::redirect::{self, Cleaned, PinConfig, RedirectConfig, RedirectError};

#[derive(Args, Clone, Debug)]
pub struct CleanupCommand {
    /// Its --token-range.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE)]
    token_range: String,
    /// Its --token-range-v6.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE_V6)]
    token_range_v6: String,
    /// Its --bpffs.
    #[arg(long, value_name = "DIR|off", env = "POSTERN_BPFFS", default_value = DEFAULT_BPFFS)]
    bpffs: String,
}

impl CleanupCommand {
    /// Removes programs and routes, and prints each.
    ///
    /// # Errors
    /// A bad range, missing privileges, or a server that still redirects here.
    pub fn run(&self) -> anyhow::Result<()> {
        let Cleaned { pins, routes } = redirect::cleanup(&self.config()?).map_err(explain)?;
        if pins.is_empty() && routes.is_empty() {
            println!("nothing was left behind");
        }
        for folder in pins {
            println!("removed the programs pinned in {}", folder.display());
        }
        for range in routes {
            println!("removed the route of the token range {range}");
        }
        Ok(())
    }

    fn config(&self) -> Result<RedirectConfig, ConfigError> {
        Ok(RedirectConfig {
            token_range: config::token_range(&self.token_range, &[])?,
            token_range_v6: config::token_range_v6(&self.token_range_v6, &[])?,
            // Whose they are does not matter, only that nobody is there any more.
            pins: config::bpffs(&self.bpffs).map(|dir| PinConfig { dir, state_dir: PathBuf::new() }),
            ..RedirectConfig::default()
        })
    }
}

/// The kernel's bare EPERM does not say what would help.
fn explain(error: RedirectError) -> anyhow::Error {
    match &error {
        RedirectError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            anyhow::Error::new(error).context(
                "cleanup needs CAP_BPF and CAP_NET_ADMIN in the host's user namespace: run it as root (sudo), or in a \
                 container with the server's capabilities",
            )
        }
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_privilege_is_named_with_its_fix() {
        let io = |kind: io::ErrorKind| RedirectError::Io { what: "cannot ask".into(), source: kind.into() };
        let denied = format!("{:#}", explain(io(io::ErrorKind::PermissionDenied)));
        assert!(denied.contains("CAP_NET_ADMIN") && denied.contains("root"), "{denied}");
        assert!(denied.contains("cannot ask"), "what was tried stays: {denied}");
        assert!(!format!("{:#}", explain(io(io::ErrorKind::NotFound))).contains("root"));
    }
}

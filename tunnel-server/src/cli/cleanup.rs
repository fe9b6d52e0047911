//! `tunnel-server cleanup`.

use std::io;
use std::path::Path;

use clap::Args;
use tunnel_redirect::{Cleaned, RedirectError};

use crate::config::RedirectRanges;

#[derive(Args, Clone, Debug)]
pub struct CleanupCommand {
    // Those of the killed server.
    #[command(flatten)]
    ranges: RedirectRanges,
}

impl CleanupCommand {
    /// Removes programs and routes, and prints each of them.
    ///
    /// # Errors
    /// If privileges are missing, or a server still redirects here.
    pub fn run(&self) -> anyhow::Result<()> {
        // The owner does not matter, only that it is not running any more.
        let config = self.ranges.start_config(Path::new(""));
        let Cleaned { pins, routes, rules, edge_routes } =
            tunnel_redirect::cleanup(&config).map_err(explain)?;
        if pins.is_empty() && routes.is_empty() && rules == 0 && edge_routes == 0 {
            println!("nothing was left behind");
        }
        for folder in pins {
            println!("removed the programs pinned in {}", folder.display());
        }
        for range in routes {
            println!("removed the route of the redirect range {range}");
        }
        if rules > 0 {
            println!("removed {rules} rules for connections by route");
        }
        if edge_routes > 0 {
            println!("removed {edge_routes} routes for connections by route");
        }
        Ok(())
    }
}

/// Adds the fix to the kernel's bare EPERM.
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

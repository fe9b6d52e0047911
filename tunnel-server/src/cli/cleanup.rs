//! `tunnel-server cleanup`.

use clap::Args;
use ipnet::IpNet;
use tunnel_core::config::{ConfigError, parse_cidr};

use crate::config::{DEFAULT_TOKEN_RANGE, DEFAULT_TOKEN_RANGE_V6};
use crate::redirect::{self, RedirectConfig};

/// The flags that the killed server ran with.
#[derive(Args, Clone, Debug)]
pub struct CleanupCommand {
    /// Its --token-range.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE)]
    token_range: String,
    /// Its --token-range-v6.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE_V6)]
    token_range_v6: String,
}

impl CleanupCommand {
    /// Removes the routes and says which.
    ///
    /// # Errors
    /// A bad range, missing privileges, or a server that still redirects here.
    pub fn run(&self) -> anyhow::Result<()> {
        let report = redirect::cleanup(&self.config()?)?;
        if report.routes_removed.is_empty() {
            println!("nothing was left behind");
        }
        for range in report.routes_removed {
            println!("removed the route of the token range {range}");
        }
        Ok(())
    }

    fn config(&self) -> Result<RedirectConfig, ConfigError> {
        let wrong =
            |key: &str, value: &str, family: &str| ConfigError::new(key, value, format!("not {family}"));
        let (v4, v6) = (&self.token_range, &self.token_range_v6);
        let IpNet::V4(token_range) = parse_cidr("--token-range", v4)? else {
            return Err(wrong("--token-range", v4, "IPv4"));
        };
        let IpNet::V6(token_range_v6) = parse_cidr("--token-range-v6", v6)? else {
            return Err(wrong("--token-range-v6", v6, "IPv6"));
        };
        Ok(RedirectConfig { token_range, token_range_v6, ..RedirectConfig::default() })
    }
}

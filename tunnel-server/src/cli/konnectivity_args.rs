//! The flags for konnectivity's agents.

use clap::Args;
use tunnel_core::config::{ConfigError, parse_port};

use crate::config::{
    DEFAULT_KONNECTIVITY_ACCOUNT, DEFAULT_KONNECTIVITY_AUDIENCE, KonnectivityConfig, service_account,
};

/// konnectivity's agents attach as if they were tunnel-agents.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "konnectivity's agents")]
pub struct KonnectivityArgs {
    /// Port for konnectivity's agents (proxy-agent --proxy-server-port), with TLS; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0")]
    pub konnectivity_agent_port: String,
    /// NAMESPACE/NAME of the ServiceAccount whose pods' tokens are taken there in a cluster. A client certificate of this
    /// server's CA does without.
    #[arg(long, value_name = "ACCOUNT", default_value = DEFAULT_KONNECTIVITY_ACCOUNT)]
    pub konnectivity_service_account: String,
    /// Audience that these tokens must be for.
    #[arg(
        long,
        value_name = "AUDIENCE",
        alias = "authentication-audience",
        default_value = DEFAULT_KONNECTIVITY_AUDIENCE
    )]
    pub konnectivity_audience: String,
    /// konnectivity's: with it --agent-service-account is the name in --konnectivity-service-account.
    #[arg(long, hide = true, conflicts_with = "konnectivity_service_account")]
    pub agent_namespace: Option<String>,
}

impl KonnectivityArgs {
    /// `agents`: `--agent-service-account`.
    pub(super) fn config(&self, agents: &str) -> Result<Option<KonnectivityConfig>, ConfigError> {
        let account = match &self.agent_namespace {
            Some(namespace) => service_account(&format!("{namespace}/{agents}"))?,
            None => service_account(&self.konnectivity_service_account)?,
        };
        let port = parse_port("--konnectivity-agent-port", &self.konnectivity_agent_port)?;
        let audience = self.konnectivity_audience.clone();
        if audience.is_empty() {
            return Err(ConfigError::without_value("--konnectivity-audience", "an audience is needed"));
        }
        Ok(port.map(|port| KonnectivityConfig { port, account, audience }))
    }

    /// `--agent-namespace` if it is given and means nothing, and why. `is_on`: konnectivity's agents have a port.
    pub(super) fn ignored(&self, is_on: bool) -> Option<(&'static str, &'static str)> {
        let without_port = self.agent_namespace.is_some() && !is_on;
        without_port.then_some(("--agent-namespace", "konnectivity's agents need --konnectivity-agent-port"))
    }
}

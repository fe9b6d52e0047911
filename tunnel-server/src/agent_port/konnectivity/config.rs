//! The flags for konnectivity's agents, which attach as if they were tunnel-agents.

use clap::Args;
use tunnel_runtime::config::value::{self, Port};

use crate::caller::service_account;

/// The port of konnectivity's agents. The default is that it is off.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "konnectivity's agents")]
pub struct KonnectivityConfig {
    /// Port for konnectivity's agents (proxy-agent --proxy-server-port), with TLS; 0: off.
    #[arg(id = "konnectivity-agent-port", long, value_name = "PORT", default_value = "0", value_parser = value::port)]
    pub port: Port,
    /// NAMESPACE/NAME of the ServiceAccount whose pods' tokens are accepted there in a cluster, in place of a client
    /// certificate of this server's CA.
    // The default is that of konnectivity's own manifests.
    #[arg(id = "konnectivity-service-account", long, value_name = "ACCOUNT",
          default_value = "kube-system/konnectivity-agent", value_parser = service_account)]
    pub account: String,
    /// Audience that these tokens must be for.
    #[arg(id = "konnectivity-audience", long, value_name = "AUDIENCE", alias = "authentication-audience",
          default_value = "system:konnectivity-server", value_parser = audience)]
    pub audience: String,
    /// konnectivity's: with it --agent-service-account is the name in --konnectivity-service-account.
    #[arg(long, hide = true)]
    pub(crate) agent_namespace: Option<String>,
}

fn audience(value: &str) -> Result<String, String> {
    if value.is_empty() { Err("an audience is needed".to_owned()) } else { Ok(value.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::service_account_user;

    #[test]
    fn a_service_account_has_a_namespace_and_a_name() {
        let account = service_account("kube-system/konnectivity-agent").unwrap();
        assert_eq!(service_account_user(&account), "system:serviceaccount:kube-system:konnectivity-agent");
        for value in ["", "konnectivity-agent", "/a", "a/", "a/b/c", "a/b:c"] {
            assert!(service_account(value).is_err(), "{value:?}");
        }
    }
}

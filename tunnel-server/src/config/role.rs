//! What a redirector is configured with.

use tunnel_core::identity::{NodeName, SecretString};

use super::Config;
use crate::role::Role;

/// What only a redirector needs.
#[derive(Clone, Debug)]
pub struct RedirectorConfig {
    /// The one that its certificate names.
    pub node: NodeName,
    /// Without Kubernetes.
    pub token: Option<SecretString>,
    /// `sha256:HEX`.
    pub ca_hash: Option<String>,
}

/// Flags of servers only: a redirector has no agents, no doors but the redirect, no CA, and writes nothing to a cluster.
pub(crate) const OF_SERVERS: &[&str] = &[
    "agent-port",
    "secure-port",
    "secure-ports",
    "insecure-bind-address",
    "insecure-port",
    "connect-port",
    "policy",
    "map",
    "maps",
    "terminate-tls",
    "kubelet-certificate-authority",
    "kubelet-client-certificate",
    "kubelet-client-key",
    "http-ports",
    "plain-port",
    "plain-clients",
    "plain-ports",
    "egress-socket",
    "egress-socket-mode",
    "egress-port",
    "egress-client-ca",
    "egress-clients",
    "egress-cert",
    "egress-key",
    "egress-direct",
    "egress-services",
    "konnectivity-agent-port",
    "konnectivity-service-account",
    "konnectivity-audience",
    "unknown-agents",
    "token-enrollment",
    "cert-dns-names",
    "cert-ips",
    "dns-configmap",
    "internal-service",
    "ca-secret",
    "lease",
    "revocations-configmap",
    "agent-service-account",
    "redirector-service-account",
];

/// Flags that at a redirector are for `--metrics-port` only.
pub(crate) const OF_METRICS: &[&str] = &["bind-address", "token-auth-file", "client-ca-file"];

impl Config {
    pub fn role(&self) -> Role {
        if self.redirector.is_some() { Role::Redirector } else { Role::Server }
    }

    /// Adds the flags of the role, with the token masked, and removes those that it does not have.
    pub(super) fn add_role(&self, flags: &mut Vec<(&'static str, String)>) {
        flags.push(("role", self.role().to_string()));
        let Some(redirector) = &self.redirector else { return };
        flags.retain(|(flag, _)| !OF_SERVERS.contains(flag));
        if self.metrics_port.is_none() {
            flags.retain(|(flag, _)| !OF_METRICS.contains(flag));
        }
        flags.push(("node-name", redirector.node.to_string()));
        flags.extend(redirector.token.as_ref().map(|_| ("token", "***".to_owned())));
        flags.extend(redirector.ca_hash.clone().map(|hash| ("ca-hash", hash)));
    }
}

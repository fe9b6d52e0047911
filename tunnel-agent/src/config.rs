//! The agent's configuration, typed.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tunnel_core::config::{HostPort, TargetRule, duration_text};
use tunnel_core::identity::{NodeName, SecretString};
use tunnel_core::logging;

use crate::kube::KubeOptions;
use crate::reach::Reach;

/// Complete and free of contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    /// Without duplicates. Empty: found through the API server.
    pub servers: Vec<HostPort>,
    /// None: standalone.
    pub kube: Option<KubeOptions>,
    pub node_name: NodeName,
    /// None: from the route to the server.
    pub node_ip: Option<IpAddr>,
    pub token: Option<SecretString>,
    /// `sha256:HEX`.
    pub ca_hash: Option<String>,
    /// The way to the servers.
    pub reach: Reach,
    pub state_dir: PathBuf,
    /// None: off.
    pub admin_address: Option<SocketAddr>,
    /// Empty: the default policy.
    pub allow_targets: Vec<TargetRule>,
    /// TCP connections with each server, at most.
    pub max_links: u32,
    /// How long a link may be silent before the kernel asks whether it is alive.
    pub keepalive: Duration,
    pub drain_timeout: Duration,
    pub log_format: logging::Format,
    pub log_level: logging::Level,
    /// The given flags that have no meaning here, each with the reason.
    pub ignored: Vec<(&'static str, &'static str)>,
}

impl Config {
    /// The flags that give this configuration, defaults included, with the token masked.
    pub fn flags(&self) -> Vec<String> {
        let servers = self.servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let kube = self.kube.as_ref();
        let optional = [
            ("server", Some(servers).filter(|servers| !servers.is_empty())),
            ("kubeconfig", kube.and_then(|kube| Some(kube.kubeconfig.as_ref()?.display().to_string()))),
            ("namespace", kube.and_then(|kube| kube.namespace.clone())),
            ("service", kube.map(|kube| kube.service.clone())),
            ("node-ip", self.node_ip.map(|address| address.to_string())),
            ("token", self.token.as_ref().map(|_| "***".to_owned())),
            ("ca-hash", self.ca_hash.clone()),
            ("proxy", self.reach.proxy().map(ToString::to_string)),
        ];
        let given = [
            ("node-name", self.node_name.to_string()),
            ("state-dir", self.state_dir.display().to_string()),
            (
                "admin-address",
                self.admin_address.map_or_else(|| "0".to_owned(), |address| address.to_string()),
            ),
            ("max-links", self.max_links.to_string()),
            ("keepalive", duration_text(self.keepalive)),
            ("congestion-control", self.reach.congestion().to_string()),
            ("drain-timeout", duration_text(self.drain_timeout)),
            ("log-format", self.log_format.to_string()),
            ("log-level", self.log_level.to_string()),
        ];
        let optional = optional.into_iter().filter_map(|(flag, value)| Some((flag, value?)));
        let rules = self.allow_targets.iter().map(|rule| ("allow-target", rule.to_string()));
        given
            .into_iter()
            .chain(optional)
            .chain(rules)
            .map(|(flag, value)| format!("--{flag}={value}"))
            .collect()
    }
}

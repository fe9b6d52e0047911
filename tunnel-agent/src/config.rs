//! The agent's configuration, typed.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tunnel_core::config::{HostPort, TargetRule, duration_text};
use tunnel_core::identity::{NodeName, SecretString};
use tunnel_core::logging;

use crate::konnectivity::KonnectivityConfig;
use crate::kube::KubeOptions;
use crate::outbound::Listen;
use crate::reach::Reach;
use crate::session::Spread;

/// What becomes of this agent once another one has taken over from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenReplaced {
    Exit,
    /// It waits to be stopped, and goes on should the other one die.
    Wait,
}

impl fmt::Display for WhenReplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exit => "exit",
            Self::Wait => "wait",
        })
    }
}

impl FromStr for WhenReplaced {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "exit" => Ok(Self::Exit),
            "wait" => Ok(Self::Wait),
            _ => Err("not exit or wait"),
        }
    }
}

/// Complete and free of contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    /// Without duplicates. Empty: found through the API server.
    pub servers: Vec<HostPort>,
    /// None: standalone.
    pub kube: Option<KubeOptions>,
    /// The servers are konnectivity's; `servers` is empty then, and nothing is enrolled.
    pub konnectivity: Option<KonnectivityConfig>,
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
    /// The default policy allows this node's pods too.
    pub pod_targets: bool,
    /// Listeners that lead to the cloud.
    pub outbound: Vec<Listen>,
    /// Servers may measure the way to this agent.
    pub bench: bool,
    /// How many of the servers to be attached to.
    pub spread: Spread,
    /// TCP connections with each server, at most; `None`: as the congestion control of both ends needs.
    pub max_links: Option<u32>,
    /// How long a link may be silent before the kernel asks whether it is alive.
    pub keepalive: Duration,
    pub drain_timeout: Duration,
    pub when_replaced: WhenReplaced,
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
            ("pod-targets", if self.pod_targets { "on" } else { "off" }.to_owned()),
            ("bench", if self.bench { "on" } else { "off" }.to_owned()),
            ("links", self.spread.to_string()),
            ("max-links", self.max_links.map_or_else(|| "auto".to_owned(), |most| most.to_string())),
            ("keepalive", duration_text(self.keepalive)),
            ("congestion-control", self.reach.congestion().to_string()),
            ("drain-timeout", duration_text(self.drain_timeout)),
            ("when-replaced", self.when_replaced.to_string()),
            ("log-format", self.log_format.to_string()),
            ("log-level", self.log_level.to_string()),
        ];
        let optional = optional.into_iter().filter_map(|(flag, value)| Some((flag, value?)));
        let konnectivity = self.konnectivity.iter().flat_map(KonnectivityConfig::flags);
        let outbound = self.outbound.iter().flat_map(Listen::flags);
        let rules = self.allow_targets.iter().map(|rule| ("allow-target", rule.to_string()));
        given
            .into_iter()
            .chain(optional)
            .chain(rules)
            .chain(outbound)
            .chain(konnectivity)
            .map(|(flag, value)| format!("--{flag}={value}"))
            .collect()
    }
}

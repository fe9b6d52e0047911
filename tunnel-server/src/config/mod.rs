//! The server's flags, which are its configuration: each part has its own clap `Args` struct. Settings that depend on
//! several flags are checked and completed in [`Config::check`].

#[cfg(test)]
mod file_tests;
#[cfg(test)]
mod foreign_tests;
#[cfg(test)]
mod help_tests;
mod redirect;
mod redirector;
#[cfg(test)]
mod tests;

pub use redirect::{RedirectFlags, RedirectRanges};
pub use redirector::{RedirectorConfig, RedirectorFlags};
use tunnel_redirect::RedirectConfig;
use tunnel_routing::inventory::{DEFAULT_EDGE_SELECTOR, Selector};
use tunnel_routing::{RouterConfig, host_addresses};

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ipnet::IpNet;
use tunnel_link::link::Congestion;
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::value::{self, List, OnOff};
use tunnel_runtime::config::{ConfigError, ConfigFile, HostPort, Ignored};
use tunnel_runtime::logging::LogConfig;

use crate::caller::service_account;
use crate::kube::{KubeOptions, ObjectNames};
use crate::listen::ListenersConfig;
use crate::pki::{DEFAULT_STATE_DIR, ServerNames};
use crate::runtime::role::Role;

/// Configuration of a server, and of a redirector, whose listeners are all off.
#[derive(Args, Clone, Debug)]
pub struct Config {
    #[command(flatten)]
    pub nodes: NodesConfig,
    #[command(flatten)]
    pub process: ProcessConfig,
    #[command(flatten)]
    pub log: LogConfig,
    /// on or off: redirect connections of this host and its pods to edge nodes, by eBPF; on fails where that is impossible.
    #[arg(id = "redirect", long, value_name = "on|off", alias = "enable-iptables", default_value = "on",
          num_args = 0..=1, default_missing_value = "on", value_parser = value::on_off, help_heading = "Redirect")]
    pub redirects: OnOff,
    #[command(flatten)]
    pub redirect: RedirectFlags,
    #[command(flatten)]
    pub listeners: ListenersConfig,
    // Leads to the nodes and the CA if there is no inventory.
    #[command(flatten)]
    pub kube: KubeOptions,
    #[command(flatten)]
    pub writes: WritesConfig,
    #[command(flatten)]
    pub ignored: Ignored,
    /// Set for a redirector only.
    #[arg(skip)]
    pub redirector: Option<RedirectorConfig>,
    /// The flags that yield this configuration, defaults included, without secrets.
    #[arg(skip)]
    pub flags: Vec<String>,
}

/// Where the nodes and the other servers are.
#[derive(Args, Clone, Debug)]
pub struct NodesConfig {
    /// Run without Kubernetes: read the nodes from this NodeList, and again when it changes.
    ///
    /// It has the form of `kubectl get nodes -o yaml`.
    #[arg(long, value_name = "FILE")]
    pub inventory: Option<PathBuf>,
    /// on or off: accept an inventory without nodes; otherwise it is rejected and the last one stays in effect.
    #[arg(long, value_name = "on|off", default_value = "off", num_args = 0..=1, default_missing_value = "on",
          value_parser = value::on_off)]
    pub allow_empty_inventory: OnOff,
    /// Which nodes are edge nodes: a label selector as `kubectl get -l` takes it, or several joined by ||.
    #[arg(long, value_name = "SELECTOR", env = "POSTERN_EDGE_SELECTOR", default_value = DEFAULT_EDGE_SELECTOR)]
    pub edge_selector: Selector,
    /// Agent ports of the other servers, comma-separated HOST:PORT; this server's own may be among them [default: none; in a
    /// cluster the Service's EndpointSlices name them]. A server forwards connections to the one that has the node.
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true,
          value_parser = value::list::<HostPort, BTreeSet<_>>)]
    pub peers: BTreeSet<HostPort>,
}

/// The process itself.
#[derive(Args, Clone, Debug)]
pub struct ProcessConfig {
    #[command(flatten)]
    pub file: ConfigFile,
    /// Where the CA, keys, tokens and certificates are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// TCP congestion control of the links for what this process sends: auto (BBR where the kernel has it and permits it, else the
    /// system's), system, or the kernel's name of one.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = Congestion::parse)]
    pub congestion_control: Congestion,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", alias = "graceful-shutdown-timeout", default_value = "30s",
          value_parser = value::duration)]
    pub drain_timeout: Duration,
}

/// Objects that are written to a cluster. The default is none.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes")]
pub struct WritesConfig {
    /// on or off: keep the nodes' DNS records in --dns-configmap.
    #[arg(long, value_name = "on|off", alias = "enable-dns-controller", default_value = "on", num_args = 0..=1,
          default_missing_value = "on", value_parser = value::on_off)]
    pub dns_records: OnOff,
    /// Zones of the nodes' names, comma-separated, for DNS records of names with dots: any other such name could be that of a
    /// Service or of a host elsewhere [default: none].
    #[arg(long, value_name = "ZONES", default_value = "", hide_default_value = true, value_parser = value::list::<NodeName, List<_>>)]
    pub dns_zones: List<NodeName>,
    /// on or off: also keep a condition PosternTunnel on each edge node, which takes the right to patch the status of Nodes.
    #[arg(long, value_name = "on|off", default_value = "off", value_parser = value::on_off)]
    pub node_condition: OnOff,
}

impl Config {
    /// Checks and completes the settings that depend on several flags. `flags` are the flags in effect.
    ///
    /// # Errors
    /// If flags conflict or one is missing: names one of them and the reason.
    pub fn check(mut self, flags: Vec<String>) -> Result<Self, ConfigError> {
        self.flags = flags;
        self.translate()?;
        let policy = self.listeners.connect.policy.is_some();
        self.nodes.edge_selector = self.nodes.edge_selector.keep_labels(policy);
        if self.redirects {
            self.redirect.check()?;
        }
        self.listeners.check(self.nodes.inventory.is_some(), self.kube.kubeconfig.is_some())?;
        Ok(self)
    }

    /// Translates flags that have another meaning in other systems.
    fn translate(&mut self) -> Result<(), ConfigError> {
        // YurtTunnel's manifests open the http listener to everyone who reaches the node; here it stays on the loopback.
        let ListenersConfig { listeners, konnectivity, .. } = &mut self.listeners;
        if let Some(address) = listeners.insecure_bind_address.filter(|address| !address.is_loopback())
            && !self.ignored.0.is_empty()
        {
            let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            listeners.insecure_bind_address = Some(loopback[usize::from(address.is_ipv6())]);
            self.ignored.0.push("--insecure-bind-address".to_owned());
        }
        // In konnectivity, --agent-service-account is the account of its own agents.
        if let Some(namespace) = &konnectivity.agent_namespace {
            let account = format!("{namespace}/{}", self.kube.names.agent_service_account);
            konnectivity.account = service_account(&account)
                .map_err(|reason| ConfigError::new("--agent-namespace", namespace, reason))?;
            self.kube.names.agent_service_account = ObjectNames::default().agent_service_account;
            if konnectivity.port.is_none() {
                self.ignored.0.push("--agent-namespace".to_owned());
            }
        }
        Ok(())
    }

    /// Configuration of the redirect; None if it is off.
    pub fn redirect_start(&self) -> Option<RedirectConfig> {
        self.redirects.then(|| self.redirect.start_config(&self.process.state_dir))
    }

    pub fn role(&self) -> Role {
        if self.redirector.is_some() { Role::Redirector } else { Role::Server }
    }

    /// True if agents enrol with tokens.
    pub(crate) fn token_enrollment(&self) -> bool {
        self.listeners.agents.token_enrollment.unwrap_or(self.nodes.inventory.is_some())
    }

    /// Configuration of the router. `api_server` are the API server's addresses, if known.
    pub(crate) fn router(&self, api_server: impl IntoIterator<Item = IpAddr>) -> RouterConfig {
        // In a cluster the manifests set the node's name. A standalone server's environment does not refer to its file.
        let host = match self.nodes.inventory {
            Some(_) => None,
            None => std::env::var("NODE_NAME").ok().and_then(|name| name.parse().ok()),
        };
        let redirect = &self.redirect;
        RouterConfig {
            redirect_range: redirect.ranges.redirect_range,
            redirect_range_v6: redirect.ranges.redirect_range_v6,
            ports: redirect.redirect_ports.clone(),
            pods: redirect.edge_pod_routes.clone(),
            host,
            edge_addresses: redirect.edge_addresses.clone(),
            foreign: {
                let services = redirect.service_cidrs.iter().copied();
                services.chain(api_server.into_iter().map(IpNet::from)).collect()
            },
            exclude: redirect.exclude.clone(),
            clients: redirect.redirect_clients.clone(),
            host_addresses,
            clock: Clock::default(),
        }
    }

    /// Names in the server's certificate before a cluster adds its own.
    pub(crate) fn server_names(&self) -> ServerNames {
        let ListenersConfig { common, agents, .. } = &self.listeners;
        ServerNames {
            dns: agents.cert_dns_names.clone(),
            addresses: agents.cert_ips.clone(),
            local_addresses: common.bind_address.is_unspecified(),
        }
    }
}

//! The server's flags, which are its configuration: each part has its own clap `Args` struct. Settings that depend on
//! several flags are checked and completed in [`Config::check`].

mod doors;
mod egress;
#[cfg(test)]
mod foreign_tests;
#[cfg(test)]
mod help_tests;
mod konnectivity;
mod parts;
mod redirect;
mod redirector;
#[cfg(test)]
mod tests;

pub(crate) use doors::MOST_SECURE_PORTS;
pub use doors::{ConnectConfig, DoorConfig, PlainConfig, TargetConfig, parse_secure_ports};
pub use egress::{EgressConfig, EgressTlsConfig};
pub use konnectivity::KonnectivityConfig;
pub use redirect::{RedirectFlags, RedirectRanges};
pub use redirector::{RedirectorConfig, RedirectorFlags};

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tunnel_core::config::value::{self, List, ListenAddress, OnOff, Port};
use tunnel_core::config::{ConfigError, ConfigFile, HostPort, Ignored};
use tunnel_core::link::Congestion;
use tunnel_core::logging::LogConfig;

use crate::inventory::{DEFAULT_EDGE_SELECTOR, Selector};
use crate::kube::{KubeOptions, ObjectNames};
use crate::pki::DEFAULT_STATE_DIR;
use crate::redirect::RedirectConfig;
use crate::role::Role;
use doors::Others;

pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10265";

/// Source of the nodes and the CA.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a process has one")]
pub enum NodeSource {
    /// A NodeList in a file, and a CA in the state directory.
    File(PathBuf),
    Kubernetes(KubeOptions),
}

/// What a server runs with, and a redirector, whose listeners are all off.
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
    pub agents: AgentsConfig,
    #[command(flatten)]
    pub doors: DoorConfig,
    #[command(flatten)]
    pub connect: ConnectConfig,
    #[command(flatten)]
    pub kube: KubeOptions,
    #[command(flatten)]
    pub writes: WritesConfig,
    #[command(flatten)]
    pub egress: EgressConfig,
    #[command(flatten)]
    pub konnectivity: KonnectivityConfig,
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
    #[arg(long, value_name = "SELECTOR", default_value = DEFAULT_EDGE_SELECTOR)]
    pub edge_selector: Selector,
    /// Agent ports of the other servers, comma-separated HOST:PORT; this server's own may be among them [default: none; in a
    /// cluster the Service's EndpointSlices name them]. A server passes connections on to the one that has the node.
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true,
          value_parser = value::list::<HostPort, BTreeSet<_>>)]
    pub peers: BTreeSet<HostPort>,
}

/// The process itself, its admin endpoints and its metrics.
#[derive(Args, Clone, Debug)]
pub struct ProcessConfig {
    #[command(flatten)]
    pub file: ConfigFile,
    /// Where the CA, keys, tokens and certificates are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Address of every port but --insecure-port and --admin-address; an IPv6 literal such as :: switches the family.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0", value_parser = value::ip)]
    pub bind_address: IpAddr,
    /// Where to serve /metrics, /healthz, /readyz and /status: a loopback address and a port, or a port; port 0: off.
    // konnectivity has two ports for these, of which the last that is given counts.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-port", "health-port"],
          overrides_with = "admin_address", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS,
          value_parser = value::listen_on_loopback)]
    pub admin_address: ListenAddress,
    /// Port of the metrics door, on --bind-address: /metrics over TLS for other hosts. Callers show a certificate or a bearer token,
    /// and in a cluster may get the nonResourceURL /metrics; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = value::port)]
    pub metrics_port: Port,
    /// CAs (PEM) of callers' certificates, at --connect-port and --metrics-port and with --terminate-tls, and again when the file
    /// changes [default: in a cluster, the one that kube-apiserver accepts; else none is asked for].
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Callers' tokens, as kube-apiserver's flag of this name reads them (TOKEN,USER,UID,"GROUPS"), and again when the file
    /// changes; in a cluster besides those that the API server knows [default: none].
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,
    /// TCP congestion control of the links for what this process sends: auto (BBR where the kernel has it and permits it, else the
    /// system's), system, or the kernel's name of one.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = Congestion::parse)]
    pub congestion_control: Congestion,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", alias = "graceful-shutdown-timeout", default_value = "30s",
          value_parser = value::duration)]
    pub drain_timeout: Duration,
}

/// The agents' port and what they need to attach. The default is that it is off.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Agents")]
pub struct AgentsConfig {
    /// Port that the agents dial; 0: off.
    #[arg(id = "agent-port", long, value_name = "PORT", alias = "tunnel-agent-connect-port", default_value = "10262",
          value_parser = value::port)]
    pub port: Port,
    /// refuse or allow agents of nodes that are not in the inventory, at each attach and renewal.
    #[arg(id = "unknown-agents", long, value_name = "refuse|allow", default_value = "refuse",
          value_parser = refuse_or_allow)]
    pub refuse_unknown: OnOff,
    /// on or off: agents enrol with tokens of `tunnel-server token create` [default: on with --inventory, off in a cluster].
    #[arg(long, value_name = "on|off", value_parser = value::on_off)]
    token_enrollment: Option<OnOff>,
    /// Additional DNS names in the server's certificate, comma-separated [default: none].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = dns_names)]
    cert_dns_names: List<String>,
    /// Additional IP addresses in the server's certificate, comma-separated [default: none; it has this host's].
    #[arg(long, value_name = "IPS", default_value = "", hide_default_value = true,
          value_parser = value::list::<IpAddr, List<_>>)]
    cert_ips: List<IpAddr>,
}

/// What is written to a cluster. The default is nothing.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes")]
pub struct WritesConfig {
    /// on or off: keep the nodes' DNS records in --dns-configmap.
    #[arg(long, value_name = "on|off", alias = "enable-dns-controller", default_value = "on", num_args = 0..=1,
          default_missing_value = "on", value_parser = value::on_off)]
    pub dns_records: OnOff,
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
        self.nodes.edge_selector = self.nodes.edge_selector.keep_labels(self.connect.policy.is_some());
        if self.redirects {
            self.redirect.check()?;
        }
        let (standalone, metrics) = (self.nodes.inventory.is_some(), self.process.metrics_port);
        self.doors.check(&Others {
            standalone,
            kubeconfig: self.kube.kubeconfig.is_some(),
            client_ca: self.process.client_ca_file.as_ref(),
            takes_certificates: self.connect.connect_port.is_some() || metrics.is_some(),
        })?;
        self.egress.check()?;
        self.check_ports()?;
        let known = self.process.token_auth_file.is_some() || self.process.client_ca_file.is_some();
        match metrics {
            Some(port) if standalone && !known => {
                let reason = "with --inventory callers show a token or a certificate that a file knows: give \
                              --token-auth-file or --client-ca-file";
                Err(ConfigError::new("--metrics-port", port.to_string(), reason))
            }
            _ => Ok(self),
        }
    }

    /// Translates flags that have another meaning in other systems.
    fn translate(&mut self) -> Result<(), ConfigError> {
        // YurtTunnel's manifests open the http door to everyone who reaches the node; here it stays on the loopback.
        if let Some(address) = self.doors.insecure_bind_address.filter(|address| !address.is_loopback())
            && !self.ignored.0.is_empty()
        {
            let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            self.doors.insecure_bind_address = Some(loopback[usize::from(address.is_ipv6())]);
            self.ignored.0.push("--insecure-bind-address".to_owned());
        }
        // In konnectivity, --agent-service-account is the account of its own agents.
        if let Some(namespace) = &self.konnectivity.agent_namespace {
            let account = format!("{namespace}/{}", self.kube.names.agent_service_account);
            self.konnectivity.account = konnectivity::service_account(&account)
                .map_err(|reason| ConfigError::new("--agent-namespace", namespace, reason))?;
            self.kube.names.agent_service_account = ObjectNames::default().agent_service_account;
            if self.konnectivity.port.is_none() {
                self.ignored.0.push("--agent-namespace".to_owned());
            }
        }
        Ok(())
    }

    pub fn source(&self) -> NodeSource {
        match &self.nodes.inventory {
            Some(path) => NodeSource::File(path.clone()),
            None => NodeSource::Kubernetes(self.kube.clone()),
        }
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
        self.agents.token_enrollment.unwrap_or(self.nodes.inventory.is_some())
    }

    /// The addresses of all listeners except those of maps and the redirect, each with its flag.
    pub(crate) fn listeners(&self) -> Vec<(&'static str, SocketAddr)> {
        let at = |port: Port| port.map(|port| SocketAddr::new(self.process.bind_address, port));
        let listeners = [
            ("--agent-port", at(self.agents.port)),
            ("--secure-port", at(self.doors.secure_port)),
            ("--insecure-port", self.doors.insecure_address()),
            ("--connect-port", at(self.connect.connect_port)),
            ("--plain-port", at(self.doors.plain.port)),
            ("--egress-port", at(self.egress.port)),
            ("--konnectivity-agent-port", at(self.konnectivity.port)),
            ("--metrics-port", at(self.process.metrics_port)),
            ("--admin-address", self.process.admin_address),
        ];
        let secure = self.doors.secure_ports.keys().map(|port| ("--secure-ports", at(Some(*port))));
        listeners.into_iter().chain(secure).filter_map(|(key, address)| Some((key, address?))).collect()
    }

    /// Refuses two listeners on one address: the second would fail to bind, with an error that does not name the flag
    /// of the first.
    fn check_ports(&self) -> Result<(), ConfigError> {
        let listeners = self.listeners();
        for (index, (key, address)) in listeners.iter().enumerate() {
            let same = |(_, other): &&(_, SocketAddr)| {
                let anywhere = address.ip().is_unspecified() || other.ip().is_unspecified();
                address.port() == other.port() && (address.ip() == other.ip() || anywhere)
            };
            if let Some((other, _)) = listeners[..index].iter().find(same) {
                let reason = format!("{other} has port {} already; choose another", address.port());
                return Err(ConfigError::without_value(*key, reason));
            }
        }
        Ok(())
    }
}

fn refuse_or_allow(value: &str) -> Result<bool, String> {
    match value {
        "refuse" => Ok(true),
        "allow" => Ok(false),
        _ => Err("use refuse or allow".to_owned()),
    }
}

fn dns_names(value: &str) -> Result<List<String>, String> {
    let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            // A name valid in a certificate (RFC 5280 §4.2.1.6), or a wildcard in the first label.
            let plain = name.strip_prefix("*.").unwrap_or(name);
            match rustls_pki_types::DnsName::try_from(plain) {
                Ok(_) => Ok(name.to_ascii_lowercase()),
                Err(_) => Err(format!("{name:?} is not a DNS name")),
            }
        })
        .collect()
}

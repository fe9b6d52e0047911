//! The flags of all listeners.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::config::value::{self, ListenAddress, Port};

use crate::agent_port::{AgentsConfig, KonnectivityConfig};
use crate::caller::{Audiences, DEFAULT_AUDIENCES, parse_audiences};
use crate::listener::{ConnectConfig, EgressConfig, ListenerConfig, Others};

pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10265";

/// The listeners' flags, each listener's in the `Args` struct of its module.
#[derive(Args, Clone, Debug)]
pub struct ListenersConfig {
    #[command(flatten)]
    pub common: CommonConfig,
    #[command(flatten)]
    pub agents: AgentsConfig,
    #[command(flatten)]
    pub listeners: ListenerConfig,
    #[command(flatten)]
    pub connect: ConnectConfig,
    #[command(flatten)]
    pub egress: EgressConfig,
    #[command(flatten)]
    pub konnectivity: KonnectivityConfig,
}

/// The flags that a redirector has too: its listeners are the admin port and the metrics listener.
#[derive(Args, Clone, Debug)]
pub struct CommonConfig {
    /// Address of every port but --insecure-port and --admin-address; an IPv6 literal such as :: switches the family.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0", value_parser = value::ip)]
    pub bind_address: IpAddr,
    /// Where to serve /metrics, /healthz, /readyz and /status: a loopback address and a port, or a port; port 0: off.
    // konnectivity has two ports for these, of which the last that is given counts.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-port", "health-port"],
          overrides_with = "admin_address", env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS,
          value_parser = value::listen_on_loopback)]
    pub admin_address: ListenAddress,
    /// Port of the metrics listener, on --bind-address: /metrics over TLS for other hosts. Callers show a certificate or a bearer token,
    /// and in a cluster may get the nonResourceURL /metrics; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = value::port)]
    pub metrics_port: Port,
    /// CAs (PEM) of callers' certificates, at --connect-port and --metrics-port and with --terminate-tls, and again when the file
    /// changes [default: in a cluster, the one that kube-apiserver accepts; else none is asked for].
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// Callers' tokens, as kube-apiserver's flag of this name reads them (TOKEN,USER,UID,"GROUPS"), but random and of at least 16
    /// characters, and again when the file changes; in a cluster besides those that the API server knows [default: none].
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,
    /// Audiences that a cluster's tokens may be for, at every listener that takes tokens of callers, comma-separated; api-server
    /// stands for the API server's own. If it is left out, a token that a caller shows here is good for nothing else.
    #[arg(long, value_name = "LIST", default_value = DEFAULT_AUDIENCES, value_parser = parse_audiences)]
    pub token_audience: Audiences,
}

impl ListenersConfig {
    /// A redirector's: all others are off.
    pub(crate) fn of_redirector(common: CommonConfig) -> Self {
        Self {
            common,
            agents: AgentsConfig::default(),
            listeners: ListenerConfig::default(),
            connect: ConnectConfig::default(),
            egress: EgressConfig::default(),
            konnectivity: KonnectivityConfig::default(),
        }
    }

    /// Returns the address of a port on --bind-address.
    pub(super) fn at(&self, port: Port) -> Option<SocketAddr> {
        port.map(|port| SocketAddr::new(self.common.bind_address, port))
    }

    /// Checks and completes the settings that depend on several flags. `standalone`: there is no cluster; `kubeconfig`:
    /// --kubeconfig is given, so that this is no pod.
    pub(super) fn complete(&mut self, standalone: bool, kubeconfig: bool) -> Result<(), ConfigError> {
        let CommonConfig { metrics_port: metrics, client_ca_file, token_auth_file, .. } = &self.common;
        self.listeners.check(&Others {
            standalone,
            kubeconfig,
            client_ca: client_ca_file.as_ref(),
            takes_certificates: self.connect.connect_port.is_some() || metrics.is_some(),
        })?;
        self.egress.check()?;
        match metrics {
            Some(port) if standalone && token_auth_file.is_none() && client_ca_file.is_none() => {
                let reason = "with --inventory callers show a token or a certificate that a file knows: give \
                              --token-auth-file or --client-ca-file";
                Err(ConfigError::new("--metrics-port", port.to_string(), reason))
            }
            _ => Ok(()),
        }
    }
}

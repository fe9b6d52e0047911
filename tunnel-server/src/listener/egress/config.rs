//! The flags of the egress listener, kube-apiserver's way to edge nodes by its EgressSelector.

use std::path::PathBuf;

use clap::Args;
use ipnet::IpNet;
use tunnel_runtime::config::value::{self, List, OnOff, Port};
use tunnel_runtime::config::{ConfigError, pair};

/// The egress listener. The default is that it is off.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Egress listener (kube-apiserver's EgressSelector)")]
pub struct EgressConfig {
    /// Unix socket for kube-apiserver's EgressSelector; it may speak GRPC or HTTPConnect [default: none].
    #[arg(id = "egress-socket", long, value_name = "PATH", alias = "uds-name")]
    pub socket: Option<PathBuf>,
    /// Permissions of the socket's file, octal; write access gives access to every edge node.
    #[arg(id = "egress-socket-mode", long, value_name = "MODE", default_value = "0600", value_parser = mode)]
    pub socket_mode: u32,
    /// Port for the same with mutual TLS; it needs --egress-client-ca; 0: off.
    #[arg(id = "egress-port", long, value_name = "PORT", alias = "server-port", default_value = "0",
          value_parser = value::port)]
    pub port: Port,
    /// CA (PEM) of the certificates with which --egress-port may be used; read again when it changes.
    #[arg(long, value_name = "FILE", alias = "server-ca-cert")]
    egress_client_ca: Option<PathBuf>,
    /// Common names of these certificates, comma-separated [default: whatever the CA has signed].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true,
          value_parser = value::list::<String, List<_>>)]
    egress_client_names: List<String>,
    /// Certificate (PEM) of --egress-port, leaf first; read again when it changes [default: this server's own].
    #[arg(long, value_name = "FILE", alias = "server-cert")]
    egress_cert: Option<PathBuf>,
    /// Key (PEM) of --egress-cert.
    #[arg(long, value_name = "FILE", alias = "server-key")]
    egress_key: Option<PathBuf>,
    /// Addresses that are no edge node's and that this server dials itself for callers of this listener, comma-separated: cloud
    /// nodes, Services, pods; link-local ones only by a range within these [default: none, such connections are refused].
    #[arg(id = "egress-direct", long, value_name = "CIDRS", default_value = "", hide_default_value = true,
          value_parser = value::cidrs)]
    pub direct: List<IpNet>,
    /// on or off: the address of a Service leads to one of its ready endpoints, on edge nodes too, which takes the right to read
    /// all Services and their EndpointSlices.
    #[arg(id = "egress-services", long, value_name = "on|off", default_value = "off", value_parser = value::on_off)]
    pub services: OnOff,
    /// Authentication of the port's callers; None if the port is off.
    #[arg(skip)]
    pub tls: Option<EgressTlsConfig>,
}

/// Authentication of the port's callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressTlsConfig {
    /// The CA that has to have signed the callers' certificates.
    pub client_ca: PathBuf,
    /// Allowed common names; empty for all that the CA has signed.
    pub clients: Vec<String>,
    /// Certificate and key to use instead of this server's own.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl EgressConfig {
    /// True if the listener is on and has to know the cluster's Services.
    pub(crate) fn follows_services(&self) -> bool {
        self.services && (self.socket.is_some() || self.port.is_some())
    }

    pub(crate) fn check(&mut self) -> Result<(), ConfigError> {
        let certificate = pair(("--egress-cert", &self.egress_cert), ("--egress-key", &self.egress_key))?;
        if self.port.is_none() {
            return Ok(());
        }
        let client_ca = self.egress_client_ca.clone().ok_or_else(|| {
            let reason = "needed with --egress-port: the CA of the callers' certificates";
            ConfigError::without_value("--egress-client-ca", reason)
        })?;
        let clients = self.egress_client_names.clone();
        self.tls = Some(EgressTlsConfig { client_ca, clients, certificate });
        Ok(())
    }
}

fn mode(value: &str) -> Result<u32, String> {
    match u32::from_str_radix(value, 8) {
        Ok(mode) if mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
        _ => Err("not permissions of a socket: use octal such as 0600 or 0660, with reading and writing for the owner"
            .to_owned()),
    }
}

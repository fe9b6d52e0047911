//! The flags of the egress door.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::{ConfigError, parse_cidrs, parse_port};

use crate::config::{DEFAULT_EGRESS_SOCKET_MODE, EgressConfig, EgressTlsConfig, on_or_off};

/// kube-apiserver's way to edge nodes by its EgressSelector.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Egress door (kube-apiserver's EgressSelector)")]
pub struct EgressArgs {
    /// Unix socket for kube-apiserver's EgressSelector; it may speak GRPC or HTTPConnect [default: none].
    #[arg(long, value_name = "PATH", alias = "uds-name")]
    pub egress_socket: Option<PathBuf>,
    /// Permissions of the socket's file, octal: who may write there reaches every edge node.
    #[arg(long, value_name = "MODE", default_value = DEFAULT_EGRESS_SOCKET_MODE)]
    pub egress_socket_mode: String,
    /// Port for the same with mutual TLS; it needs --egress-client-ca; 0: off.
    #[arg(long, value_name = "PORT", alias = "server-port", default_value = "0")]
    pub egress_port: String,
    /// CA (PEM) of the certificates with which --egress-port may be used; read again when it changes.
    #[arg(long, value_name = "FILE", alias = "server-ca-cert")]
    pub egress_client_ca: Option<PathBuf>,
    /// Common names of these certificates, comma-separated [default: whatever the CA has signed].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true)]
    pub egress_clients: String,
    /// Certificate (PEM) of --egress-port, leaf first; read again when it changes [default: this server's own].
    #[arg(long, value_name = "FILE", alias = "server-cert")]
    pub egress_cert: Option<PathBuf>,
    /// Key (PEM) of --egress-cert.
    #[arg(long, value_name = "FILE", alias = "server-key")]
    pub egress_key: Option<PathBuf>,
    /// Addresses that are no edge node's and that this server dials itself for callers of this door, comma-separated: cloud
    /// nodes, Services, pods [default: none, such connections are refused].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub egress_direct: String,
    /// on or off: the address of a Service leads to one of its ready endpoints, on edge nodes too, which takes the right to read
    /// all Services and their EndpointSlices.
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub egress_services: String,
}

impl EgressArgs {
    pub(super) fn config(&self) -> Result<EgressConfig, ConfigError> {
        Ok(EgressConfig {
            socket: self.egress_socket.clone(),
            socket_mode: mode(&self.egress_socket_mode)?,
            port: self.port()?,
            direct: parse_cidrs("--egress-direct", &self.egress_direct)?,
            services: on_or_off("--egress-services", &self.egress_services)?,
        })
    }

    fn port(&self) -> Result<Option<(u16, EgressTlsConfig)>, ConfigError> {
        let certificate = match (&self.egress_cert, &self.egress_key) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            (None, None) => None,
            (Some(_), None) => {
                return Err(ConfigError::without_value("--egress-key", "needed with --egress-cert"));
            }
            (None, Some(_)) => {
                return Err(ConfigError::without_value("--egress-cert", "needed with --egress-key"));
            }
        };
        let Some(port) = parse_port("--egress-port", &self.egress_port)? else {
            return Ok(None);
        };
        let Some(client_ca) = self.egress_client_ca.clone() else {
            let reason = "needed with --egress-port: the CA of the callers' certificates";
            return Err(ConfigError::without_value("--egress-client-ca", reason));
        };
        let names = self.egress_clients.split(',').map(str::trim).filter(|name| !name.is_empty());
        let clients = names.map(str::to_owned).collect();
        Ok(Some((port, EgressTlsConfig { client_ca, clients, certificate })))
    }
}

fn mode(value: &str) -> Result<u32, ConfigError> {
    match u32::from_str_radix(value, 8) {
        Ok(mode) if mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
        _ => {
            let reason = "not permissions of a socket: use octal such as 0600 or 0660, with reading and writing for the owner";
            Err(ConfigError::new("--egress-socket-mode", value, reason))
        }
    }
}

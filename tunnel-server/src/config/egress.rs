//! What the egress door is configured with.

use std::path::PathBuf;

use ipnet::IpNet;

use super::Config;

/// Default of `--egress-socket-mode`: only this server's user.
pub const DEFAULT_EGRESS_SOCKET_MODE: &str = "0600";

/// The egress door.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressConfig {
    /// The Unix socket's path.
    pub socket: Option<PathBuf>,
    /// Permissions of the socket's file.
    pub socket_mode: u32,
    /// The port of --bind-address, and how callers are known there.
    pub port: Option<(u16, EgressTlsConfig)>,
    /// What this server dials itself.
    pub direct: Vec<IpNet>,
    /// Cluster IPs lead to their Services' endpoints.
    pub services: bool,
}

impl EgressConfig {
    /// Whether the door is open and is to know the cluster's Services.
    pub(crate) fn follows_services(&self) -> bool {
        self.services && (self.socket.is_some() || self.port.is_some())
    }
}

/// How callers of its port are told from strangers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressTlsConfig {
    /// The CA that has signed the callers' certificates.
    pub client_ca: PathBuf,
    /// Common names that are let in; empty: all that the CA has signed.
    pub clients: Vec<String>,
    /// Certificate and key to show instead of this server's own.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl Config {
    pub(super) fn add_egress(&self, flags: &mut Vec<(&'static str, String)>) {
        let egress = &self.egress;
        flags.push(("egress-port", egress.port.as_ref().map_or(0, |(port, _)| *port).to_string()));
        let direct: Vec<_> = egress.direct.iter().map(ToString::to_string).collect();
        flags.push(("egress-direct", direct.join(",")));
        flags.push(("egress-services", if egress.services { "on" } else { "off" }.to_owned()));
        if let Some(socket) = &egress.socket {
            flags.push(("egress-socket", socket.display().to_string()));
            flags.push(("egress-socket-mode", format!("{:04o}", egress.socket_mode)));
        }
        let Some((_, tls)) = &egress.port else { return };
        flags.push(("egress-client-ca", tls.client_ca.display().to_string()));
        flags.push(("egress-clients", tls.clients.join(",")));
        if let Some((certificate, key)) = &tls.certificate {
            flags.push(("egress-cert", certificate.display().to_string()));
            flags.push(("egress-key", key.display().to_string()));
        }
    }
}

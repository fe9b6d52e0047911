//! What the doors that speak HTTP are configured with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ipnet::IpNet;
use tunnel_core::config::ConfigError;

use super::{Config, NodeSource};

/// The doors that speak HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DoorConfig {
    /// Further ports of the https door, each with the port of nodes that it leads to.
    pub secure_ports: BTreeMap<u16, u16>,
    /// The https door ends the TLS of callers that address the server itself.
    pub terminate_tls: bool,
    /// Roots of callers' certificates at all doors that ask for one; None: in a cluster those of kube-apiserver.
    pub client_ca: Option<PathBuf>,
    pub targets: TargetConfig,
    /// None: it is off.
    pub plain: Option<PlainConfig>,
}

/// How the https door speaks to targets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetConfig {
    /// Roots of nodes' certificates.
    pub ca: Option<PathBuf>,
    /// This server's own certificate for kubelets, and its key.
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Ports of nodes that are plain HTTP, besides those of the ConfigMap.
    pub plain_ports: BTreeSet<u16>,
}

/// The plain door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainConfig {
    pub port: u16,
    /// Who may use it without a token.
    pub clients: Vec<IpNet>,
    /// Which ports these reach; none: every tunnelled one.
    pub ports: BTreeSet<u16>,
}

/// More listeners are refused: a successor gets them all in one message.
pub(crate) const MOST_SECURE_PORTS: usize = 32;

/// Reads `--secure-ports`.
///
/// # Errors
/// Names the entry that is not `PORT=NODE-PORT`, or is there twice.
pub fn parse_secure_ports(value: &str) -> Result<BTreeMap<u16, u16>, ConfigError> {
    let wrong = |reason| Err(ConfigError::new("--secure-ports", value, reason));
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port != 0);
    let mut ports = BTreeMap::new();
    for entry in value.split(',').map(str::trim).filter(|_| !value.trim().is_empty()) {
        let pair = entry.split_once('=').and_then(|(own, of_node)| Some((port(own)?, port(of_node)?)));
        let Some((own, of_node)) = pair else {
            return wrong(format!("{entry:?} is not PORT=NODE-PORT, such as 10270=9443"));
        };
        if ports.values().any(|other| *other == of_node) {
            return wrong(format!("port {of_node} of nodes is there twice"));
        }
        if ports.insert(own, of_node).is_some() {
            return wrong(format!("port {own} is there twice"));
        }
    }
    if ports.len() > MOST_SECURE_PORTS {
        return wrong(format!("{} ports; at most {MOST_SECURE_PORTS} are possible", ports.len()));
    }
    Ok(ports)
}

impl DoorConfig {
    /// Refuses what cannot work together. `standalone`: there is no cluster to ask.
    pub(crate) fn check(&self, standalone: bool, secure_port: bool) -> Result<(), ConfigError> {
        let without = ConfigError::without_value;
        let TargetConfig { certificate, key, .. } = &self.targets;
        match (certificate, key) {
            (Some(_), None) => {
                return Err(without("--kubelet-client-key", "needed with --kubelet-client-certificate"));
            }
            (None, Some(_)) => {
                return Err(without("--kubelet-client-certificate", "needed with --kubelet-client-key"));
            }
            _ => {}
        }
        if self.terminate_tls && !secure_port {
            return Err(ConfigError::new(
                "--terminate-tls",
                "on",
                "the https door is off: give --secure-port",
            ));
        }
        if !self.secure_ports.is_empty() && !secure_port {
            return Err(without("--secure-ports", "the https door is off: give --secure-port"));
        }
        if self.terminate_tls && standalone && self.client_ca.is_none() {
            let reason = "with --inventory callers show certificates: give --client-ca-file";
            return Err(ConfigError::new("--terminate-tls", "on", reason));
        }
        if standalone && self.plain.as_ref().is_some_and(|plain| plain.clients.is_empty()) {
            let reason = "needed with --plain-port and --inventory: nobody else may use the door";
            return Err(without("--plain-clients", reason));
        }
        Ok(())
    }
}

impl Config {
    /// Refuses a metrics door that nobody could use.
    pub(crate) fn check_metrics(&self) -> Result<(), ConfigError> {
        let known = self.token_auth_file.is_some() || self.doors.client_ca.is_some();
        match self.metrics_port {
            Some(port) if matches!(self.source, NodeSource::File(_)) && !known => {
                let reason = "with --inventory callers show a token or a certificate that a file knows: give \
                              --token-auth-file or --client-ca-file";
                Err(ConfigError::new("--metrics-port", port.to_string(), reason))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn add_doors(&self, flags: &mut Vec<(&'static str, String)>) {
        fn list<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
            values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>().join(",")
        }
        let doors = &self.doors;
        flags.push(("terminate-tls", if doors.terminate_tls { "on" } else { "off" }.to_owned()));
        let secure = doors.secure_ports.iter().map(|(port, of_node)| format!("{port}={of_node}"));
        flags.push(("secure-ports", list(secure)));
        flags.push(("http-ports", list(&doors.targets.plain_ports)));
        for (flag, path) in [
            ("client-ca-file", &doors.client_ca),
            ("kubelet-certificate-authority", &doors.targets.ca),
            ("kubelet-client-certificate", &doors.targets.certificate),
            ("kubelet-client-key", &doors.targets.key),
        ] {
            flags.extend(path.as_ref().map(|path| (flag, path.display().to_string())));
        }
        if let Some(plain) = &doors.plain {
            flags.push(("plain-port", plain.port.to_string()));
            flags.push(("plain-clients", list(&plain.clients)));
            flags.push(("plain-ports", list(&plain.ports)));
        }
    }
}

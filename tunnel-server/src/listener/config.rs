//! The flags of the listeners for callers in the cloud.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use ipnet::IpNet;
use tunnel_runtime::config::value::{self, List, OnOff, Port};
use tunnel_runtime::config::{ConfigError, pair};

use crate::maps::{Map, parse_flag};
use crate::runtime::settings::Listeners;

/// The listeners that speak HTTP. The default is that all are off.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Listeners that speak HTTP")]
pub struct ListenerConfig {
    /// Port of the https listener, where TLS names the node by SNI, or a request its Host (--terminate-tls); 0: off.
    #[arg(long, value_name = "PORT", default_value = "10263", value_parser = value::port)]
    pub secure_port: Port,
    /// Further ports of the https listener, on --bind-address, for other ports of nodes than the kubelet's: PORT=NODE-PORT,
    /// comma-separated, such as 10270=9443 [default: none].
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true,
          value_parser = parse_secure_ports)]
    pub secure_ports: BTreeMap<u16, u16>,
    /// on or off: --secure-port also terminates TLS for callers that address the server itself, with a certificate or a bearer
    /// token [default: on with --client-ca-file, off without; required with --client-ca-file and --connect-port or
    /// --metrics-port].
    #[arg(id = "terminate-tls", long, value_name = "on|off", value_parser = value::on_off)]
    given_terminate_tls: Option<OnOff>,
    #[arg(skip)]
    pub terminate_tls: bool,
    /// Address of --insecure-port; only a loopback address.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", value_parser = value::ip)]
    pub(crate) insecure_bind_address: Option<IpAddr>,
    /// Port of the http listener, where a request's Host names the node; 0: off.
    #[arg(long, value_name = "PORT", default_value = "10264", value_parser = value::port)]
    insecure_port: Port,
    #[command(flatten)]
    pub plain: PlainConfig,
    #[command(flatten)]
    pub targets: TargetConfig,
}

/// How the https listener speaks to targets.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetConfig {
    /// CA of nodes' serving certificates, for TLS to nodes [default: in a pod, the cluster's].
    #[arg(id = "kubelet-certificate-authority", long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// The server's own certificate for TLS to nodes; the file may come later [default: none, and kubelets answer 401].
    #[arg(id = "kubelet-client-certificate", long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Key of --kubelet-client-certificate.
    #[arg(id = "kubelet-client-key", long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Ports of nodes to which the https listener speaks plain HTTP, besides http-proxy-ports of the ConfigMap, comma-separated.
    #[arg(id = "http-ports", long, value_name = "LIST", default_value = "10255", value_parser = value::ports)]
    pub plain_ports: BTreeSet<u16>,
}

/// The plain listener.
#[derive(Args, Clone, Debug, Default)]
pub struct PlainConfig {
    /// Port of the plain listener, on --bind-address: HTTP by a node's name for clients in the cloud; 0: off.
    #[arg(id = "plain-port", long, value_name = "PORT", default_value = "0", value_parser = value::port)]
    pub port: Port,
    /// Source addresses that may use --plain-port without a bearer token, comma-separated [default: none].
    #[arg(id = "plain-clients", long, value_name = "CIDRS", default_value = "", hide_default_value = true,
          value_parser = value::cidrs)]
    pub clients: List<IpNet>,
    /// on or off: --plain-port takes bearer tokens of other hosts too, which everybody on the network path can read.
    #[arg(id = "plain-tokens", long, value_name = "on|off", default_value = "off", value_parser = value::on_off)]
    pub tokens: OnOff,
    /// Ports of nodes that these reach, comma-separated [default: every tunnelled port].
    #[arg(id = "plain-ports", long, value_name = "LIST", default_value = "", hide_default_value = true,
          value_parser = value::ports)]
    pub ports: BTreeSet<u16>,
}

/// The connect listener, whose callers are asked who they are, and static maps.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Connect listener and static maps")]
pub struct ConnectConfig {
    /// Port of the connect listener, an HTTP proxy (CONNECT and http:// URLs; TLS or not) for what --policy permits; callers show a
    /// certificate, a token, or only their address; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = value::port)]
    pub connect_port: Port,
    /// File with the rules for --connect-port, read again when it changes; see `policy check` [default: nothing is permitted].
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// LISTEN=NODE/TARGET[,CIDR…]: a listener that leads to a port, or an ADDRESS:PORT, on one node, for clients in these ranges
    /// (needed unless LISTEN is a loopback address). May be given several times.
    #[arg(id = "map", long, value_name = "MAP", value_parser = parse_flag)]
    pub maps: Vec<Map>,
    /// File with more maps, read again when it changes.
    #[arg(id = "maps", long, value_name = "FILE")]
    pub maps_file: Option<PathBuf>,
    /// Those of the file at the start, once it is read.
    #[arg(skip)]
    pub maps_of_file: Vec<Map>,
}

/// Maximum number of these ports: a successor receives all listeners in one message.
pub(crate) const MOST_SECURE_PORTS: usize = 32;

/// File with the cluster's CA in a pod.
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Parses `--secure-ports`.
///
/// # Errors
/// Names the entry that is not `PORT=NODE-PORT`, or that occurs twice.
pub fn parse_secure_ports(value: &str) -> Result<BTreeMap<u16, u16>, String> {
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port != 0);
    let mut ports = BTreeMap::new();
    for entry in value.split(',').map(str::trim).filter(|_| !value.trim().is_empty()) {
        let pair = entry.split_once('=').and_then(|(own, of_node)| Some((port(own)?, port(of_node)?)));
        let Some((own, of_node)) = pair else {
            return Err(format!("{entry:?} is not PORT=NODE-PORT, such as 10270=9443"));
        };
        if ports.values().any(|other| *other == of_node) {
            return Err(format!("port {of_node} of nodes is there twice"));
        }
        if ports.insert(own, of_node).is_some() {
            return Err(format!("port {own} is there twice"));
        }
    }
    if ports.len() > MOST_SECURE_PORTS {
        return Err(format!("{} ports; at most {MOST_SECURE_PORTS} are possible", ports.len()));
    }
    Ok(ports)
}

/// Flags of other parts on which the listeners depend.
pub(crate) struct Others<'a> {
    /// True without a cluster.
    pub(crate) standalone: bool,
    /// True if --kubeconfig is given, so that this is no pod.
    pub(crate) kubeconfig: bool,
    pub(crate) client_ca: Option<&'a PathBuf>,
    /// True if another listener than the https listener accepts callers' certificates.
    pub(crate) takes_certificates: bool,
}

impl ListenerConfig {
    /// Address of the http listener.
    pub fn insecure_address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.insecure_bind_address?, self.insecure_port?))
    }

    /// The target ports for the internal Service.
    pub(crate) fn internal(&self) -> Listeners {
        Listeners {
            https: self.secure_port.unwrap_or_default(),
            secure: self.secure_ports.iter().map(|(port, of_node)| (*of_node, *port)).collect(),
            // The http listener is on the loopback address, which no Service reaches.
            http: self.plain.port.unwrap_or_default(),
            pairs: self.insecure_address().map_or(0, |address| address.port()),
        }
    }

    /// Sets the defaults that depend on other flags, and refuses conflicting ones.
    pub(crate) fn check(&mut self, others: &Others<'_>) -> Result<(), ConfigError> {
        let without = ConfigError::without_value;
        let (secure, client_ca) = (self.secure_port.is_some(), others.client_ca.is_some());
        self.terminate_tls = match self.given_terminate_tls {
            Some(on) => on,
            // A caller restricted by a policy at one listener, or allowed to read metrics only, would reach every kubelet.
            None if secure && client_ca && others.takes_certificates => {
                let reason = "with --client-ca-file and --connect-port or --metrics-port say on or off: whether these \
                              certificates open the https listener too";
                return Err(without("--terminate-tls", reason));
            }
            None => secure && client_ca,
        };
        if self.terminate_tls && !secure {
            let reason = "the https listener is off: give --secure-port";
            return Err(ConfigError::new("--terminate-tls", "on", reason));
        }
        if !self.secure_ports.is_empty() && !secure {
            return Err(without("--secure-ports", "the https listener is off: give --secure-port"));
        }
        if self.terminate_tls && others.standalone && !client_ca {
            let reason = "with --inventory callers show certificates: give --client-ca-file";
            return Err(ConfigError::new("--terminate-tls", "on", reason));
        }
        if let Some(address) = self.insecure_bind_address.filter(|address| !address.is_loopback()) {
            let reason = "not a loopback address: this listener has no authentication; use 127.0.0.1 or ::1";
            return Err(ConfigError::new("--insecure-bind-address", address.to_string(), reason));
        }
        self.plain.check(others.standalone)?;
        let targets = &mut self.targets;
        let certificate = ("--kubelet-client-certificate", &targets.certificate);
        pair(certificate, ("--kubelet-client-key", &targets.key))?;
        if targets.ca.is_none() && !others.standalone && !others.kubeconfig {
            targets.ca = Some(PathBuf::from(POD_CA)).filter(|path| path.exists());
        }
        Ok(())
    }
}

impl ConnectConfig {
    /// The maps from flags, then those from the file.
    pub(crate) fn all_maps(&self) -> Vec<Map> {
        [self.maps.as_slice(), &self.maps_of_file].concat()
    }
}

impl PlainConfig {
    fn check(&self, standalone: bool) -> Result<(), ConfigError> {
        let stray = [
            ("--plain-clients", !self.clients.is_empty()),
            ("--plain-tokens", self.tokens),
            ("--plain-ports", !self.ports.is_empty()),
        ];
        match (self.port, stray.into_iter().find(|(_, given)| *given)) {
            (None, Some((flag, _))) => {
                let reason = "not supported without --plain-port";
                Err(ConfigError::without_value(flag, reason))
            }
            (Some(_), _) if standalone && self.clients.is_empty() => {
                let reason = "needed with --plain-port and --inventory: nobody else may use the listener";
                Err(ConfigError::without_value("--plain-clients", reason))
            }
            _ => Ok(()),
        }
    }
}

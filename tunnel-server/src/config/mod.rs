//! The server's configuration as typed values. `cli/args.rs` makes them from flags.

mod doors;
mod egress;
mod konnectivity;
mod parse;
mod parts;
mod role;

pub(crate) use doors::MOST_SECURE_PORTS;
pub use doors::{DoorConfig, PlainConfig, TargetConfig, parse_secure_ports};
pub use egress::{DEFAULT_EGRESS_SOCKET_MODE, EgressConfig, EgressTlsConfig};
pub use konnectivity::{
    DEFAULT_KONNECTIVITY_ACCOUNT, DEFAULT_KONNECTIVITY_AUDIENCE, KonnectivityConfig, service_account,
};
pub(crate) use parse::{
    bpffs, dns_names, edge_pod_routes, insecure_address, object_name, on_or_off, orphan_timeout, peers,
    refuse_or_allow, token_range, token_range_v6,
};
pub use role::RedirectorConfig;
pub(crate) use role::{OF_METRICS, OF_SERVERS};

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_core::config::{ConfigError, HostPort, duration_text};
use tunnel_core::link::Congestion;
use tunnel_core::logging;

use crate::inventory::Selector;
use crate::kube::KubeOptions;
use crate::maps::Map;
use crate::redirect::RedirectConfig;

pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10265";
/// Default of `--token-range`: RFC 2544's benchmarking range, never routed on the Internet.
pub const DEFAULT_TOKEN_RANGE: &str = "198.18.0.0/15";
/// Default of `--token-range-v6`: a unique local range (RFC 4193); the letters spell "poster".
pub const DEFAULT_TOKEN_RANGE_V6: &str = "fd9e:706f:7374:6572::/64";

/// Default of `--bpffs`: where systemd mounts it.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// Where the nodes and the CA come from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a process has one")]
pub enum NodeSource {
    /// A NodeList in a file, and a CA in the state directory.
    File(PathBuf),
    Kubernetes(KubeOptions),
}

/// What the server runs with. A port or an address that is None is switched off.
#[derive(Clone, Debug)]
pub struct Config {
    pub source: NodeSource,
    pub edge_selector: Selector,
    pub state_dir: PathBuf,
    pub bind_address: IpAddr,
    pub agent_port: Option<u16>,
    pub secure_port: Option<u16>,
    pub insecure_address: Option<SocketAddr>,
    pub connect_port: Option<u16>,
    /// None: nobody may reach anything through the connect door.
    pub policy: Option<PathBuf>,
    pub token_auth_file: Option<PathBuf>,
    /// Static maps of the flags, and the file with more.
    pub maps: Vec<Map>,
    pub maps_file: Option<PathBuf>,
    pub doors: DoorConfig,
    pub admin_address: Option<SocketAddr>,
    pub metrics_port: Option<u16>,
    pub egress: EgressConfig,
    /// None: konnectivity's agents do not attach here.
    pub konnectivity: Option<KonnectivityConfig>,
    pub redirect: Option<RedirectConfig>,
    pub redirect_ports: BTreeSet<u16>,
    pub redirect_clients: Vec<IpNet>,
    pub exclude: Vec<IpNet>,
    /// Where edge nodes' addresses are; empty: anywhere.
    pub edge_addresses: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    /// An inventory without nodes takes effect.
    pub allow_empty_inventory: bool,
    /// Ranges in which connections to edge nodes' pods are redirected too.
    pub edge_pod_routes: Vec<IpNet>,
    /// In a cluster, edge nodes get the condition `PosternTunnel`.
    pub node_condition: bool,
    /// In a cluster, DNS records of the nodes are written.
    pub dns_records: bool,
    pub token_range: Ipv4Net,
    pub token_range_v6: Ipv6Net,
    /// Agents of nodes that are not in the inventory get no session.
    pub refuse_unknown: bool,
    pub token_enrollment: bool,
    pub cert_dns_names: Vec<String>,
    pub cert_ips: Vec<IpAddr>,
    /// The agent ports of the other servers, in addition to those that a cluster names.
    pub peers: BTreeSet<HostPort>,
    /// Of the links, for what this server sends.
    pub congestion: Congestion,
    pub drain_timeout: Duration,
    pub log_format: logging::Format,
    pub log_level: logging::Level,
    /// The given flags of other systems that have no meaning here, each with the reason.
    pub ignored: Vec<(&'static str, &'static str)>,
    /// None: this is a server.
    pub redirector: Option<RedirectorConfig>,
}

impl Config {
    /// The flags that yield this configuration, defaults included.
    pub fn flags(&self) -> Vec<String> {
        fn list<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
            values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>().join(",")
        }
        let on_off = |on: bool| if on { "on" } else { "off" }.to_owned();
        let door = |port: Option<u16>| port.unwrap_or_default().to_string();
        let mut flags = vec![
            ("edge-selector", self.edge_selector.to_string()),
            ("state-dir", self.state_dir.display().to_string()),
            ("bind-address", self.bind_address.to_string()),
            ("agent-port", door(self.agent_port)),
            ("secure-port", door(self.secure_port)),
            ("insecure-port", door(self.insecure_address.map(|address| address.port()))),
            (
                "admin-address",
                self.admin_address.map_or_else(|| "0".to_owned(), |address| address.to_string()),
            ),
            ("metrics-port", door(self.metrics_port)),
            ("connect-port", door(self.connect_port)),
            ("redirect", on_off(self.redirect.is_some())),
            ("redirect-ports", list(&self.redirect_ports)),
            ("redirect-clients", list(&self.redirect_clients)),
            ("exclude", list(&self.exclude)),
            ("edge-addresses", list(&self.edge_addresses)),
            ("service-cidrs", list(&self.service_cidrs)),
            ("allow-empty-inventory", on_off(self.allow_empty_inventory)),
            (
                "edge-pod-routes",
                if self.edge_pod_routes.is_empty() { "off".to_owned() } else { list(&self.edge_pod_routes) },
            ),
            ("node-condition", on_off(self.node_condition)),
            ("dns-records", on_off(self.dns_records)),
            ("token-range", self.token_range.to_string()),
            ("token-range-v6", self.token_range_v6.to_string()),
            ("unknown-agents", if self.refuse_unknown { "refuse" } else { "allow" }.to_owned()),
            ("token-enrollment", on_off(self.token_enrollment)),
            ("cert-dns-names", list(&self.cert_dns_names)),
            ("cert-ips", list(&self.cert_ips)),
            ("peers", list(&self.peers)),
            ("congestion-control", self.congestion.to_string()),
            ("drain-timeout", duration_text(self.drain_timeout)),
            ("log-format", self.log_format.to_string()),
            ("log-level", self.log_level.to_string()),
        ];
        flags.extend(self.maps.iter().map(|map| ("map", map.to_string())));
        let files =
            [("policy", &self.policy), ("token-auth-file", &self.token_auth_file), ("maps", &self.maps_file)];
        let files = files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_ref()?)));
        flags.extend(files.map(|(flag, path)| (flag, path.display().to_string())));
        if let Some(address) = self.insecure_address {
            flags.push(("insecure-bind-address", address.ip().to_string()));
        }
        match &self.source {
            NodeSource::File(path) => flags.push(("inventory", path.display().to_string())),
            NodeSource::Kubernetes(options) => flags.extend(kube_flags(options)),
        }
        if let Some(redirect) = &self.redirect {
            let bpffs =
                redirect.pins.as_ref().map_or("off".to_owned(), |pins| pins.dir.display().to_string());
            flags.push(("bpffs", bpffs));
            flags.push(("orphan-timeout", duration_text(redirect.orphan_timeout)));
        }
        if let Some(cgroup) = self.redirect.as_ref().and_then(|redirect| redirect.cgroup.as_ref()) {
            flags.push(("redirect-cgroup", cgroup.display().to_string()));
        }
        self.add_doors(&mut flags);
        self.add_egress(&mut flags);
        self.add_konnectivity(&mut flags);
        self.add_role(&mut flags);
        flags.into_iter().map(|(flag, value)| format!("--{flag}={value}")).collect()
    }

    /// The addresses of all doors but maps, each with its flag.
    pub(crate) fn listeners(&self) -> Vec<(&'static str, SocketAddr)> {
        let at = |port: Option<u16>| port.map(|port| SocketAddr::new(self.bind_address, port));
        let doors = [
            ("--agent-port", at(self.agent_port)),
            ("--secure-port", at(self.secure_port)),
            ("--insecure-port", self.insecure_address),
            ("--connect-port", at(self.connect_port)),
            ("--plain-port", at(self.doors.plain.as_ref().map(|plain| plain.port))),
            ("--egress-port", at(self.egress.port.as_ref().map(|(port, _)| *port))),
            (
                "--konnectivity-agent-port",
                at(self.konnectivity.as_ref().map(|konnectivity| konnectivity.port)),
            ),
            ("--metrics-port", at(self.metrics_port)),
            ("--admin-address", self.admin_address),
        ];
        let secure = self.doors.secure_ports.keys().map(|port| ("--secure-ports", at(Some(*port))));
        doors.into_iter().chain(secure).filter_map(|(key, address)| Some((key, address?))).collect()
    }

    /// Refuses two listeners on one address: the second would fail to bind, with an error that does not name the flag
    /// of the first.
    pub(crate) fn check_ports(&self) -> Result<(), ConfigError> {
        let doors = self.listeners();
        for (index, (key, address)) in doors.iter().enumerate() {
            for (other_key, other) in &doors[..index] {
                let same_host = address.ip() == other.ip()
                    || address.ip().is_unspecified()
                    || other.ip().is_unspecified();
                if address.port() == other.port() && same_host {
                    let value = if *key == "--admin-address" {
                        address.to_string()
                    } else {
                        address.port().to_string()
                    };
                    return Err(ConfigError::new(
                        *key,
                        value,
                        format!("{other_key} has that port already; choose another"),
                    ));
                }
            }
        }
        Ok(())
    }
}

fn kube_flags(options: &KubeOptions) -> Vec<(&'static str, String)> {
    let names = &options.names;
    let mut flags = vec![
        ("configmap", names.configmap.clone()),
        ("dns-configmap", names.dns_configmap.clone()),
        ("service", names.service.clone()),
        ("internal-service", names.internal_service.clone()),
        ("ca-secret", names.ca_secret.clone()),
        ("lease", names.lease.clone()),
        ("revocations-configmap", names.revocations.clone()),
        ("agent-service-account", names.agent_service_account.clone()),
        ("redirector-service-account", names.redirector_service_account.clone()),
    ];
    flags.extend(options.kubeconfig.as_ref().map(|path| ("kubeconfig", path.display().to_string())));
    flags.extend(options.namespace.as_ref().map(|namespace| ("namespace", namespace.clone())));
    flags
}

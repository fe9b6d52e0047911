//! The server's configuration: flags in, typed values free of contradictions out.

mod args;
mod kube;

#[cfg(test)]
mod tests;

pub use args::{Cli, Command, DEFAULT_ADMIN_ADDRESS, DEFAULT_TOKEN_RANGE, DEFAULT_TOKEN_RANGE_V6, RunArgs};

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_core::config::{
    ConfigError, duration_text, parse_cidr, parse_cidrs, parse_duration, parse_ip, parse_ips,
    parse_loopback_door, parse_port, parse_ports, parse_with,
};
use tunnel_core::logging;

use crate::inventory::Selector;
use crate::kube::KubeOptions;
use crate::redirect::{RedirectConfig, SOCKET_MARK};

/// Where the nodes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeSource {
    /// A file, without Kubernetes.
    File(PathBuf),
    /// The API server.
    Kubernetes(KubeOptions),
}

/// A configuration that is whole and free of contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    pub source: NodeSource,
    pub edge_selector: Selector,
    pub state_dir: PathBuf,
    pub bind_address: IpAddr,
    /// None: off.
    pub agent_port: Option<u16>,
    /// None: off.
    pub secure_port: Option<u16>,
    /// None: off.
    pub insecure_address: Option<SocketAddr>,
    /// None: off.
    pub admin_address: Option<SocketAddr>,
    /// None: off.
    pub redirect: Option<RedirectConfig>,
    pub redirect_ports: BTreeSet<u16>,
    pub redirect_clients: Vec<IpNet>,
    pub exclude: Vec<IpNet>,
    /// Connections to edge nodes' pods in these ranges are redirected too.
    pub edge_pod_routes: Vec<IpNet>,
    pub token_range: Ipv4Net,
    pub token_range_v6: Ipv6Net,
    pub cert_dns_names: Vec<String>,
    pub cert_ips: Vec<IpAddr>,
    pub drain_timeout: Duration,
    pub log_format: logging::Format,
    pub log_level: logging::Level,
}

impl Config {
    /// # Errors
    /// Names the flag, its value and the reason.
    pub fn new(args: &RunArgs) -> Result<Self, ConfigError> {
        let exclude = parse_cidrs("--exclude", &args.exclude)?;
        let token_range = token_range(&args.token_range, &exclude)?;
        let token_range_v6 = token_range_v6(&args.token_range_v6, &exclude)?;
        let redirect_ports = parse_ports("--redirect-ports", &args.redirect_ports)?;
        let redirect_clients = parse_cidrs("--redirect-clients", &args.redirect_clients)?;
        let redirect = on_or_off("--redirect", &args.redirect)?.then(|| RedirectConfig {
            cgroup: args.redirect_cgroup.clone(),
            token_range,
            token_range_v6,
            mark: SOCKET_MARK,
            clients: redirect_clients.clone(),
            ..RedirectConfig::default()
        });
        if redirect.is_some() && redirect_ports.is_empty() {
            let reason = "empty; name the ports to redirect, or switch it off with --redirect=off";
            return Err(ConfigError::new("--redirect-ports", &args.redirect_ports, reason));
        }
        let config = Self {
            source: source(args)?,
            edge_selector: parse_with("--edge-selector", &args.edge_selector)?,
            state_dir: args.state_dir.clone(),
            bind_address: parse_ip("--bind-address", &args.bind_address)?,
            agent_port: parse_port("--agent-port", &args.agent_port)?,
            secure_port: parse_port("--secure-port", &args.secure_port)?,
            insecure_address: insecure_address(args)?,
            admin_address: parse_loopback_door("--admin-address", &args.admin_address)?,
            redirect,
            redirect_ports,
            redirect_clients,
            exclude,
            edge_pod_routes: args.kube.edge_pod_routes()?,
            token_range,
            token_range_v6,
            cert_dns_names: dns_names(&args.cert_dns_names)?,
            cert_ips: parse_ips("--cert-ips", &args.cert_ips)?,
            drain_timeout: parse_duration("--drain-timeout", &args.drain_timeout)?,
            log_format: parse_with("--log-format", &args.log_format)?,
            log_level: parse_with("--log-level", &args.log_level)?,
        };
        config.check_ports()?;
        Ok(config)
    }

    /// The flags that give this configuration, defaults included.
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
            ("redirect", on_off(self.redirect.is_some())),
            ("redirect-ports", list(&self.redirect_ports)),
            ("redirect-clients", list(&self.redirect_clients)),
            ("exclude", list(&self.exclude)),
            (
                "edge-pod-routes",
                if self.edge_pod_routes.is_empty() { "off".to_owned() } else { list(&self.edge_pod_routes) },
            ),
            ("token-range", self.token_range.to_string()),
            ("token-range-v6", self.token_range_v6.to_string()),
            ("cert-dns-names", list(&self.cert_dns_names)),
            ("cert-ips", list(&self.cert_ips)),
            ("drain-timeout", duration_text(self.drain_timeout)),
            ("log-format", self.log_format.to_string()),
            ("log-level", self.log_level.to_string()),
        ];
        if let Some(address) = self.insecure_address {
            flags.push(("insecure-bind-address", address.ip().to_string()));
        }
        match &self.source {
            NodeSource::File(path) => flags.push(("inventory", path.display().to_string())),
            NodeSource::Kubernetes(options) => flags.extend(kube::flags(options)),
        }
        if let Some(cgroup) = self.redirect.as_ref().and_then(|redirect| redirect.cgroup.as_ref()) {
            flags.push(("redirect-cgroup", cgroup.display().to_string()));
        }
        flags.into_iter().map(|(flag, value)| format!("--{flag}={value}")).collect()
    }

    /// Two doors on one address: the second would fail to listen, with a reason that names no flag of the first.
    fn check_ports(&self) -> Result<(), ConfigError> {
        let at = |port: Option<u16>| port.map(|port| SocketAddr::new(self.bind_address, port));
        let doors = [
            ("--agent-port", at(self.agent_port)),
            ("--secure-port", at(self.secure_port)),
            ("--insecure-port", self.insecure_address),
            ("--admin-address", self.admin_address),
        ];
        let doors: Vec<_> = doors.into_iter().filter_map(|(key, address)| Some((key, address?))).collect();
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

fn source(args: &RunArgs) -> Result<NodeSource, ConfigError> {
    // Checked in both cases: a wrong name is to be found before the flag is needed.
    let options = args.kube.options()?;
    Ok(match &args.inventory {
        Some(path) => NodeSource::File(path.clone()),
        None => NodeSource::Kubernetes(options),
    })
}

/// None: off.
fn insecure_address(args: &RunArgs) -> Result<Option<SocketAddr>, ConfigError> {
    let (key, value) = ("--insecure-bind-address", &args.insecure_bind_address);
    let address = parse_ip(key, value)?;
    if !address.is_loopback() {
        let reason = "not a loopback address: this door has no authentication; use 127.0.0.1 or ::1";
        return Err(ConfigError::new(key, value, reason));
    }
    Ok(parse_port("--insecure-port", &args.insecure_port)?.map(|port| SocketAddr::new(address, port)))
}

fn on_or_off(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ConfigError::new(key, value, "use on or off")),
    }
}

fn token_range(value: &str, exclude: &[IpNet]) -> Result<Ipv4Net, ConfigError> {
    const KEY: &str = "--token-range";
    let IpNet::V4(range) = parse_cidr(KEY, value)? else {
        return Err(ConfigError::new(KEY, value, "not IPv4; the IPv6 range is --token-range-v6"));
    };
    if !(8..=24).contains(&range.prefix_len()) {
        return Err(ConfigError::new(KEY, value, "use a /8 to /24: one address for each edge address"));
    }
    let useless = [
        (Ipv4Net::new_assert(Ipv4Addr::new(0, 0, 0, 0), 8), "0.0.0.0/8 is no network"),
        (Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8), "it has loopback addresses in it"),
        (Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16), "it has link-local addresses in it"),
        (Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 3), "it has multicast or reserved addresses in it"),
    ];
    if let Some((_, reason)) = useless.iter().find(|(net, _)| overlap(&IpNet::V4(range), &IpNet::V4(*net))) {
        return Err(ConfigError::new(KEY, value, *reason));
    }
    check_excluded(KEY, value, &IpNet::V4(range), exclude)?;
    Ok(range)
}

fn token_range_v6(value: &str, exclude: &[IpNet]) -> Result<Ipv6Net, ConfigError> {
    const KEY: &str = "--token-range-v6";
    let IpNet::V6(range) = parse_cidr(KEY, value)? else {
        return Err(ConfigError::new(KEY, value, "not IPv6; the IPv4 range is --token-range"));
    };
    if !(64..=96).contains(&range.prefix_len()) {
        return Err(ConfigError::new(KEY, value, "use a /64 to /96: one address for each edge address"));
    }
    let first = range.network();
    // fc00::/7 (RFC 4193) and 2000::/3 (RFC 4291 §2.4); the rest has a meaning of its own.
    if !(first.is_unique_local() || first.segments()[0] >> 13 == 1) {
        return Err(ConfigError::new(
            KEY,
            value,
            "not a unique local or global unicast range; use one such as fd00:1:2:3::/64",
        ));
    }
    check_excluded(KEY, value, &IpNet::V6(range), exclude)?;
    Ok(range)
}

fn check_excluded(key: &str, value: &str, range: &IpNet, exclude: &[IpNet]) -> Result<(), ConfigError> {
    match exclude.iter().find(|excluded| overlap(range, excluded)) {
        Some(excluded) => Err(ConfigError::new(key, value, format!("it overlaps {excluded} of --exclude"))),
        None => Ok(()),
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

fn dns_names(value: &str) -> Result<Vec<String>, ConfigError> {
    let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            // What a certificate may carry (RFC 5280 §4.2.1.6), a wildcard's first label besides.
            let plain = name.strip_prefix("*.").unwrap_or(name);
            match rustls_pki_types::DnsName::try_from(plain) {
                Ok(_) => Ok(name.to_ascii_lowercase()),
                Err(_) => {
                    Err(ConfigError::new("--cert-dns-names", value, format!("{name:?} is not a DNS name")))
                }
            }
        })
        .collect()
}

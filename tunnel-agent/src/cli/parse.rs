//! From flags to a [`Config`].

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use tunnel_core::config::{
    ConfigError, HostPort, parse_duration, parse_ip, parse_loopback_door, parse_target_rules, parse_with,
};
use tunnel_core::identity::{ExposeSecret, Holder, NodeName, SecretString};
use tunnel_core::link::{Congestion, MAX_LINKS};

use super::args::RunArgs;
use super::konnectivity::{self, konnectivity};
use super::outbound::outbound;
use crate::config::{Config, WhenReplaced};
use crate::identity::{enrolment, node_of_host};
use crate::kube::{DEFAULT_SERVICE, KubeOptions};
use crate::reach::{Proxy, Reach};
use crate::session::Spread;

/// A shorter one would be traffic for nothing; with a longer one a NAT forgets the link.
const KEEPALIVES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(300);

impl RunArgs {
    /// # Errors
    /// Names the flag, its value and the reason.
    pub fn to_config(&self) -> Result<Config, ConfigError> {
        self.to_config_as(is_pod())
    }

    /// `pod`: whether this is one, with access to the API server.
    pub(super) fn to_config_as(&self, pod: bool) -> Result<Config, ConfigError> {
        let servers = servers(self)?;
        let node_name = match &self.node_name {
            Some(name) => parse_with("--node-name", name)?,
            None => node_of_host()?,
        };
        let konnectivity = konnectivity(self, &node_name)?;
        let kube = if konnectivity.is_some() { None } else { kube_options(self, &servers, pod)? };
        if kube.is_some() {
            let given = [
                ("--token", self.token.is_some()),
                ("--token-file", self.token_file.is_some()),
                ("--ca-hash", self.ca_hash.is_some()),
            ];
            if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
                let reason = "not with --kubeconfig, nor as a pod without --server, where this agent enrols through the API \
                              server; leave it out, or enrol with --server, --token and --ca-hash alone";
                return Err(ConfigError::without_value(key, reason));
            }
        }
        let pod_targets = pod_targets(self, kube.is_some())?;
        let enrolled = (self.state_dir.as_path(), Holder::Agent);
        let (token, ca_hash) =
            enrolment(self.token.as_ref(), self.token_file.as_deref(), self.ca_hash.as_deref(), enrolled)?;
        Ok(Config {
            servers,
            kube,
            konnectivity,
            node_name,
            node_ip: self.node_ip.as_deref().map(node_ip).transpose()?,
            token,
            ca_hash,
            reach: Reach::new(
                proxy(self.proxy.as_ref(), |name| std::env::var(name).ok())?,
                Congestion::parse("--congestion-control", &self.congestion_control)?,
            ),
            state_dir: self.state_dir.clone(),
            admin_address: parse_loopback_door("--admin-address", &self.admin_address)?,
            allow_targets: parse_target_rules("--allow-target", &self.allow_target)?,
            pod_targets,
            outbound: outbound(&self.connect_address, &self.connect_clients, &self.map)?,
            bench: bench(&self.bench)?,
            spread: spread(&self.links)?,
            max_links: max_links(&self.max_links)?,
            keepalive: keepalive(&self.keepalive)?,
            drain_timeout: parse_duration("--drain-timeout", &self.drain_timeout)?,
            when_replaced: match &self.when_replaced {
                Some(given) => parse_with("--when-replaced", given)?,
                // The kubelet would start it again.
                None if is_pod() => WhenReplaced::Wait,
                None => WhenReplaced::Exit,
            },
            log_format: parse_with("--log-format", &self.log_format)?,
            log_level: parse_with("--log-level", &self.log_level)?,
            ignored: ignored(self),
        })
    }
}

/// As curl: an empty variable counts as none, and the lower-case names are others' habit.
pub(super) fn proxy(
    flag: Option<&SecretString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Option<Proxy>, ConfigError> {
    let set = |names: &[&'static str]| {
        let mut values = names.iter().filter_map(|name| Some((*name, environment(name)?)));
        values.find(|(_, value)| !value.trim().is_empty())
    };
    let given = flag.map(|url| ("--proxy", url.expose_secret().to_owned()));
    let Some((key, url)) = given.or_else(|| set(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]))
    else {
        return Ok(None);
    };
    if key == "--proxy" && url == "none" {
        return Ok(None);
    }
    let except = set(&["NO_PROXY", "no_proxy"]).map_or_else(String::new, |(_, value)| value);
    let proxy = Proxy::parse(url.trim(), &except);
    // The value may contain a password.
    proxy.map(Some).map_err(|reason| ConfigError::without_value(key, reason))
}

fn pod_targets(args: &RunArgs, in_cluster: bool) -> Result<bool, ConfigError> {
    const KEY: &str = "--pod-targets";
    let error = |reason: &str| Err(ConfigError::new(KEY, &args.pod_targets, reason));
    match args.pod_targets.as_str() {
        "off" => Ok(false),
        "on" if !in_cluster => {
            error("an API server is needed, which has the ranges; name them with --allow-target")
        }
        "on" if !args.allow_target.is_empty() => error("not with --allow-target: name the ranges there"),
        "on" => Ok(true),
        _ => error("use on or off"),
    }
}

fn bench(value: &str) -> Result<bool, ConfigError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ConfigError::new("--bench", value, "use on or off")),
    }
}

fn spread(value: &str) -> Result<Spread, ConfigError> {
    if value == "all" {
        return Ok(Spread::All);
    }
    match value.parse() {
        Ok(number @ 1..) => Ok(Spread::Best(number)),
        _ => Err(ConfigError::new("--links", value, "not a number of servers from 1 on, nor all")),
    }
}

fn max_links(value: &str) -> Result<Option<u32>, ConfigError> {
    if value == "auto" {
        return Ok(None);
    }
    match value.parse() {
        Ok(number @ 1..=MAX_LINKS) => Ok(Some(number)),
        _ => Err(ConfigError::new("--max-links", value, format!("not from 1 to {MAX_LINKS}, nor auto"))),
    }
}

fn keepalive(value: &str) -> Result<Duration, ConfigError> {
    let time = parse_duration("--keepalive", value)?;
    // The kernel counts whole seconds.
    if KEEPALIVES.contains(&time) && time.subsec_nanos() == 0 {
        return Ok(time);
    }
    Err(ConfigError::new("--keepalive", value, "not whole seconds from 1s to 5m"))
}

fn servers(args: &RunArgs) -> Result<Vec<HostPort>, ConfigError> {
    let mut servers: Vec<HostPort> = Vec::new();
    for value in &args.server {
        for entry in value.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let server = entry.parse().map_err(|reason| ConfigError::new("--server", entry, reason))?;
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
    }
    // YurtTunnel's chart leaves the value of --tunnelserver-addr empty.
    if servers.is_empty() && !args.server.iter().all(String::is_empty) {
        return Err(ConfigError::new("--server", args.server.join(","), "no HOST:PORT in it"));
    }
    Ok(servers)
}

fn kube_options(args: &RunArgs, servers: &[HostPort], pod: bool) -> Result<Option<KubeOptions>, ConfigError> {
    // As a pod too, a token says how this agent enrols.
    let by_token = args.token.is_some() || args.token_file.is_some() || args.ca_hash.is_some();
    if args.kubeconfig.is_none() && !servers.is_empty() && (!pod || by_token) {
        let given = [("--namespace", &args.namespace), ("--service", &args.service)];
        if let Some((key, Some(value))) = given.into_iter().find(|(_, value)| value.is_some()) {
            let reason =
                "not with --server alone, which uses no API server; add --kubeconfig or leave it out";
            return Err(ConfigError::new(key, value, reason));
        }
        return Ok(None);
    }
    if args.kubeconfig.is_none() && !pod {
        let reason = "needed: HOST:PORT of each tunnel-server; or --kubeconfig FILE, to find them and enrol through the API \
                      server (as a pod neither is needed, but this is none: $KUBERNETES_SERVICE_HOST is not set)";
        return Err(ConfigError::without_value("--server", reason));
    }
    // The values become part of a selector.
    let name = |key: &str, value: &String| match value.parse::<NodeName>() {
        Ok(_) => Ok(value.clone()),
        Err(_) => Err(ConfigError::new(key, value, "not the name of an object in Kubernetes")),
    };
    Ok(Some(KubeOptions {
        kubeconfig: args.kubeconfig.clone(),
        namespace: args.namespace.as_ref().map(|value| name("--namespace", value)).transpose()?,
        service: match &args.service {
            Some(service) => name("--service", service)?,
            None => DEFAULT_SERVICE.to_owned(),
        },
    }))
}

/// Kubernetes sets it in every container.
fn is_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some_and(|host| !host.is_empty())
}

fn ignored(args: &RunArgs) -> Vec<(&'static str, &'static str)> {
    let konnectivitys = &args.konnectivity;
    let identifiers = konnectivitys.konnectivity_identifiers.is_some() && !konnectivitys.names_a_server();
    let identifiers = identifiers.then_some(("--agent-identifiers", "the certificate names the node"));
    let others = args.ignored.given().chain(identifiers).chain(konnectivity::ignored(args));
    others.chain(args.klog.given()).collect()
}

fn node_ip(value: &str) -> Result<IpAddr, ConfigError> {
    let address = parse_ip("--node-ip", value)?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(ConfigError::new("--node-ip", value, "not the address of a node"));
    }
    Ok(address)
}

//! The agent's command line and what becomes of it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tunnel_core::config::{
    ConfigError, HostPort, TargetRule, duration_text, host_name, parse_duration, parse_ip,
    parse_loopback_door, parse_target_rules, parse_with,
};
use tunnel_core::identity::{ExposeSecret, NodeName, SecretString, parse_ca_hash};
use tunnel_core::logging;

use crate::kube::{DEFAULT_SERVICE, KubeOptions};
use crate::status::StatusCommand;

/// Where the key and the certificate are kept by default.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/postern/agent";
/// Where the admin endpoints are by default.
pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10266";

/// Runs on an edge node, dials the tunnel-servers, and lets them reach this node.
#[derive(Debug, Parser)]
#[command(
    name = "tunnel-agent",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// What else than running it can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the running agent's servers, certificate and connections.
    Status(StatusCommand),
}

/// The flags as text: [`Config::new`] makes values of them, so that every error has the same form.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The tunnel-servers to dial, comma-separated or repeated; all of them are kept connected [default: found through
    /// the API server, by --service].
    #[arg(long, value_name = "HOST:PORT[,…]", alias = "tunnelserver-addr")]
    pub server: Vec<String>,
    /// This node's name [default: the host name in lower case].
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// This node's own address, named first to the servers [default: from the route to the server].
    #[arg(long, value_name = "IP", env = "NODE_IP")]
    pub node_ip: Option<String>,
    /// Token of `tunnel-server token create`; for the first enrolment only.
    #[arg(long, value_name = "TOKEN")]
    pub token: Option<SecretString>,
    /// File with the token; it may be gone once the agent has enrolled.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Hash of the server's CA, as `tunnel-server token create` prints it; for the first enrolment only.
    #[arg(long, value_name = "sha256:HEX")]
    pub ca_hash: Option<String>,
    /// How to reach the API server, through which this agent enrols and finds the servers: the kubelet's kubeconfig, say
    /// [default: as a pod; with --server and without this flag, no API server is used].
    #[arg(long, value_name = "FILE", alias = "kube-config")]
    pub kubeconfig: Option<PathBuf>,
    /// Where the Service is [default: the pod's namespace, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// The Service that leads to the servers [default: x-tunnel-server-svc].
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
    /// Where the key and the certificate are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Where /metrics, /healthz, /readyz and /status answer: a loopback address and a port, or a port; port 0: nowhere.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-server-port", "health-server-port"],
          default_value = DEFAULT_ADMIN_ADDRESS)]
    pub admin_address: String,
    /// What the servers may reach through this agent, as CIDR:PORTS or node:PORTS, PORTS being ports and ranges such as
    /// 22,8000-8099 or *; repeatable [default: this node's own addresses on any port]. Loopback is closed unless a
    /// CIDR within it is given here or, with the default, the server names the port when a session begins.
    #[arg(long, value_name = "CIDR:PORTS")]
    pub allow_target: Vec<String>,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    pub drain_timeout: String,
    /// text or json, one line per event on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: String,
    /// off, error, warn, info, debug, trace, or klog's number.
    #[arg(long, value_name = "LEVEL", alias = "v", default_value = "info")]
    pub log_level: String,
    #[command(flatten)]
    pub ignored: IgnoredArgs,
}

/// YurtTunnel's flags that have no meaning here: its manifests work as they are.
#[derive(Args, Clone, Debug, Default)]
pub struct IgnoredArgs {
    #[arg(long, hide = true)]
    pub apiserver_addr: Option<String>,
    #[arg(long, hide = true)]
    pub agent_identifiers: Option<String>,
    #[arg(long, hide = true)]
    pub meta_host: Option<String>,
}

/// A configuration that is whole and free of contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    /// Each once. Empty: found through the API server.
    pub servers: Vec<HostPort>,
    /// None: standalone.
    pub kube: Option<KubeOptions>,
    pub node_name: NodeName,
    /// None: from the route to the server.
    pub node_ip: Option<IpAddr>,
    pub token: Option<SecretString>,
    /// `sha256:HEX`.
    pub ca_hash: Option<String>,
    pub state_dir: PathBuf,
    /// None: off.
    pub admin_address: Option<SocketAddr>,
    /// Empty: the default policy.
    pub allow_targets: Vec<TargetRule>,
    pub drain_timeout: Duration,
    pub log_format: logging::Format,
    pub log_level: logging::Level,
    /// Flags that were given and have no meaning here, and why.
    pub ignored: Vec<(&'static str, &'static str)>,
}

impl Config {
    /// # Errors
    /// Names the flag, its value and the reason.
    pub fn new(args: &RunArgs) -> Result<Self, ConfigError> {
        let servers = servers(args)?;
        let kube = kube_options(args, &servers)?;
        let node_name = match &args.node_name {
            Some(name) => parse_with("--node-name", name)?,
            None => node_of_host()?,
        };
        let ca_hash = args.ca_hash.as_deref().map(str::trim);
        if let Some(hash) = ca_hash {
            parse_ca_hash(hash).map_err(|error| ConfigError::new("--ca-hash", hash, error.to_string()))?;
        }
        if kube.is_some() {
            let given = [
                ("--token", args.token.is_some()),
                ("--token-file", args.token_file.is_some()),
                ("--ca-hash", ca_hash.is_some()),
            ];
            if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
                let reason = "not with --kubeconfig or as a pod, where this agent enrols through the API server; leave it \
                              out, or enrol with --server, --token and --ca-hash alone";
                return Err(ConfigError::without_value(key, reason));
            }
        }
        let token = token(args)?;
        if token.is_some() && ca_hash.is_none() {
            let reason = "needed with a token, or the agent could enrol with a stranger; `tunnel-server ca status` prints it";
            return Err(ConfigError::without_value("--ca-hash", reason));
        }
        Ok(Self {
            servers,
            kube,
            node_name,
            node_ip: args.node_ip.as_deref().map(node_ip).transpose()?,
            token,
            ca_hash: ca_hash.map(str::to_owned),
            state_dir: args.state_dir.clone(),
            admin_address: parse_loopback_door("--admin-address", &args.admin_address)?,
            allow_targets: parse_target_rules("--allow-target", &args.allow_target)?,
            drain_timeout: parse_duration("--drain-timeout", &args.drain_timeout)?,
            log_format: parse_with("--log-format", &args.log_format)?,
            log_level: parse_with("--log-level", &args.log_level)?,
            ignored: ignored(&args.ignored),
        })
    }

    /// The flags that give this configuration, defaults included and the token masked.
    pub fn flags(&self) -> Vec<String> {
        let servers = self.servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let kube = self.kube.as_ref();
        let optional = [
            ("server", Some(servers).filter(|servers| !servers.is_empty())),
            ("kubeconfig", kube.and_then(|kube| Some(kube.kubeconfig.as_ref()?.display().to_string()))),
            ("namespace", kube.and_then(|kube| kube.namespace.clone())),
            ("service", kube.map(|kube| kube.service.clone())),
            ("node-ip", self.node_ip.map(|address| address.to_string())),
            ("token", self.token.as_ref().map(|_| "***".to_owned())),
            ("ca-hash", self.ca_hash.clone()),
        ];
        let given = [
            ("node-name", self.node_name.to_string()),
            ("state-dir", self.state_dir.display().to_string()),
            (
                "admin-address",
                self.admin_address.map_or_else(|| "0".to_owned(), |address| address.to_string()),
            ),
            ("drain-timeout", duration_text(self.drain_timeout)),
            ("log-format", self.log_format.to_string()),
            ("log-level", self.log_level.to_string()),
        ];
        let optional = optional.into_iter().filter_map(|(flag, value)| Some((flag, value?)));
        let rules = self.allow_targets.iter().map(|rule| ("allow-target", rule.to_string()));
        given
            .into_iter()
            .chain(optional)
            .chain(rules)
            .map(|(flag, value)| format!("--{flag}={value}"))
            .collect()
    }
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
    if servers.is_empty() && !args.server.is_empty() {
        return Err(ConfigError::new("--server", args.server.join(","), "no HOST:PORT in it"));
    }
    Ok(servers)
}

fn kube_options(args: &RunArgs, servers: &[HostPort]) -> Result<Option<KubeOptions>, ConfigError> {
    if args.kubeconfig.is_none() && !servers.is_empty() {
        let given = [("--namespace", &args.namespace), ("--service", &args.service)];
        if let Some((key, Some(value))) = given.into_iter().find(|(_, value)| value.is_some()) {
            let reason =
                "not with --server alone, which uses no API server; add --kubeconfig or leave it out";
            return Err(ConfigError::new(key, value, reason));
        }
        return Ok(None);
    }
    if args.kubeconfig.is_none() && !is_pod() {
        let reason = "needed: HOST:PORT of each tunnel-server; or --kubeconfig FILE, to find them and enrol through the API \
                      server (as a pod neither is needed, but this is none: $KUBERNETES_SERVICE_HOST is not set)";
        return Err(ConfigError::without_value("--server", reason));
    }
    // It becomes part of a selector.
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

fn ignored(args: &IgnoredArgs) -> Vec<(&'static str, &'static str)> {
    let known = [
        ("--apiserver-addr", &args.apiserver_addr, "the kubeconfig names the API server"),
        ("--agent-identifiers", &args.agent_identifiers, "the certificate names the node"),
        ("--meta-host", &args.meta_host, "the admin endpoints are on --admin-address"),
    ];
    known.into_iter().filter(|(_, value, _)| value.is_some()).map(|(key, _, why)| (key, why)).collect()
}

fn node_ip(value: &str) -> Result<IpAddr, ConfigError> {
    let address = parse_ip("--node-ip", value)?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(ConfigError::new("--node-ip", value, "not the address of a node"));
    }
    Ok(address)
}

fn node_of_host() -> Result<NodeName, ConfigError> {
    let missing = |reason: String| ConfigError::without_value("--node-name", format!("needed: {reason}"));
    let name = host_name().map_err(|error| missing(format!("the host name cannot be read: {error}")))?;
    name.parse().map_err(|error| missing(format!("the host name does not do as a node's: {error}")))
}

fn token(args: &RunArgs) -> Result<Option<SecretString>, ConfigError> {
    let (key, token) = match (&args.token, &args.token_file) {
        (Some(_), Some(path)) => {
            let reason = "--token is given too; use one of them";
            return Err(ConfigError::new("--token-file", path.to_string_lossy(), reason));
        }
        (Some(token), None) => ("--token", SecretString::from(token.expose_secret().trim())),
        (None, Some(path)) => match std::fs::read_to_string(path) {
            Ok(text) => ("--token-file", text.trim().into()),
            // The token was for the first enrolment, and a tidy operator removes it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_enrolled(&args.state_dir) => {
                return Ok(None);
            }
            Err(error) => {
                return Err(ConfigError::new("--token-file", path.to_string_lossy(), error.to_string()));
            }
        },
        (None, None) => return Ok(None),
    };
    if token.expose_secret().is_empty() || token.expose_secret().chars().any(char::is_whitespace) {
        return Err(ConfigError::without_value(key, "not a token: empty, or with blanks in it"));
    }
    Ok(Some(token))
}

fn is_enrolled(state_dir: &Path) -> bool {
    state_dir.join("agent.crt").exists()
}

#[cfg(test)]
mod tests;

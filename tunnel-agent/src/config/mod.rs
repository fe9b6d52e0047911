//! The agent's flags, and the configuration made from them.

mod konnectivity;
mod outbound;
#[cfg(test)]
pub(crate) mod tests;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tunnel_link::link::{Congestion, MAX_LINKS};
use tunnel_pki::enrol::EnrolmentFlags;
use tunnel_pki::{ExposeSecret, Holder, SecretString};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::value::{self, List, ListenAddress, OnOff};
use tunnel_runtime::config::{ConfigError, ConfigFile, HostPort, Ignored, PortSet, TargetRule};
use tunnel_runtime::logging::LogConfig;

use crate::kube::{DEFAULT_SERVICE, KubeOptions};
use crate::reach::{Proxy, Reach};
pub use konnectivity::KonnectivityConfig;
use konnectivity::KonnectivityFlags;
pub use outbound::Listen;
use outbound::OutboundFlags;

pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10266";

/// A shorter interval would only cause traffic. With a longer one a NAT forgets the link.
const KEEPALIVES: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(300);

/// Behaviour of this agent once another one has taken over from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenReplaced {
    Exit,
    /// It waits to be stopped, and goes on should the other one die.
    Wait,
}

/// The flags.
#[derive(Args, Clone, Debug)]
pub struct Flags {
    #[command(flatten)]
    pub file: ConfigFile,
    /// The tunnel-servers to dial, comma-separated or repeated [default: found through the API server, by --service].
    #[arg(long, value_name = "HOST:PORT", alias = "tunnelserver-addr", value_parser = servers)]
    server: Vec<List<HostPort>>,
    /// This node's own address, named first to the servers while it is on an interface [default: from the route to the
    /// server].
    #[arg(long, value_name = "IP", env = "NODE_IP", value_parser = node_ip)]
    pub node_ip: Option<IpAddr>,
    #[command(flatten)]
    enrolment: EnrolmentFlags,
    /// HTTP proxy on the way to the servers, or `none` [default: HTTPS_PROXY or ALL_PROXY of the environment].
    ///
    /// It is http://[USER:PASSWORD@]HOST[:PORT]. Servers in NO_PROXY are dialled directly, and so is the API server. The
    /// password stays out of logs and /status, but is seen by others in the command line: the environment is the better place
    /// for it.
    #[arg(long, value_name = "URL")]
    proxy: Option<SecretString>,
    /// Where the key and the certificate are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = "/var/lib/postern/agent")]
    pub state_dir: PathBuf,
    /// Where /metrics, /healthz, /readyz and /status answer: a loopback address and a port, or only a port; port 0 turns
    /// them off.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "health-server-port"], env = "POSTERN_ADMIN_ADDRESS",
          default_value = DEFAULT_ADMIN_ADDRESS, value_parser = value::listen_on_loopback)]
    pub admin_address: ListenAddress,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
    pub drain_timeout: Duration,
    /// Action once another agent with the same state directory has taken over from this one: exit, or wait to be stopped,
    /// for whoever would start it again [default: wait as a pod, else exit].
    #[arg(long, value_name = "exit|wait", hide_possible_values = true)]
    when_replaced: Option<WhenReplaced>,
    #[command(flatten)]
    pub log: LogConfig,
    #[command(flatten)]
    pub links: LinkConfig,
    #[command(flatten)]
    pub targets: TargetConfig,
    #[command(flatten)]
    outbound: OutboundFlags,
    #[command(flatten)]
    kube: KubeFlags,
    #[command(flatten)]
    konnectivity: KonnectivityFlags,
    #[command(flatten)]
    ignored: Ignored,
}

/// Targets that the servers may reach through this agent.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What the servers may reach")]
pub struct TargetConfig {
    /// Targets that the servers may reach, as CIDR:PORTS or node:PORTS; repeatable [default: this node, on any port].
    ///
    /// PORTS are ports and ranges such as 22,8000-8099 or *. The default is this node's own addresses on any port, and with
    /// --pod-targets=on its pods. Loopback is closed unless a CIDR within it is given here or, with the default, by --loopback-ports.
    #[arg(id = "allow-target", long, value_name = "CIDR:PORTS")]
    pub allow: Vec<TargetRule>,
    /// Ports of this node's loopback that the servers may open, as in --allow-target. Without that flag, a port is open if it is
    /// named here and in the servers' `localhost-proxy-ports`. The default is this agent's metrics.
    #[arg(id = "loopback-ports", long, value_name = "PORTS", default_value = "10266")]
    pub loopback: PortSet,
    /// on or off: let the servers also reach this node's pods, for their --edge-pod-routes. Their ranges are read from this Node,
    /// which takes the right to get Nodes; not with --allow-target, which names them itself.
    #[arg(id = "pod-targets", long, value_name = "on|off", default_value = "off", value_parser = value::on_off)]
    pub pods: OnOff,
}

/// The links with the servers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Links with the servers")]
pub struct LinkConfig {
    /// How many of the servers to be attached to, or all: another server forwards connections for this node to one of
    /// these. Agents choose by a hash of the node's name and the server's address, so that a fleet spreads
    /// evenly; another server takes the place of one that does not answer. With one address in front of several servers
    /// there is nothing to choose.
    #[arg(long, value_name = "N|all", default_value = "all", value_parser = max_servers)]
    pub max_servers: usize,
    /// TCP connections with each server, 1 to 8, or auto: 2 where both ends send by BBR, else 8. With more than one, a busy
    /// node's bulk transfers do not delay its other connections; they are opened when the server needs them, and closed when it
    /// does not. Other congestion controls slow a connection down at each loss, so that several together are faster.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = max_links)]
    pub max_links: MaxLinks,
    /// How long a connection with a server may be silent before the kernel asks whether it is alive, from 1s to 5m: a NAT
    /// that has forgotten it is noticed that soon. 2s cost 4.5 MB a day.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = keepalive)]
    pub keepalive: Duration,
    /// TCP congestion control of the links for what this agent sends: auto (BBR where the kernel has it and permits it, else the
    /// system's), system, or the kernel's name of one.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = Congestion::parse)]
    congestion_control: Congestion,
    /// on or off: offer MPTCP (RFC 8684) to the servers, which accept it from Linux 6.1 on. A link then outlasts the loss of one of
    /// several uplinks; `ip mptcp endpoint` on this host names them.
    #[arg(long, value_name = "on|off", default_value = "off", value_parser = value::on_off)]
    pub mptcp: OnOff,
    /// on or off: let the servers measure the way to this agent (`tunnel-server bench`), one at a time and at most 2 s of
    /// sending each.
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = value::on_off)]
    pub bench: OnOff,
}

/// None: as the congestion control of both ends needs. An alias, because clap's derive treats `Option` specially.
type MaxLinks = Option<u32>;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Kubernetes")]
struct KubeFlags {
    /// Kubeconfig of the API server through which this agent enrols and finds the servers, for example the kubelet's.
    ///
    /// The default is that of a pod; elsewhere, and as a pod with --server and a token, no API server is used.
    #[arg(long, value_name = "FILE", alias = "kube-config")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the Service [default: the pod's namespace, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    namespace: Option<String>,
    /// The Service that leads to the servers [default: x-tunnel-server-svc].
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    service: Option<String>,
}

/// A complete configuration without contradictions.
#[derive(Clone, Debug)]
pub struct Config {
    /// The flags as given. The fields below hold values that depend on several flags, the host or files.
    pub given: Flags,
    /// Without duplicates. Empty if found through the API server.
    pub servers: Vec<HostPort>,
    /// None when standalone.
    pub kube: Option<KubeOptions>,
    /// Set if the servers are konnectivity's. Then `servers` is empty, and nothing is enrolled.
    pub konnectivity: Option<KonnectivityConfig>,
    pub node_name: NodeName,
    pub token: Option<SecretString>,
    /// `sha256:HEX`.
    pub ca_hash: Option<String>,
    /// Settings for connections to servers.
    pub reach: Reach,
    /// Listeners that lead to the cloud.
    pub outbound: Vec<Listen>,
    pub when_replaced: WhenReplaced,
    pub ignored: Ignored,
    /// Flags that give this configuration, defaults included, without secrets.
    pub flags: Vec<String>,
}

impl Flags {
    /// Settles values that depend on several flags. `flags` are those in effect.
    ///
    /// # Errors
    /// Flags that contradict each other, or a missing one. Names one of them and the reason.
    pub fn config(self, flags: Vec<String>) -> Result<Config, ConfigError> {
        self.config_as(is_pod(), flags)
    }

    /// `pod`: true for a pod, which has access to the API server.
    fn config_as(self, pod: bool, mut flags: Vec<String>) -> Result<Config, ConfigError> {
        let servers = self.servers();
        let node_name = self.enrolment.node()?;
        let konnectivity = self.konnectivity.config(&node_name, self.of_tunnel_servers())?;
        let kube = if konnectivity.is_some() { None } else { self.kube_options(&servers, pod)? };
        if let Some(key) = self.enrolment.by_token().filter(|_| kube.is_some()) {
            let reason = "not with --kubeconfig, nor as a pod without --server, where this agent enrols through the API \
                          server; leave it out, or enrol with --server, --token and --ca-hash alone";
            return Err(ConfigError::without_value(key, reason));
        }
        if self.targets.pods && (kube.is_none() || !self.targets.allow.is_empty()) {
            let reason = match kube {
                None => "an API server is needed, which has the ranges; name them with --allow-target",
                Some(_) => "not with --allow-target: name the ranges there",
            };
            return Err(ConfigError::new("--pod-targets", "on", reason));
        }
        let (token, ca_hash) = self.enrolment.token(&self.state_dir, Holder::Agent)?;
        let proxy = proxy(self.proxy.as_ref(), |name| std::env::var(name).ok())?;
        // The proxy in effect, without its password.
        flags.retain(|flag| !flag.starts_with("--proxy="));
        let none = || self.proxy.as_ref().map(|_| "none".to_owned());
        let shown = proxy.as_ref().map(ToString::to_string).or_else(none);
        flags.extend(shown.map(|proxy| format!("--proxy={proxy}")));
        // The kubelet would start this agent again.
        let when_replaced = if is_pod() { WhenReplaced::Wait } else { WhenReplaced::Exit };
        Ok(Config {
            servers,
            kube,
            konnectivity,
            node_name,
            token,
            ca_hash,
            reach: Reach {
                proxy: proxy.map(Arc::new),
                congestion: self.links.congestion_control.clone(),
                multipath: self.links.mptcp,
                network: None,
            },
            outbound: self.outbound.listeners()?,
            when_replaced: self.when_replaced.unwrap_or(when_replaced),
            ignored: self.ignored(),
            flags,
            given: self,
        })
    }

    fn servers(&self) -> Vec<HostPort> {
        let mut servers: Vec<HostPort> = Vec::new();
        for server in self.server.iter().flatten() {
            if !servers.contains(server) {
                servers.push(server.clone());
            }
        }
        servers
    }

    /// A given flag that concerns tunnel-servers.
    fn of_tunnel_servers(&self) -> Option<&'static str> {
        let given = [
            ("--server", !self.server.is_empty()),
            ("--namespace", self.kube.namespace.is_some()),
            ("--service", self.kube.service.is_some()),
            ("--pod-targets", self.targets.pods),
            ("--connect-address", self.outbound.connect_address.is_some()),
            ("--forward", !self.outbound.forward.is_empty()),
        ];
        let given = given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag);
        given.or_else(|| self.enrolment.by_token())
    }

    fn kube_options(&self, servers: &[HostPort], pod: bool) -> Result<Option<KubeOptions>, ConfigError> {
        let KubeFlags { kubeconfig, namespace, service } = self.kube.clone();
        // With a token, a pod too enrols without the API server.
        if kubeconfig.is_none() && !servers.is_empty() && (!pod || self.enrolment.by_token().is_some()) {
            let given = [("--namespace", namespace), ("--service", service)];
            if let Some((key, Some(value))) = given.into_iter().find(|(_, value)| value.is_some()) {
                let reason =
                    "not with --server alone, which uses no API server; add --kubeconfig or leave it out";
                return Err(ConfigError::new(key, value, reason));
            }
            return Ok(None);
        }
        if kubeconfig.is_none() && !pod {
            let reason = "needed: HOST:PORT of each tunnel-server; or --kubeconfig FILE, to find them and enrol through the API \
                          server (as a pod neither is needed, but this is none: $KUBERNETES_SERVICE_HOST is not set)";
            return Err(ConfigError::without_value("--server", reason));
        }
        let service = service.unwrap_or_else(|| DEFAULT_SERVICE.to_owned());
        Ok(Some(KubeOptions { kubeconfig, namespace, service }))
    }

    /// Flags of other systems that have no effect, some of them only in these circumstances.
    fn ignored(&self) -> Ignored {
        let mut ignored = self.ignored.clone();
        let circumstances = [
            // The certificate names the node.
            (
                "--agent-identifiers",
                self.konnectivity.has_identifiers() && !self.konnectivity.names_a_server(),
            ),
            // konnectivity's agent uses its kubeconfig for the leases.
            ("--kubeconfig", self.kube.kubeconfig.is_some() && self.konnectivity.names_a_server()),
        ];
        ignored
            .0
            .extend(circumstances.into_iter().filter(|(_, given)| *given).map(|(flag, _)| flag.to_owned()));
        ignored
    }
}

/// The proxy of the flag or the environment. As in curl, an empty variable counts as unset. Other programs also use the
/// lower-case names.
fn proxy(
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

/// The proxy that this process's environment names, without its password.
pub(crate) fn proxy_of_environment() -> Option<String> {
    proxy(None, |name| std::env::var(name).ok()).ok()?.map(|proxy| proxy.to_string())
}

fn servers(value: &str) -> Result<List<HostPort>, String> {
    let servers: List<HostPort> = value::list(value)?;
    // YurtTunnel's chart leaves the value of --tunnelserver-addr empty.
    if servers.is_empty() && !value.is_empty() {
        return Err("no HOST:PORT in it".to_owned());
    }
    Ok(servers)
}

/// [`usize::MAX`] for all.
fn max_servers(value: &str) -> Result<usize, String> {
    match (value, value.parse()) {
        ("all", _) => Ok(usize::MAX),
        (_, Ok(number @ 1..)) => Ok(number),
        _ => Err("not a number of servers from 1 on, nor all".to_owned()),
    }
}

fn max_links(value: &str) -> Result<MaxLinks, String> {
    match (value, value.parse()) {
        ("auto", _) => Ok(None),
        (_, Ok(number @ 1..=MAX_LINKS)) => Ok(Some(number)),
        _ => Err(format!("not from 1 to {MAX_LINKS}, nor auto")),
    }
}

fn keepalive(value: &str) -> Result<Duration, String> {
    let time = value::duration(value)?;
    // The kernel counts whole seconds.
    if KEEPALIVES.contains(&time) && time.subsec_nanos() == 0 {
        return Ok(time);
    }
    Err("not whole seconds from 1s to 5m".to_owned())
}

/// Parses an object's name in Kubernetes, which becomes part of a selector.
fn object_name(value: &str) -> Result<String, String> {
    let name = value.parse::<NodeName>().map(|_| value.to_owned());
    name.map_err(|_| "not the name of an object in Kubernetes".to_owned())
}

/// True in a container of Kubernetes, which sets the variable in each.
fn is_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some_and(|host| !host.is_empty())
}

fn node_ip(value: &str) -> Result<IpAddr, String> {
    match value::ip(value)? {
        address if address.is_unspecified() || address.is_multicast() => {
            Err("not the address of a node".to_owned())
        }
        address => Ok(address),
    }
}

//! The server's flags, and the configuration that they yield.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::{
    ConfigError, parse_cidrs, parse_duration, parse_ip, parse_ips, parse_loopback_door, parse_port,
    parse_ports, parse_with,
};

use tunnel_core::link::Congestion;

use super::door_args::DoorArgs;
use super::egress_args::EgressArgs;
use super::foreign_args::ForeignArgs;
use super::konnectivity_args::KonnectivityArgs;
use super::kube_args::KubeArgs;
use super::reach_args::ReachArgs;
use super::role_args::{Given, RoleArgs};
use crate::config::{
    self, Config, DEFAULT_ADMIN_ADDRESS, DEFAULT_BPFFS, DEFAULT_TOKEN_RANGE, DEFAULT_TOKEN_RANGE_V6,
    DoorConfig, NodeSource,
};
use crate::inventory::{DEFAULT_EDGE_SELECTOR, Selector};
use crate::pki::DEFAULT_STATE_DIR;
use crate::redirect::{PinConfig, RedirectConfig};

// Values stay text until `config()` parses them, so that every error has the same form.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub given: Given,
    /// Run without Kubernetes: read the nodes from this NodeList (see `kubectl get nodes -o yaml`), and again when it changes.
    #[arg(long, value_name = "FILE")]
    pub inventory: Option<PathBuf>,
    /// on or off: take an inventory without any node for true; otherwise it is refused and the last one stays in effect.
    #[arg(long, value_name = "on|off", default_value = "off", num_args = 0..=1, require_equals = true,
          default_missing_value = "on")]
    pub allow_empty_inventory: String,
    /// Where the CA, keys, tokens and certificates are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Address of --agent-port and --secure-port; an IPv6 literal such as :: switches the family.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub bind_address: String,
    /// Port that the agents dial; 0: off.
    #[arg(long, value_name = "PORT", alias = "tunnel-agent-connect-port", default_value = "10262")]
    pub agent_port: String,
    /// Port of the https door, where TLS names the node by SNI, or a request its Host (--terminate-tls); 0: off.
    #[arg(long, value_name = "PORT", default_value = "10263")]
    pub secure_port: String,
    /// Address of --insecure-port; only a loopback address.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub insecure_bind_address: String,
    /// Port of the http door, where a request's Host names the node; 0: off.
    #[arg(long, value_name = "PORT", default_value = "10264")]
    pub insecure_port: String,
    /// Where to serve /metrics, /healthz, /readyz and /status: a loopback address and a port, or a port; port 0: off.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-port"],
          env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS)]
    pub admin_address: String,
    /// Port of the metrics door, on --bind-address: /metrics over TLS for other hosts. Callers show a certificate or a bearer token,
    /// and in a cluster may get the nonResourceURL /metrics; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0")]
    pub metrics_port: String,
    /// on or off: redirect connections of this host and its pods to edge nodes, by eBPF; on fails where that is impossible.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub redirect: String,
    /// Only processes in this cgroup v2 directory are redirected [default: the host's cgroup v2 root].
    #[arg(long, value_name = "DIR")]
    pub redirect_cgroup: Option<PathBuf>,
    /// BPF file system in which the programs stay while this server is killed and not back, so that connects to edge nodes
    /// are refused at once; off: they vanish with it, and such connects go where nobody answers.
    #[arg(long, value_name = "DIR|off", env = "POSTERN_BPFFS", default_value = DEFAULT_BPFFS)]
    pub bpffs: String,
    /// How long, with its unit (s, m, h), the programs redirect without a sign of life of this server; 5 s at least. After it
    /// edge nodes' addresses are direct again.
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    pub orphan_timeout: String,
    /// TCP ports of edge nodes that are redirected, comma-separated.
    #[arg(long, value_name = "LIST", default_value = "10250,10255")]
    pub redirect_ports: String,
    /// Addresses that are never redirected, comma-separated [default: none; cloud nodes never are].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub exclude: String,
    /// Where the addresses of edge nodes are, comma-separated: only these are redirected [default: anywhere but what is
    /// known to be others']. A kubelet reports its own addresses, so name the edge networks where you can.
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub edge_addresses: String,
    /// The cluster's ranges of Service addresses, comma-separated: never an edge node's [default: none; with Kubernetes 1.33
    /// or later the cluster's ServiceCIDRs are known anyway, and the API server's address never is].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub service_cidrs: String,
    /// Source addresses that may use the redirect, besides this host and its pods, comma-separated [default: none].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub redirect_clients: String,
    /// Addresses that stand for IPv4 addresses of edge nodes inside the redirect: a /8 to /24 that nothing else uses.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE)]
    pub token_range: String,
    /// The same for IPv6, a /64 to /96.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE_V6)]
    pub token_range_v6: String,
    /// Which nodes are edge nodes: a label selector as `kubectl get -l` takes it, or several joined by ||.
    #[arg(long, value_name = "SELECTOR", default_value = DEFAULT_EDGE_SELECTOR)]
    pub edge_selector: String,
    /// refuse or allow agents of nodes that are not in the inventory; it is asked at each attach and renewal.
    #[arg(long, value_name = "refuse|allow", default_value = "refuse")]
    pub unknown_agents: String,
    /// on or off: agents enrol with tokens of `tunnel-server token create` [default: on with --inventory, off in a cluster].
    #[arg(long, value_name = "on|off")]
    pub token_enrollment: Option<String>,
    /// Additional DNS names in the server's certificate, comma-separated [default: none].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true)]
    pub cert_dns_names: String,
    /// Additional IP addresses in the server's certificate, comma-separated [default: none; it has this host's].
    #[arg(long, value_name = "IPS", default_value = "", hide_default_value = true)]
    pub cert_ips: String,
    /// Agent ports of the other servers, comma-separated HOST:PORT; this server's own may be among them [default: none; in a
    /// cluster the Service's EndpointSlices name them]. A server passes connections on to the one that has the node.
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub peers: String,
    /// TCP congestion control of the links for what this server sends: auto (BBR where the kernel has it and permits it, else the
    /// system's), system, or the kernel's name of one.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub congestion_control: String,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", alias = "graceful-shutdown-timeout", default_value = "30s")]
    pub drain_timeout: String,
    /// text or json, one line per event on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: String,
    /// off, error, warn, info, debug, trace, or klog's number.
    #[arg(long, value_name = "LEVEL", alias = "v", short_alias = 'v', default_value = "info")]
    pub log_level: String,
    #[command(flatten)]
    pub reach: ReachArgs,
    #[command(flatten)]
    pub doors: DoorArgs,
    #[command(flatten)]
    pub kube: KubeArgs,
    #[command(flatten)]
    pub egress: EgressArgs,
    #[command(flatten)]
    pub konnectivity: KonnectivityArgs,
    #[command(flatten)]
    pub role: RoleArgs,
    #[command(flatten)]
    pub foreign: ForeignArgs,
}

impl RunArgs {
    /// # Errors
    /// Names the flag, its value and the reason.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let metrics_port = parse_port("--metrics-port", &self.metrics_port)?;
        let (standalone, metrics) = (self.inventory.is_some(), metrics_port.is_some());
        let redirector = self.role.redirector(&self.given, &self.state_dir, standalone, metrics)?;
        let exclude = parse_cidrs("--exclude", &self.exclude)?;
        let token_range = config::token_range(&self.token_range, &exclude)?;
        let token_range_v6 = config::token_range_v6(&self.token_range_v6, &exclude)?;
        let redirect_ports = parse_ports("--redirect-ports", &self.redirect_ports)?;
        let redirect_clients = parse_cidrs("--redirect-clients", &self.redirect_clients)?;
        let orphan_timeout = config::orphan_timeout(&self.orphan_timeout)?;
        let redirect = self.foreign.redirect(&self.redirect)?.then(|| RedirectConfig {
            cgroup: self.redirect_cgroup.clone(),
            token_range,
            token_range_v6,
            clients: redirect_clients.clone(),
            state_dir: Some(self.state_dir.clone()),
            pins: config::bpffs(&self.bpffs).map(|dir| PinConfig { dir, state_dir: self.state_dir.clone() }),
            orphan_timeout,
            ..RedirectConfig::default()
        });
        if redirect.is_some() && redirect_ports.is_empty() {
            let reason = "empty; name the ports to redirect, or switch it off with --redirect=off";
            return Err(ConfigError::new("--redirect-ports", &self.redirect_ports, reason));
        }
        if redirector.is_some() && redirect.is_none() {
            let reason = "a redirector without the redirect does nothing; leave it out";
            return Err(ConfigError::new("--redirect", &self.redirect, reason));
        }
        let peers = config::peers(&self.peers)?;
        if redirector.is_some() && self.inventory.is_some() && peers.is_empty() {
            let reason = "needed with --role=redirector and --inventory: the servers' agent ports";
            return Err(ConfigError::without_value("--peers", reason));
        }
        // A redirector has no doors but the redirect.
        let door = |key: &str, port: &str| match redirector {
            Some(_) => Ok(None),
            None => parse_port(key, port),
        };
        let insecure_port = if redirector.is_some() { "0" } else { &self.insecure_port };
        // Checked with --inventory too: a wrong name is to be found before the flag is needed.
        let options = self.kube.options(self.konnectivity.agent_namespace.is_some())?;
        let source = match &self.inventory {
            Some(path) => NodeSource::File(path.clone()),
            None => NodeSource::Kubernetes(options),
        };
        let token_enrollment = match &self.token_enrollment {
            Some(value) => config::on_or_off("--token-enrollment", value)?,
            None => self.inventory.is_some(),
        };
        let secure_port = door("--secure-port", &self.secure_port)?;
        let connect_port = door("--connect-port", &self.reach.connect_port)?;
        let doors = match redirector {
            Some(_) => DoorConfig { client_ca: self.doors.client_ca_file.clone(), ..DoorConfig::default() },
            None => {
                let kubeconfig = self.kube.kubeconfig.is_some();
                let others = connect_port.is_some() || metrics;
                self.doors.config(standalone, kubeconfig, (secure_port.is_some(), others))?
            }
        };
        let konnectivity = self.konnectivity.config(&self.kube.agent_service_account)?;
        let foreign = self.foreign.ignored(&self.admin_address, &self.insecure_bind_address);
        let ignored = self.konnectivity.ignored(konnectivity.is_some()).into_iter().chain(foreign).collect();
        let config = Config {
            source,
            edge_selector: parse_with::<Selector>("--edge-selector", &self.edge_selector)?
                .keep_labels(self.reach.policy.is_some()),
            state_dir: self.state_dir.clone(),
            bind_address: parse_ip("--bind-address", &self.bind_address)?,
            agent_port: door("--agent-port", &self.agent_port)?,
            secure_port,
            insecure_address: config::insecure_address(
                self.foreign.insecure_bind_address(&self.insecure_bind_address),
                insecure_port,
            )?,
            connect_port,
            policy: self.reach.policy.clone(),
            token_auth_file: self.reach.token_auth_file.clone(),
            maps: self.reach.maps()?,
            maps_file: self.reach.maps.clone(),
            admin_address: parse_loopback_door(
                "--admin-address",
                self.foreign.admin_address(&self.admin_address),
            )?,
            metrics_port,
            doors,
            egress: self.egress.config()?,
            konnectivity,
            redirect,
            redirect_ports,
            redirect_clients,
            exclude,
            edge_addresses: parse_cidrs("--edge-addresses", &self.edge_addresses)?,
            service_cidrs: parse_cidrs("--service-cidrs", &self.service_cidrs)?,
            allow_empty_inventory: config::on_or_off("--allow-empty-inventory", &self.allow_empty_inventory)?,
            edge_pod_routes: config::edge_pod_routes(&self.kube.edge_pod_routes)?,
            node_condition: config::on_or_off("--node-condition", &self.kube.node_condition)?,
            dns_records: self.foreign.dns_records(&self.kube.dns_records)?,
            ignored,
            token_range,
            token_range_v6,
            refuse_unknown: config::refuse_or_allow("--unknown-agents", &self.unknown_agents)?,
            token_enrollment,
            cert_dns_names: config::dns_names(&self.cert_dns_names)?,
            cert_ips: parse_ips("--cert-ips", &self.cert_ips)?,
            peers,
            congestion: Congestion::parse("--congestion-control", &self.congestion_control)?,
            drain_timeout: parse_duration("--drain-timeout", &self.drain_timeout)?,
            log_format: parse_with("--log-format", &self.log_format)?,
            log_level: parse_with("--log-level", &self.log_level)?,
            redirector,
        };
        config.check_ports()?;
        config.check_metrics()?;
        Ok(config)
    }
}

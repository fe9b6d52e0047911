//! The flags as text.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::{ForeignFlag, ForeignFlags, Ignored, Klog};
use tunnel_core::identity::SecretString;

use super::konnectivity_args::KonnectivityArgs;

pub const DEFAULT_STATE_DIR: &str = "/var/lib/postern/agent";
pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10266";

/// Text only; [`RunArgs::to_config`] parses the values, so that every error has the same form.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The tunnel-servers to dial, comma-separated or repeated [default: found through the API server, by --service].
    #[arg(long, value_name = "HOST:PORT[,…]", alias = "tunnelserver-addr")]
    pub server: Vec<String>,
    /// This node's name [default: the host name in lower case].
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// This node's own address, named first to the servers while it is on an interface [default: from the route to the
    /// server].
    #[arg(long, value_name = "IP", env = "NODE_IP")]
    pub node_ip: Option<String>,
    /// Token of `tunnel-server token create`; for the first enrolment only.
    #[arg(long, value_name = "TOKEN")]
    pub token: Option<SecretString>,
    /// File with the token; it may be removed once the agent has enrolled.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Hash of the server's CA, as `tunnel-server token create` prints it; for the first enrolment only.
    #[arg(long, value_name = "sha256:HEX")]
    pub ca_hash: Option<String>,
    /// HTTP proxy on the way to the servers, or `none` [default: HTTPS_PROXY or ALL_PROXY of the environment]. Servers in
    /// NO_PROXY are dialled directly, and so is the API server. The password stays out of logs and /status, but is seen
    /// by others in the command line: the environment is the better place for it.
    #[arg(long, value_name = "http://[USER:PASSWORD@]HOST[:PORT]")]
    pub proxy: Option<SecretString>,
    /// Kubeconfig of the API server through which this agent enrols and finds the servers, for example the kubelet's
    /// [default: as a pod; elsewhere, and as a pod with --server and a token, no API server is used].
    #[arg(long, value_name = "FILE", alias = "kube-config")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Service [default: the pod's namespace, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// The Service that leads to the servers [default: x-tunnel-server-svc].
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
    /// Where the key and the certificate are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Where /metrics, /healthz, /readyz and /status answer: a loopback address and a port, or only a port; port 0 turns
    /// them off.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "health-server-port"],
          env = "POSTERN_ADMIN_ADDRESS", default_value = DEFAULT_ADMIN_ADDRESS)]
    pub admin_address: String,
    /// What the servers may reach through this agent, as CIDR:PORTS or node:PORTS, PORTS being ports and ranges such as
    /// 22,8000-8099 or *; repeatable [default: this node's own addresses on any port, and with --pod-targets=on its pods]. Loopback is closed unless a
    /// CIDR within it is given here or, with the default, the server names the port when a session begins.
    #[arg(long, value_name = "CIDR:PORTS")]
    pub allow_target: Vec<String>,
    /// on or off: let the servers also reach this node's pods, for their --edge-pod-routes. Their ranges are read from this Node,
    /// which takes the right to get Nodes; not with --allow-target, which names them itself.
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub pod_targets: String,
    /// Where workloads on this node find an HTTP proxy (CONNECT and http:// URLs) to what the server's --policy lets this node reach
    /// in the cloud and on other edge nodes; port 0: off.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub connect_address: String,
    /// Source addresses that may use --connect-address, comma-separated [default: this host]. Whoever may acts as this node.
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub connect_clients: String,
    /// LISTEN=HOST:PORT[,CIDR…]: a listener that leads to HOST:PORT in the cloud or on another edge node, as far as the server's
    /// --policy permits, for clients in these ranges (needed unless LISTEN is a loopback address). May be given several times.
    #[arg(long, value_name = "MAP")]
    pub map: Vec<String>,
    /// on or off: let the servers measure the way to this agent (`tunnel-server bench`), one at a time and at most 2 s of
    /// sending each.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub bench: String,
    /// How many of the servers to be attached to, or all: connections for this node that come to another server are passed
    /// on by one of these. Agents choose by a hash of the node's name and the server's address, so that a fleet spreads
    /// evenly; another server takes the place of one that does not answer. With one address in front of several servers
    /// there is nothing to choose.
    #[arg(long, value_name = "N|all", default_value = "all")]
    pub links: String,
    /// TCP connections with each server, 1 to 8, or auto: 2 where both ends send by BBR, else 8. With more than one, a busy
    /// node's bulk transfers do not delay its other connections; they are opened when the server needs them, and closed when it
    /// does not. Other congestion controls slow a connection down at each loss, so that several carry more.
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub max_links: String,
    /// How long a connection with a server may be silent before the kernel asks whether it is alive, from 1s to 5m: a NAT
    /// that has forgotten it is noticed that soon. 2s cost 4.5 MB a day.
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    pub keepalive: String,
    /// TCP congestion control of the links for what this agent sends: auto (BBR where the kernel has it and permits it, else the
    /// system's), system, or the kernel's name of one.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub congestion_control: String,
    /// How long connections may take to finish after SIGTERM, with its unit (ms, s, m, h).
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    pub drain_timeout: String,
    /// What to do once another agent with the same state directory has taken over from this one: exit, or wait to be stopped,
    /// for whoever would start it again [default: wait as a pod, else exit].
    #[arg(long, value_name = "exit|wait")]
    pub when_replaced: Option<String>,
    /// text or json, one line per event on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: String,
    /// off, error, warn, info, debug, trace, or klog's number.
    #[arg(long, value_name = "LEVEL", alias = "v", short_alias = 'v', default_value = "info")]
    pub log_level: String,
    #[command(flatten)]
    pub konnectivity: KonnectivityArgs,
    #[command(flatten)]
    pub ignored: Ignored<Others>,
    #[command(flatten)]
    pub klog: Ignored<Klog>,
}

/// YurtTunnel's and SuperEdge's flags that have no meaning here: their manifests work as they are. YurtTunnel's
/// `--agent-identifiers` is konnectivity's.
#[derive(Clone, Copy, Debug)]
pub struct Others;

impl ForeignFlags for Others {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::value("--apiserver-addr", "the kubeconfig names the API server"),
        ForeignFlag::value("--meta-host", "the admin endpoints are on --admin-address"),
        ForeignFlag::value("-m", "this program is the edge's; the cloud's is tunnel-server"),
        ForeignFlag::value("-c", "flags say everything"),
    ];
}

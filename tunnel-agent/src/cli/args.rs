//! The flags as text.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::identity::SecretString;

pub const DEFAULT_STATE_DIR: &str = "/var/lib/postern/agent";
pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10266";

/// Text only; [`RunArgs::to_config`] parses the values, so that every error has the same form.
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
    /// [default: as a pod; with --server and without this flag, no API server is used].
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
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-server-port", "health-server-port"],
          default_value = DEFAULT_ADMIN_ADDRESS)]
    pub admin_address: String,
    /// What the servers may reach through this agent, as CIDR:PORTS or node:PORTS, PORTS being ports and ranges such as
    /// 22,8000-8099 or *; repeatable [default: this node's own addresses on any port]. Loopback is closed unless a
    /// CIDR within it is given here or, with the default, the server names the port when a session begins.
    #[arg(long, value_name = "CIDR:PORTS")]
    pub allow_target: Vec<String>,
    /// TCP connections with each server, 1 to 8. With more than one, a busy node's bulk transfers do not delay its other
    /// connections; they are opened when the server needs them, and closed when it does not.
    #[arg(long, value_name = "N", default_value = "8")]
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

//! The server's command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::cli::cleanup::CleanupCommand;
use crate::cli::status::StatusCommand;
use crate::config::kube::KubeArgs;
use crate::inventory::DEFAULT_EDGE_SELECTOR;
use crate::pki::DEFAULT_STATE_DIR;
use crate::pki::cli::{CaCommand, TokenCommand};

/// Where the admin endpoints are by default.
pub const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:10265";
/// RFC 2544's benchmarking range: never routed on the Internet.
pub const DEFAULT_TOKEN_RANGE: &str = "198.18.0.0/15";
/// A unique local range (RFC 4193); the letters spell "poster".
pub const DEFAULT_TOKEN_RANGE_V6: &str = "fd9e:706f:7374:6572::/64";

/// Lets cloud components reach edge nodes that only dial out.
#[derive(Debug, Parser)]
#[command(name = "tunnel-server", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// What else than running it can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the running server's nodes, tunnels, doors, redirect and inventory.
    Status(StatusCommand),
    /// Remove the token routes that a killed server left behind.
    Cleanup(CleanupCommand),
    /// Make, list and revoke the tokens by which agents enrol.
    Token(TokenCommand),
    /// Show and rotate the CA.
    Ca(CaCommand),
}

/// The flags as text: [`Config::new`](super::Config::new) makes values of them, so that every error has the same form.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Without Kubernetes: the nodes, a NodeList as `kubectl get nodes -o yaml` prints it; read again whenever it changes.
    #[arg(long, value_name = "FILE")]
    pub inventory: Option<PathBuf>,
    /// Where the CA, keys, tokens and certificates are kept.
    #[arg(long, value_name = "DIR", alias = "cert-dir", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Address of --agent-port and --secure-port; an IPv6 literal such as :: switches the family.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub bind_address: String,
    /// Port that the agents dial; 0: off.
    #[arg(long, value_name = "PORT", alias = "tunnel-agent-connect-port", default_value = "10262")]
    pub agent_port: String,
    /// Port of the https door, where TLS names the node by SNI; 0: off.
    #[arg(long, value_name = "PORT", default_value = "10263")]
    pub secure_port: String,
    /// Address of --insecure-port; only a loopback address.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub insecure_bind_address: String,
    /// Port of the http door, where a request's Host names the node; 0: off.
    #[arg(long, value_name = "PORT", default_value = "10264")]
    pub insecure_port: String,
    /// Where /metrics, /healthz, /readyz and /status answer: a loopback address and a port, or a port; port 0: nowhere.
    #[arg(long, value_name = "ADDRESS:PORT", aliases = ["meta-port", "admin-port", "health-port"],
          default_value = DEFAULT_ADMIN_ADDRESS)]
    pub admin_address: String,
    /// on or off: redirect connections of this host and its pods to edge nodes by eBPF. On and impossible is an error.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub redirect: String,
    /// Only processes in this cgroup v2 directory are redirected [default: the host's cgroup v2 root].
    #[arg(long, value_name = "DIR")]
    pub redirect_cgroup: Option<PathBuf>,
    /// TCP ports of edge nodes that are redirected, comma-separated.
    #[arg(long, value_name = "LIST", default_value = "10250,10255")]
    pub redirect_ports: String,
    /// Addresses that are never redirected, comma-separated [default: none; cloud nodes never are].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub exclude: String,
    /// Sources that may use the redirect besides this host and its pods, comma-separated [default: none].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub redirect_clients: String,
    /// Addresses that stand for IPv4 edge addresses inside the redirect, a /8 to /24 that is used for nothing else.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE)]
    pub token_range: String,
    /// The same for IPv6, a /64 to /96.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_TOKEN_RANGE_V6)]
    pub token_range_v6: String,
    /// Which nodes are edge nodes: a label selector as `kubectl get -l` takes it, or several with || between them.
    #[arg(long, value_name = "SELECTOR", default_value = DEFAULT_EDGE_SELECTOR)]
    pub edge_selector: String,
    /// Further DNS names in the server's certificate, comma-separated [default: none].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true)]
    pub cert_dns_names: String,
    /// Further IP addresses in the server's certificate, comma-separated [default: none; this host's are in it].
    #[arg(long, value_name = "IPS", default_value = "", hide_default_value = true)]
    pub cert_ips: String,
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
    pub kube: KubeArgs,
}

//! konnectivity's flags as text.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::{ForeignFlag, ForeignFlags, Ignored};

#[derive(Args, Clone, Debug, Default)]
pub struct KonnectivityArgs {
    /// Attach to konnectivity's proxy-server at this address instead of tunnel-servers, for every server that it says there are. What is
    /// dialled is decided by --allow-target; nothing is enrolled.
    #[arg(long, value_name = "HOST:PORT")]
    pub konnectivity_server: Option<String>,
    /// The CA of the proxy-server's certificate, which names HOST.
    #[arg(long, value_name = "FILE", alias = "ca-cert")]
    pub konnectivity_ca: Option<PathBuf>,
    /// Client certificate to show it.
    #[arg(long, value_name = "FILE", alias = "agent-cert")]
    pub konnectivity_cert: Option<PathBuf>,
    /// Key of the client certificate.
    #[arg(long, value_name = "FILE", alias = "agent-key")]
    pub konnectivity_key: Option<PathBuf>,
    /// Token of a service account to show it, read at each attempt.
    #[arg(long, value_name = "FILE", alias = "service-account-token-path")]
    pub konnectivity_token_file: Option<PathBuf>,
    /// What the proxy-server calls this agent [default: the node's name].
    #[arg(long, value_name = "ID", alias = "agent-id", env = "PROXY_AGENT_ID")]
    pub konnectivity_agent_id: Option<String>,
    /// What the proxy-server chooses this agent by, such as host=edge-1&ipv4=10.8.0.7&default-route=true [default: the node's name
    /// and addresses].
    #[arg(long, value_name = "QUERY", alias = "agent-identifiers")]
    pub konnectivity_identifiers: Option<String>,
    /// Names to offer in TLS (ALPN) before h2, comma-separated or repeated.
    #[arg(long, value_name = "NAME[,…]", alias = "alpn-proto")]
    pub konnectivity_alpn: Vec<String>,
    /// How long to wait before the next attempt to find one more proxy-server.
    #[arg(long, value_name = "DURATION", alias = "sync-interval", default_value = "1s")]
    pub konnectivity_sync_interval: String,
    /// What that grows to while attempts fail.
    #[arg(long, value_name = "DURATION", alias = "sync-interval-cap", default_value = "10s")]
    pub konnectivity_sync_interval_cap: String,
    #[arg(long, hide = true, conflicts_with = "konnectivity_server")]
    pub proxy_server_host: Option<String>,
    #[arg(long, hide = true, conflicts_with = "konnectivity_server")]
    pub proxy_server_port: Option<String>,
    #[command(flatten)]
    pub ignored: Ignored<Konnectivity>,
}

impl KonnectivityArgs {
    /// Whether the servers are konnectivity's.
    pub(super) fn names_a_server(&self) -> bool {
        self.konnectivity_server.is_some() || self.proxy_server_host.is_some()
    }
}

/// The flags of konnectivity's agent that have no meaning here: its manifests work as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Konnectivity;

impl ForeignFlags for Konnectivity {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::value("--admin-server-port", ADMIN),
        ForeignFlag::value("--health-server-host", ADMIN),
        ForeignFlag::value("--admin-bind-address", ADMIN),
        ForeignFlag::switch("--enable-profiling", PROFILES),
        ForeignFlag::switch("--enable-contention-profiling", PROFILES),
        ForeignFlag::value("--probe-interval", "a lost connection is noticed by itself"),
        ForeignFlag::value("--keepalive-time", "TCP asks after 10 s, and HTTP/2 each minute"),
        ForeignFlag::switch("--warn-on-channel-limit", "a target that stalls is cut off"),
        ForeignFlag::switch("--sync-forever", "more servers are looked for each minute"),
        ForeignFlag::value("--xfr-channel-size", "what waits is bounded in bytes"),
        ForeignFlag::switch("--count-server-leases", LEASES),
        ForeignFlag::value("--lease-namespace", LEASES),
        ForeignFlag::value("--lease-label", LEASES),
        ForeignFlag::value("--lease-label-selector", LEASES),
        ForeignFlag::value("--server-count-source", LEASES),
        ForeignFlag::value("--kube-api-content-type", LEASES),
    ];
}

const ADMIN: &str = "the admin endpoints are on --admin-address";
const PROFILES: &str = "there are no profiles";
pub(super) const LEASES: &str = "servers say how many they are";

//! konnectivity's flags as text.

use std::path::PathBuf;

use clap::Args;

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
    pub ignored: IgnoredKonnectivityArgs,
}

impl KonnectivityArgs {
    /// Whether the servers are konnectivity's.
    pub(super) fn names_a_server(&self) -> bool {
        self.konnectivity_server.is_some() || self.proxy_server_host.is_some()
    }
}

/// The flags of konnectivity's agent that have no meaning here: its manifests work as they are.
#[derive(Args, Clone, Debug, Default)]
pub struct IgnoredKonnectivityArgs {
    #[arg(long, hide = true)]
    pub health_server_host: Option<String>,
    #[arg(long, hide = true)]
    pub admin_bind_address: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_profiling: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_contention_profiling: Option<String>,
    #[arg(long, hide = true)]
    pub probe_interval: Option<String>,
    #[arg(long, hide = true)]
    pub keepalive_time: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub warn_on_channel_limit: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub sync_forever: Option<String>,
    #[arg(long, hide = true)]
    pub xfr_channel_size: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub count_server_leases: Option<String>,
    #[arg(long, hide = true)]
    pub lease_namespace: Option<String>,
    #[arg(long, hide = true, alias = "lease-label-selector")]
    pub lease_label: Option<String>,
    #[arg(long, hide = true)]
    pub server_count_source: Option<String>,
    #[arg(long, hide = true)]
    pub kube_api_content_type: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub logtostderr: Option<String>,
}

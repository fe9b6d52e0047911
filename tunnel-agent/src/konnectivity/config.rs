//! How to attach to konnectivity's servers.

use std::path::PathBuf;
use std::time::Duration;

use tunnel_core::config::HostPort;

/// How to attach to konnectivity's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KonnectivityConfig {
    /// Leads to all of them.
    pub server: HostPort,
    pub ca: PathBuf,
    /// Certificate and key.
    pub client: Option<(PathBuf, PathBuf)>,
    pub token_file: Option<PathBuf>,
    pub agent_id: String,
    /// None: the node's name and addresses.
    pub identifiers: Option<String>,
    /// Offered before `h2`.
    pub alpn: Vec<String>,
    /// Between attempts to find one more server, at first.
    pub sync_interval: Duration,
    /// The same, at most.
    pub sync_interval_cap: Duration,
}

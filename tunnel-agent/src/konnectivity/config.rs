//! Settings for konnectivity's servers.

use std::path::PathBuf;
use std::time::Duration;

use tunnel_core::config::HostPort;

/// Settings for konnectivity's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KonnectivityConfig {
    /// Address that leads to all servers.
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
    /// Initial interval of attempts to find one more server.
    pub sync_interval: Duration,
    /// Maximum interval of such attempts.
    pub sync_interval_cap: Duration,
}

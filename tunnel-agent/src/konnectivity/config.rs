//! How to attach to konnectivity's servers.

use std::path::PathBuf;
use std::time::Duration;

use tunnel_core::config::{HostPort, duration_text};

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

impl KonnectivityConfig {
    /// The flags that give this, without dashes.
    pub(crate) fn flags(&self) -> Vec<(&'static str, String)> {
        let path = |path: &PathBuf| path.display().to_string();
        let mut flags = vec![
            ("konnectivity-server", self.server.to_string()),
            ("konnectivity-ca", path(&self.ca)),
            ("konnectivity-agent-id", self.agent_id.clone()),
            ("konnectivity-sync-interval", duration_text(self.sync_interval)),
            ("konnectivity-sync-interval-cap", duration_text(self.sync_interval_cap)),
        ];
        if let Some((certificate, key)) = &self.client {
            flags.push(("konnectivity-cert", path(certificate)));
            flags.push(("konnectivity-key", path(key)));
        }
        flags.extend(self.token_file.as_ref().map(|file| ("konnectivity-token-file", path(file))));
        flags.extend(self.identifiers.clone().map(|given| ("konnectivity-identifiers", given)));
        flags.extend(self.alpn.iter().map(|name| ("konnectivity-alpn", name.clone())));
        flags
    }
}

//! The part of `/status` about konnectivity's servers.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use tunnel_runtime::text::{age, harmless};

/// The servers, which are reached through one address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KonnectivityStatus {
    /// `HOST:PORT`.
    pub server: String,
    pub agent_id: String,
    pub identifiers: String,
    /// Number of servers, as reported by one of them.
    pub server_count: Option<usize>,
    pub attached: Vec<KonnectivityServer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Seconds since the last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_s: Option<u64>,
}

/// A server that this agent is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KonnectivityServer {
    pub server_id: String,
    pub attached_for_s: u64,
    /// Includes pending dials.
    pub connections: usize,
    /// True if it was asked to send nothing new.
    pub draining: bool,
}

impl KonnectivityStatus {
    pub(crate) fn to_text(&self) -> String {
        let count = self.server_count.map_or_else(|| "?".to_owned(), |count| count.to_string());
        let attached = self.attached.iter().filter(|server| !server.draining).count();
        let mut text = format!(
            "konnectivity servers at {}: {attached} of {count} attached, as agent {} ({})\n",
            self.server,
            harmless(&self.agent_id),
            harmless(&self.identifiers)
        );
        for server in &self.attached {
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "server {}: attached for {}, {} connections{}",
                harmless(&server.server_id),
                age(server.attached_for_s),
                server.connections,
                if server.draining { ", draining" } else { "" }
            );
        }
        if let Some(error) = &self.last_error {
            let ago = self.last_error_s.map(|ago| format!(" {} ago", age(ago))).unwrap_or_default();
            let _ = writeln!(text, "last error{ago}: {}", harmless(error));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_every_server_and_escapes_what_servers_send() {
        let server = |server_id: &str, draining| KonnectivityServer {
            server_id: server_id.to_owned(),
            attached_for_s: 61,
            connections: 3,
            draining,
        };
        let status = KonnectivityStatus {
            server: "cloud.example.org:8091".to_owned(),
            agent_id: "edge-1".to_owned(),
            identifiers: "host=edge-1".to_owned(),
            server_count: Some(3),
            attached: vec![server("one", false), server("\u{1b}[2J\n", true)],
            last_error: Some("connection refused".to_owned()),
            last_error_s: Some(5),
        };
        let text = status.to_text();
        for line in [
            "konnectivity servers at cloud.example.org:8091: 1 of 3 attached, as agent edge-1 (host=edge-1)\n",
            "server one: attached for 1m1s, 3 connections\n",
            ", draining\n",
            "last error 5s ago: connection refused\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(
            !text.contains(|c: char| c.is_control() && c != '\n') && text.lines().count() == 4,
            "{text:?}"
        );
    }
}

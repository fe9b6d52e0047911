//! The answer of `/status`, as data and as text, and its source in a running agent.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_link::link::limited_by;
use tunnel_pki::AgentIdentity;
use tunnel_runtime::NodeName;
use tunnel_runtime::admin::{Status, to_json};
use tunnel_runtime::text::{age, harmless};

use crate::konnectivity::KonnectivityStatus;
use crate::runtime::Runtime;
use crate::servers::Servers;
use crate::session::{LinkPhase, LinkStatus, Running};

/// Part of the default policy, for tunnel-servers only.
const LOOPBACK: &str = "loopback on ports that the server names";

/// The answer of `/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub version: String,
    pub node: NodeName,
    pub uptime_s: u64,
    pub servers: Vec<LinkStatus>,
    /// None before the enrolment.
    pub certificate: Option<CertificateStatus>,
    /// Number of connections relayed now, on all links.
    pub connections: u64,
    /// Targets that the servers may reach.
    pub policy: Vec<String>,
    /// Reason why the servers cannot be looked up now. The last known ones are used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_server_error: Option<String>,
    /// Replaces servers and certificate if the servers are konnectivity's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub konnectivity: Option<KonnectivityStatus>,
}

/// Times in seconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateStatus {
    pub not_after: u64,
    pub renews_at: u64,
}

impl AgentStatus {
    pub(crate) fn new(
        runtime: &Runtime,
        servers: Vec<LinkStatus>,
        certificate: Option<CertificateStatus>,
    ) -> Self {
        let rules = &runtime.config.given.targets.allow;
        let policy = if rules.is_empty() {
            let pods = runtime.pods.load();
            let pods = pods.iter().map(|range| format!("pods in {range}"));
            let node = std::iter::once("node:*".to_owned());
            // konnectivity's servers name no ports.
            let loopback = runtime.config.konnectivity.is_none().then(|| LOOPBACK.to_owned());
            node.chain(pods).chain(loopback).collect()
        } else {
            rules.iter().map(ToString::to_string).collect()
        };
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: runtime.config.node_name.clone(),
            uptime_s: runtime.started.elapsed().as_secs(),
            connections: servers.iter().map(|link| u64::from(link.connections)).sum(),
            servers,
            certificate,
            policy,
            api_server_error: None,
            konnectivity: None,
        }
    }

    /// Adds the state of konnectivity's servers.
    #[must_use]
    pub fn at_konnectivity(self, konnectivity: KonnectivityStatus) -> Self {
        let connections = konnectivity.attached.iter().map(|server| server.connections as u64).sum();
        Self { connections, konnectivity: Some(konnectivity), ..self }
    }

    pub fn to_text(&self, now: SystemTime) -> String {
        let mut text = format!("tunnel-agent {} on {}, up {}\n", self.version, self.node, age(self.uptime_s));
        let now = seconds(now);
        match &self.certificate {
            Some(certificate) if certificate.not_after <= now => text += "certificate: EXPIRED\n",
            Some(certificate) => {
                let expires = age(certificate.not_after - now);
                let renews = certificate.renews_at.checked_sub(now).map_or_else(|| "due".to_owned(), age);
                // Writing to a String does not fail.
                let _ = writeln!(text, "certificate: expires in {expires}, renewal in {renews}");
            }
            None if self.konnectivity.is_some() => {}
            None => text += "certificate: none yet, enrolling\n",
        }
        let _ = writeln!(text, "may be reached: {}", self.policy.join(", "));
        let _ = writeln!(text, "connections: {}", self.connections);
        if let Some(error) = &self.api_server_error {
            let _ = writeln!(text, "API server: {}; the last known servers are used", harmless(error));
        }
        if let Some(konnectivity) = &self.konnectivity {
            text += &konnectivity.to_text();
        }
        for link in &self.servers {
            let state = match link.phase {
                LinkPhase::Attached => format!(
                    "attached to {} for {}, session {}, {} links, {} connections{}{}",
                    harmless(link.server_id.as_deref().unwrap_or("?")),
                    age(link.attached_for_s.unwrap_or_default()),
                    link.epoch,
                    link.links,
                    link.connections,
                    link.rtt_ms.map(|rtt| format!(", RTT {rtt:.1} ms")).unwrap_or_default(),
                    limited(link).map(|by| format!(", limited by {by}")).unwrap_or_default()
                ),
                LinkPhase::Connecting => "connecting".to_owned(),
                LinkPhase::Waiting => "waiting before the next attempt".to_owned(),
            };
            let ago = link.last_error_s.map(|ago| format!(" {} ago", age(ago))).unwrap_or_default();
            let error = link.last_error.as_deref();
            let error =
                error.map(|error| format!(" (last end{ago}: {})", harmless(error))).unwrap_or_default();
            let _ = writeln!(text, "server {}: {state}{error}", link.address);
        }
        text
    }
}

impl CertificateStatus {
    pub fn of(identity: &AgentIdentity) -> Self {
        Self {
            not_after: seconds(identity.validity.not_after),
            renews_at: seconds(identity.validity.renew_at()),
        }
    }
}

fn limited(link: &LinkStatus) -> Option<String> {
    limited_by(link.window_limited?, link.buffer_limited?)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Answers `/status`. `running` is filled in once the agent has its identity.
pub(crate) fn endpoint(
    runtime: Runtime,
    servers: Arc<Servers>,
    running: Arc<OnceLock<Running>>,
) -> Arc<Status> {
    Arc::new(move || {
        let running = running.get();
        let certificate = running.map(|running| CertificateStatus::of(&running.keeper.current()));
        let links = running.map(|running| running.links.status()).unwrap_or_default();
        let mut status = AgentStatus::new(&runtime, links, certificate);
        status.api_server_error = servers.trouble();
        to_json(&status)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::of_flags;
    use std::time::Duration;

    fn link(phase: LinkPhase) -> LinkStatus {
        LinkStatus {
            address: "tunnel.example.org:10262".to_owned(),
            phase,
            server_id: Some("cloud-1".to_owned()),
            attached_for_s: Some(3700),
            epoch: 7,
            rtt_ms: Some(12.34),
            links: 2,
            connections: 3,
            delivery_rate: Some(1_000_000),
            retransmits: Some(2),
            window_limited: Some(0.456),
            buffer_limited: Some(0.0),
            last_error: Some("connection refused".to_owned()),
            last_error_s: Some(90),
        }
    }

    #[test]
    fn text_names_every_link_and_escapes_what_servers_send() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let certificate = CertificateStatus { not_after: 1_000_000 + 90_000, renews_at: 1_000_000 + 61 };
        let runtime = of_flags(&["--server=a:1", "--allow-target=node:22"]);
        let links = vec![link(LinkPhase::Attached), link(LinkPhase::Waiting)];
        let status = AgentStatus::new(&runtime, links, Some(certificate));
        let text = status.to_text(now);
        for line in [
            "certificate: expires in 1d1h, renewal in 1m1s\n",
            "may be reached: node:22\n",
            "connections: 6\n",
            "server tunnel.example.org:10262: attached to cloud-1 for 1h1m, session 7, 2 links, 3 connections, RTT 12.3 ms, limited by window 46 % (last end 1m30s ago: connection refused)\n",
            "server tunnel.example.org:10262: waiting before the next attempt (last end 1m30s ago: connection refused)\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(status.to_text(now + Duration::from_secs(90_000)).contains("certificate: EXPIRED\n"));
        let runtime = of_flags(&["--server=a:1"]);
        runtime.pods.store(Arc::new(vec!["10.244.1.0/24".parse().unwrap()]));
        let mut own = AgentStatus::new(&runtime, Vec::new(), None);
        own.api_server_error = Some("connection refused".to_owned());
        let own = own.to_text(now);
        assert!(own.contains("may be reached: node:*, pods in 10.244.1.0/24, loopback on"), "{own}");
        assert!(own.contains("API server: connection refused; the last known servers are used\n"), "{own}");
        let mut hostile = status.clone();
        hostile.servers[0].server_id = Some("\u{1b}[2J\n".to_owned());
        hostile.servers[1].last_error = Some("\u{9b}2J\r".to_owned());
        let hostile = hostile.to_text(now);
        assert!(!hostile.contains(|c: char| c.is_control() && c != '\n'), "{hostile:?}");
        assert_eq!(hostile.lines().count(), text.lines().count(), "{hostile:?}");
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<AgentStatus>(&json).unwrap(), status);
    }
}

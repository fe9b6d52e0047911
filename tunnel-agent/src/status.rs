//! What the agent says of itself, and `tunnel-agent status`, which shows it.

use std::fmt::Write as _;
use std::time::SystemTime;

use clap::Args;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tunnel_core::admin::Show;
use tunnel_core::config::{TargetRule, parse_loopback_door};
use tunnel_core::identity::{AgentIdentity, NodeName};
use tunnel_core::text::harmless;

use crate::config::DEFAULT_ADMIN_ADDRESS;
use crate::session::{LinkStatus, Phase};

/// The answer of `/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub version: String,
    pub node: NodeName,
    pub uptime_s: u64,
    pub servers: Vec<LinkStatus>,
    /// None before the enrolment.
    pub certificate: Option<CertificateStatus>,
    /// Connections carried now, over all servers.
    pub connections: u64,
    /// What the servers may reach.
    pub policy: Vec<String>,
    /// Why the servers cannot be looked up at present; the last known ones are used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_server_error: Option<String>,
}

/// Times in seconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateStatus {
    pub not_after: u64,
    pub renews_at: u64,
}

impl AgentStatus {
    /// `rules` as given by `--allow-target`; `pods` count only without them.
    pub fn new(
        node: &NodeName,
        started: SystemTime,
        servers: Vec<LinkStatus>,
        certificate: Option<CertificateStatus>,
        rules: &[TargetRule],
        pods: &[IpNet],
    ) -> Self {
        let policy = if rules.is_empty() {
            let pods = pods.iter().map(|range| format!("pods in {range}"));
            let node = std::iter::once("node:*".to_owned());
            node.chain(pods).chain(["loopback on ports that the server names".to_owned()]).collect()
        } else {
            rules.iter().map(ToString::to_string).collect()
        };
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: node.clone(),
            uptime_s: started.elapsed().unwrap_or_default().as_secs(),
            connections: servers.iter().map(|link| u64::from(link.connections)).sum(),
            servers,
            certificate,
            policy,
            api_server_error: None,
        }
    }

    /// For people.
    pub fn to_text(&self, now: SystemTime) -> String {
        let mut text = format!("tunnel-agent {} on {}, up {}\n", self.version, self.node, age(self.uptime_s));
        let now = seconds(now);
        match &self.certificate {
            Some(certificate) if certificate.not_after <= now => text += "certificate: EXPIRED\n",
            Some(certificate) => {
                let ends = age(certificate.not_after - now);
                let renews = certificate.renews_at.checked_sub(now).map_or_else(|| "due".to_owned(), age);
                // Writing to a String does not fail.
                let _ = writeln!(text, "certificate: ends in {ends}, renewal in {renews}");
            }
            None => text += "certificate: none yet, enrolling\n",
        }
        let _ = writeln!(text, "may be reached: {}", self.policy.join(", "));
        let _ = writeln!(text, "connections: {}", self.connections);
        if let Some(error) = &self.api_server_error {
            let _ = writeln!(text, "API server: {}; the last known servers are used", harmless(error));
        }
        for link in &self.servers {
            let state = match link.phase {
                Phase::Attached => format!(
                    "attached to {} for {}, session {}, {} connections{}",
                    harmless(link.server_id.as_deref().unwrap_or("?")),
                    age(link.attached_for_s.unwrap_or_default()),
                    link.epoch,
                    link.connections,
                    link.rtt_ms.map(|rtt| format!(", RTT {rtt:.1} ms")).unwrap_or_default()
                ),
                Phase::Connecting => "connecting".to_owned(),
                Phase::Waiting => "waiting before the next attempt".to_owned(),
            };
            let error = link.last_error.as_deref().filter(|_| link.phase != Phase::Attached);
            let error = error.map(|error| format!(" (last error: {})", harmless(error))).unwrap_or_default();
            let _ = writeln!(text, "server {}: {state}{error}", link.address);
        }
        text
    }
}

impl CertificateStatus {
    pub fn of(identity: &AgentIdentity) -> Self {
        Self { not_after: seconds(identity.not_after()), renews_at: seconds(identity.renew_at()) }
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Whole seconds as the two largest units.
fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// `tunnel-agent status`.
#[derive(Args, Clone, Debug)]
pub struct StatusCommand {
    #[command(flatten)]
    show: Show,
    /// The running agent's --admin-address.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = DEFAULT_ADMIN_ADDRESS)]
    admin_address: String,
}

impl StatusCommand {
    /// Prints until done, or until Ctrl-C with `--watch`.
    ///
    /// # Errors
    /// A bad `--admin-address`; without `--watch`, also no answer there.
    pub async fn run(&self) -> anyhow::Result<()> {
        let Some(address) = parse_loopback_door("--admin-address", &self.admin_address)? else {
            anyhow::bail!(
                "--admin-address={}: port 0 means that the agent has no admin endpoints",
                self.admin_address
            );
        };
        let to_text = |status: AgentStatus| status.to_text(SystemTime::now());
        Ok(self.show.run("tunnel-agent", address, to_text).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn link(phase: Phase) -> LinkStatus {
        LinkStatus {
            address: "tunnel.example.org:10262".to_owned(),
            phase,
            server_id: Some("cloud-1".to_owned()),
            attached_for_s: Some(3700),
            epoch: 7,
            rtt_ms: Some(12.34),
            connections: 3,
            last_error: Some("connection refused".to_owned()),
        }
    }

    #[test]
    fn text_shows_what_matters() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let certificate = CertificateStatus { not_after: 1_000_000 + 90_000, renews_at: 1_000_000 + 61 };
        let rules = ["node:22".parse().unwrap()];
        let links = vec![link(Phase::Attached), link(Phase::Waiting)];
        let status = AgentStatus::new(
            &"edge-1".parse().unwrap(),
            SystemTime::now(),
            links,
            Some(certificate),
            &rules,
            &[],
        );
        let text = status.to_text(now);
        for line in [
            "certificate: ends in 1d1h, renewal in 1m1s\n",
            "may be reached: node:22\n",
            "connections: 6\n",
            "server tunnel.example.org:10262: attached to cloud-1 for 1h1m, session 7, 3 connections, RTT 12.3 ms\n",
            "server tunnel.example.org:10262: waiting before the next attempt (last error: connection refused)\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(status.to_text(now + Duration::from_secs(90_000)).contains("certificate: EXPIRED\n"));
        let pods = ["10.244.1.0/24".parse().unwrap()];
        let mut own = AgentStatus::new(&status.node, SystemTime::now(), Vec::new(), None, &[], &pods);
        own.api_server_error = Some("connection refused".to_owned());
        let own = own.to_text(now);
        assert!(own.contains("may be reached: node:*, pods in 10.244.1.0/24, loopback on"), "{own}");
        assert!(own.contains("API server: connection refused; the last known servers are used\n"), "{own}");
        let mut evil = status.clone();
        evil.servers[0].server_id = Some("\u{1b}[2J\n".to_owned());
        evil.servers[1].last_error = Some("\u{9b}2J\r".to_owned());
        let evil = evil.to_text(now);
        assert!(!evil.contains(|c: char| c.is_control() && c != '\n'), "{evil:?}");
        assert_eq!(evil.lines().count(), text.lines().count(), "{evil:?}");
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<AgentStatus>(&json).unwrap(), status);
    }
}

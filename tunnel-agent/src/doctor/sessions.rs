//! Checks the running agent's sessions.

use tunnel_doctor::{Finding, Outcome, codes};
use tunnel_runtime::text::age;

use crate::session::LinkPhase;
use crate::status::AgentStatus;

/// Texts with which [`crate::session`] begins the error of a session that a server refuses.
const REFUSED: [&str; 3] = [
    "the server refused this session",
    "the server takes no session under this certificate",
    "a newer session of this node took over",
];

/// Part of its error for links that a proxy cuts again and again.
const CUT: &str = "closes links that are idle";
/// Seconds for which that error counts as current. A link in use is not cut.
const CUT_LATELY: u64 = 600;

pub(super) fn judge(status: &AgentStatus) -> Outcome {
    let mut faults = Vec::new();
    for link in &status.servers {
        let Some(error) = link.last_error.as_deref() else { continue };
        if error.contains(CUT) && link.last_error_s.is_some_and(|seconds| seconds < CUT_LATELY) {
            // The link comes back by itself until the next cut.
            let found = format!("{}: {error}", link.address);
            let fix = "raise the proxy's timeout for tunnels without traffic to a minute or more (`Timeout` of tinyproxy, \
                       `read_timeout` of squid)";
            faults.push(Finding::new(&codes::PROXY_CUTS_IDLE, found, fix));
        } else if link.phase != LinkPhase::Attached && REFUSED.iter().any(|begin| error.contains(begin)) {
            let found = format!("{}: {error}", link.address);
            let fix = format!(
                "on the server: `tunnel-server status`, `tunnel-server agent list`; `tunnel-server agent readmit {0}` if it was \
                 revoked, and {0} has to be in the inventory (`kubectl get node {0}`)",
                status.node
            );
            faults.push(Finding::new(&codes::SESSION_REFUSED, found, fix));
        }
    }
    let attached: Vec<_> = status.servers.iter().filter(|link| link.phase == LinkPhase::Attached).collect();
    if attached.is_empty() && faults.is_empty() {
        let reason = |link: &crate::session::LinkStatus| {
            let ago = link.last_error_s.map(|seconds| format!(" {} ago", age(seconds))).unwrap_or_default();
            format!("{}: {}{ago}", link.address, link.last_error.as_deref().unwrap_or("no answer yet"))
        };
        let mut found: Vec<String> = status.servers.iter().map(reason).collect();
        if found.is_empty() {
            found
                .push(status.api_server_error.clone().unwrap_or_else(|| "no server is known yet".to_owned()));
        }
        let fix = "correct what the checks above have found; the agent tries again by itself";
        faults.push(Finding::new(&codes::NOT_ATTACHED, found.join("; "), fix));
    }
    let shown = attached
        .iter()
        .map(|link| format!("to {} ({})", link.server_id.as_deref().unwrap_or("?"), link.address));
    Outcome::of(faults, shown.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::runtime::of_flags;
    use crate::session::{LinkStatus, Refusal, SessionEnd};

    fn status(links: &[(LinkPhase, Option<String>)]) -> AgentStatus {
        let link = |(phase, error): &(LinkPhase, Option<String>)| LinkStatus {
            address: "tunnel:10262".to_owned(),
            phase: *phase,
            server_id: Some("cloud-1".to_owned()),
            attached_for_s: None,
            epoch: 1,
            rtt_ms: None,
            links: 1,
            connections: 0,
            delivery_rate: None,
            retransmits: None,
            window_limited: None,
            buffer_limited: None,
            last_error: error.clone(),
            last_error_s: Some(7),
        };
        AgentStatus::new(&of_flags(&["--server=a:1"]), links.iter().map(link).collect(), None)
    }

    fn codes_of(links: &[(LinkPhase, Option<String>)]) -> Vec<&'static str> {
        match judge(&status(links)) {
            Outcome::Faults(findings) => findings.iter().map(|finding| finding.code).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn a_proxy_that_cuts_links_is_told_while_they_are_back() {
        let idle = Duration::from_secs(3);
        let cut = SessionEnd::CutWhenIdle { proxy: "proxy:3128".into(), idle }.to_string();
        for phase in [LinkPhase::Attached, LinkPhase::Waiting] {
            assert_eq!(codes_of(&[(phase, Some(cut.clone()))]), ["proxy-cuts-idle"]);
        }
        let mut long_ago = status(&[(LinkPhase::Attached, Some(cut))]);
        long_ago.servers[0].last_error_s = Some(CUT_LATELY);
        assert!(!matches!(judge(&long_ago), Outcome::Faults(_)));
    }

    #[test]
    fn a_refusal_is_told_from_a_server_that_is_not_reached() {
        let lost = Some("cannot connect: Connection refused".to_owned());
        assert_eq!(codes_of(&[(LinkPhase::Attached, lost.clone())]), [""; 0]);
        assert_eq!(codes_of(&[(LinkPhase::Waiting, lost.clone())]), ["not-attached"]);
        assert_eq!(codes_of(&[]), ["not-attached"]);
        assert_eq!(codes_of(&[(LinkPhase::Waiting, lost), (LinkPhase::Attached, None)]), [""; 0]);
        for end in [
            Refusal::Session("revoked".into()),
            Refusal::ForNow("not in the inventory".into()),
            Refusal::Certificate("revoked".into()),
            Refusal::Replaced("10.0.0.7:4711".into()),
        ] {
            assert_eq!(
                codes_of(&[(LinkPhase::Waiting, Some(end.to_string()))]),
                ["session-refused"],
                "{end}"
            );
        }
    }
}

//! The status of several servers in one table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use tunnel_runtime::NodeName;
use tunnel_runtime::text::{age, harmless};

use super::model::{NodeStatus, RedirectState, StatusReport};
use super::table::{MAX_CONFLICTS, MAX_NODES, NODE_COLUMNS, Shown, more, servers, write_table};

const SERVER_COLUMNS: &[&str] =
    &["SERVER", "ROLE", "STATE", "#NODES", "#CONNECTIONS", "REDIRECT", "#FAILED", "VERSION"];

/// Formats the reports as text.
pub fn merged(reports: &[StatusReport], shown: Shown) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = write(&mut text, reports, shown);
    text
}

fn write(out: &mut String, reports: &[StatusReport], what: Shown) -> std::fmt::Result {
    let mut reports: Vec<&StatusReport> = reports.iter().collect();
    reports.sort_by(|a, b| a.server_id.cmp(&b.server_id));
    write_table(out, SERVER_COLUMNS, reports.iter().map(|report| server_row(report)))?;
    for report in &reports {
        for problem in problems(report) {
            writeln!(out, "{}: {}", harmless(&report.server_id), harmless(&problem))?;
        }
    }
    let conflicts: BTreeSet<&str> = reports
        .iter()
        .flat_map(|report| report.inventory.conflicts.iter().map(|conflict| conflict.message.as_str()))
        .collect();
    let shown = if what.all { conflicts.len() } else { conflicts.len().min(MAX_CONFLICTS) };
    for conflict in conflicts.iter().take(shown) {
        writeln!(out, "CONFLICT: {}", harmless(conflict))?;
    }
    more(out, "", conflicts.len() - shown, "conflicts")?;

    let mut nodes: Vec<(BTreeSet<&str>, NodeStatus)> = nodes(&reports).into_values().collect();
    let connected = nodes.iter().filter(|(at, _)| !at.is_empty()).count();
    writeln!(out, "nodes: {connected} of {} connected", nodes.len())?;
    nodes.sort_by(|(_, a), (_, b)| a.rank().cmp(&b.rank()).then_with(|| a.name.cmp(&b.name)));
    let shown = if what.all { nodes.len() } else { nodes.len().min(MAX_NODES) };
    let mut columns = what.of(NODE_COLUMNS.iter().copied());
    columns.insert(3, "SERVERS");
    let known = servers(reports.iter().copied()).len();
    let rows = nodes[..shown].iter().map(|(at, node)| {
        let mut row = what.of(node.row("connected", known));
        let at: Vec<&str> = at.iter().copied().collect();
        row.insert(3, if at.is_empty() { "-".to_owned() } else { harmless(&at.join(" ")) });
        row
    });
    write_table(out, &columns, rows)?;
    more(out, "", nodes.len() - shown, "nodes")
}

fn server_row(report: &StatusReport) -> Vec<String> {
    let state = if report.ready { format!("up {}", age(report.uptime_s)) } else { "NOT READY".to_owned() };
    let redirect = match report.redirect.state {
        RedirectState::Off => "off",
        RedirectState::On => "on",
        RedirectState::Degraded => "DEGRADED",
    };
    // A listener with two addresses is listed twice, with the same count. The agents' listener has no count.
    let listeners = report.listeners.iter().filter(|listener| listener.accepted.is_some());
    let relayed: BTreeMap<&str, u64> =
        listeners.map(|listener| (listener.name.as_str(), listener.connections_active)).collect();
    vec![
        harmless(&report.server_id),
        report.role.to_string(),
        state,
        report.nodes.iter().filter(|node| node.connected).count().to_string(),
        relayed.values().sum::<u64>().to_string(),
        redirect.to_owned(),
        report.failures.iter().map(|hop| hop.count).sum::<u64>().to_string(),
        harmless(&report.version),
    ]
}

fn problems(report: &StatusReport) -> Vec<String> {
    let mut problems = Vec::new();
    if !report.pending.is_empty() {
        problems.push(format!("not ready, waits for {}", report.pending.join(", ")));
    }
    if let Some(reason) = &report.redirect.reason {
        problems.push(format!("redirect degraded: {reason}"));
    }
    let source = &report.inventory.source;
    if let Some(old) = source.old_s {
        problems.push(format!("its inventory is as of {} ago: the API server does not answer", age(old)));
    }
    if let Some(error) = &source.last_error {
        problems.push(format!("its inventory is not up to date, the last good state is in effect: {error}"));
    }
    problems
}

/// Returns each node as reported by a server that has its agent, or the one that had it last, and the ids of all servers
/// that have it; `via` has those but the one that reports.
pub(super) fn nodes<'a>(
    reports: &[&'a StatusReport],
) -> BTreeMap<&'a NodeName, (BTreeSet<&'a str>, NodeStatus)> {
    let mut best: BTreeMap<&NodeName, (BTreeSet<&str>, &StatusReport, &NodeStatus)> = BTreeMap::new();
    for report in reports {
        for node in &report.nodes {
            let (at, of, known) = best.entry(&node.name).or_insert_with(|| (BTreeSet::new(), report, node));
            at.extend(node.via.iter().map(String::as_str));
            at.extend(node.connected.then_some(report.server_id.as_str()));
            if worth(node) > worth(known) {
                (*of, *known) = (report, node);
            }
        }
    }
    let merged = best.into_iter().map(|(name, (at, of, known))| {
        let others = at.iter().filter(|id| !known.connected || **id != of.server_id);
        let via = others.map(|id| (*id).to_owned()).collect();
        (name, (at, NodeStatus { via, ..known.clone() }))
    });
    merged.collect()
}

/// Sort key: a session first, the newest before others; then known at another server; then seen last.
fn worth(node: &NodeStatus) -> (bool, u64, bool, std::cmp::Reverse<u64>) {
    let epoch = node.session.as_ref().map_or(0, |session| session.epoch);
    (node.connected, epoch, !node.via.is_empty(), std::cmp::Reverse(node.last_seen_s.unwrap_or(u64::MAX)))
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    pub(crate) fn session(epoch: u64) -> Value {
        json!({"peer": "203.0.113.9:40000", "epoch": epoch, "since_s": 60, "rtt_ms": 12.3, "agent_version": "0.1.0",
            "links": [], "connections": 2, "stalled": 0, "bytes_to_node": 1, "bytes_from_node": 2})
    }

    pub(crate) fn node(name: &str, session: &Value, via: &[&str], last_seen: Option<u64>) -> Value {
        json!({"name": name, "addresses": ["10.8.0.7"], "in_inventory": true, "connected": !session.is_null(),
            "via": via, "session": session, "last_seen_s": last_seen})
    }

    pub(crate) fn report(id: &str, ready: bool, nodes: &[Value]) -> StatusReport {
        let redirect = json!({"state": "degraded", "reason": "the route is gone", "mended": 1, "counters": {},
            "routes": 1, "routes_down": 0, "excluded": 0});
        let document = json!({"version": "0.1.0", "server_id": id, "uptime_s": 90, "ready": ready, "pending": [],
            "nodes": nodes, "listeners": [{"name": "https", "address": "0.0.0.0:1", "connections_active": 4, "accepted": 9},
                {"name": "https", "address": "[::]:1", "connections_active": 4, "accepted": 9}],
            "redirect": redirect, "failures": [{"hop": "target", "count": 3, "recent": []}],
            "inventory": {"source": "/n", "edge": 1, "cloud": 1, "last_error": null, "old_s": null, "conflicts": []}});
        serde_json::from_value(document).unwrap()
    }

    fn line<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
        let line =
            text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no {start}: {text}"));
        line.split_whitespace().collect()
    }

    #[test]
    fn each_node_is_shown_once_as_its_server_has_it() {
        let none = Value::Null;
        let one = report(
            "cloud-1",
            true,
            &[
                node("edge-1", &session(1), &[], None),
                node("edge-2", &none, &["cloud-2"], Some(5)),
                node("edge-3", &none, &[], Some(500)),
                node("moved", &session(7), &[], None),
                node("third", &none, &["cloud-3"], None),
            ],
        );
        let two = report(
            "cloud-2",
            false,
            &[
                node("edge-1", &none, &["cloud-1"], None),
                node("edge-2", &session(2), &[], None),
                node("edge-3", &none, &[], Some(40)),
                node("moved", &session(9), &[], None),
            ],
        );
        let text = merged(&[two, one], Shown::default());
        assert_eq!(
            line(&text, "cloud-1 "),
            ["cloud-1", "server", "up", "1m30s", "2", "4", "DEGRADED", "3", "0.1.0"]
        );
        assert_eq!(line(&text, "cloud-2 ")[2..4], ["NOT", "READY"]);
        assert!(text.contains("cloud-1: redirect degraded: the route is gone\n"), "{text}");
        assert!(text.contains("nodes: 4 of 5 connected\n"), "{text}");
        assert_eq!(line(&text, "edge-1 ")[1..5], ["connected", "1m0s", "1/2", "cloud-1"]);
        assert_eq!(line(&text, "edge-2 ")[1..5], ["connected", "1m0s", "1/2", "cloud-2"]);
        assert_eq!(line(&text, "edge-3 ")[1..5], ["away", "40s", "0/2", "-"]);
        assert_eq!(line(&text, "moved ")[3..6], ["2/2", "cloud-1", "cloud-2"]);
        assert_eq!(line(&text, "third ")[1..5], ["elsewhere:", "cloud-3", "1/2", "cloud-3"]);
        assert_eq!(text.matches("edge-1 ").count(), 1);
    }

    #[test]
    fn a_servers_words_are_harmless() {
        let mut evil = report("x\u{1b}[2J", true, &[]);
        evil.redirect.reason = Some("a\nb".to_owned());
        let text = merged(&[evil.clone(), evil], Shown { all: true, wide: true });
        assert!(!text.contains('\u{1b}') && !text.contains("a\nb"), "{text:?}");
    }
}

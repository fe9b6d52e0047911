//! The status as text: problems come first, and 10,000 nodes still fit on a screen.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use tunnel_link::link::limited_by;
use tunnel_runtime::text::{age, bytes, harmless};

use super::model::{
    FailuresStatus, LinkStatus, NodeStatus, PodsWay, RedirectState, RedirectStatus, SessionStatus,
    StatusReport,
};
use crate::runtime::role::Role;

/// Nodes shown without `--all`.
pub(super) const MAX_NODES: usize = 50;
/// Conflicts shown without `--all`.
pub(super) const MAX_CONFLICTS: usize = 10;
/// Columns of the node table; `#` marks numeric ones.
pub(super) const NODE_COLUMNS: &[&str] = &[
    "NODE",
    "STATE",
    "#TUNNELS",
    "ADDRESSES",
    "PEER",
    "#RTT",
    "#LINKS",
    "#LIMITED BY",
    "#CONNECTIONS",
    "#STALLED",
    "#TO NODE",
    "#FROM NODE",
    "AGENT",
    "LAST END",
];
/// Those of `-o wide` only: with all of them, few terminals show a node on one line.
const WIDE_COLUMNS: &[&str] = &["PEER", "#LINKS", "#LIMITED BY", "AGENT"];

/// The shown part of the status.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shown {
    /// Every node and conflict, not only the first ones.
    pub all: bool,
    /// Every column of the nodes.
    pub wide: bool,
}

impl Shown {
    /// Takes a cell of each column of the nodes, and returns those that are shown.
    pub(super) fn of<T>(self, cells: impl IntoIterator<Item = T>) -> Vec<T> {
        let is_shown = |column: &&str| self.wide || !WIDE_COLUMNS.contains(column);
        let cells = cells.into_iter().zip(NODE_COLUMNS);
        cells.filter(|(_, column)| is_shown(column)).map(|(cell, _)| cell).collect()
    }
}

impl StatusReport {
    /// Formats the status.
    pub fn to_text(&self, shown: Shown) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = self.write(&mut text, shown);
        text
    }

    fn write(&self, out: &mut String, what: Shown) -> std::fmt::Result {
        let ready = if self.ready {
            "ready".to_owned()
        } else {
            format!("NOT READY, waits for {}", harmless(&self.pending.join(", ")))
        };
        writeln!(
            out,
            "tunnel-{} {} on {}, up {}: {ready}",
            self.role,
            harmless(&self.version),
            harmless(&self.server_id),
            age(self.uptime_s)
        )?;
        for listener in &self.listeners {
            let active = listener.connections_active;
            let activity = match listener.accepted {
                Some(accepted) => format!("{active} active, {accepted} accepted"),
                None => format!("{active} tunnels"),
            };
            writeln!(out, "listener {} at {}: {activity}", harmless(&listener.name), listener.address)?;
        }
        for peer in &self.peers {
            let state = if peer.draining { "draining" } else { "up" };
            writeln!(
                out,
                "server {} at {}: {state} {}, {} nodes, {} connections forwarded to it",
                harmless(&peer.server_id),
                harmless(&peer.address),
                age(peer.since_s),
                peer.nodes,
                peer.connections
            )?;
        }
        self.redirect.write(out)?;
        if !self.failures.is_empty() {
            let at = |hop: &FailuresStatus| format!("{} {}", harmless(&hop.hop), hop.count);
            let failed: Vec<_> = self.failures.iter().map(at).collect();
            writeln!(out, "failed since the start, by hop: {}", failed.join(", "))?;
        }
        self.write_inventory(out, what.all)?;
        let here = self.nodes.iter().filter(|node| node.connected).count();
        let elsewhere = self.nodes.iter().filter(|node| !node.connected && !node.via.is_empty()).count();
        write!(out, "nodes: {} of {} connected", here + elsewhere, self.nodes.len())?;
        if elsewhere > 0 {
            write!(out, ": {here} here, {elsewhere} elsewhere")?;
        }
        writeln!(out)?;
        self.write_nodes(out, what)
    }

    fn write_inventory(&self, out: &mut String, all: bool) -> std::fmt::Result {
        let source = &self.inventory.source;
        let origin = harmless(&source.source);
        writeln!(out, "inventory {origin}: {} edge, {} cloud", source.edge, source.cloud)?;
        if let Some(old) = source.old_s {
            let text = "of the state directory: the API server has not answered since the start";
            writeln!(out, "  OLD, as of {} ago, {text}", age(old))?;
        }
        if let Some(error) = &source.last_error {
            writeln!(out, "  NOT UP TO DATE, the last good state is in effect: {}", harmless(error))?;
        }
        let conflicts = &self.inventory.conflicts;
        let shown = if all { conflicts.len() } else { conflicts.len().min(MAX_CONFLICTS) };
        for conflict in &conflicts[..shown] {
            writeln!(out, "  CONFLICT: {}", harmless(&conflict.message))?;
        }
        more(out, "  ", conflicts.len() - shown, "conflicts")
    }

    fn write_nodes(&self, out: &mut String, what: Shown) -> std::fmt::Result {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let mut nodes: Vec<&NodeStatus> = self.nodes.iter().collect();
        nodes.sort_by(|a, b| a.rank().cmp(&b.rank()).then_with(|| a.name.cmp(&b.name)));
        let shown = if what.all { nodes.len() } else { nodes.len().min(MAX_NODES) };
        let columns = what.of(NODE_COLUMNS.iter().copied());
        let servers = servers(std::iter::once(self)).len();
        let rows = nodes[..shown].iter().map(|node| what.of(node.row("here", servers)));
        write_table(out, &columns, rows)?;
        more(out, "", nodes.len() - shown, "nodes")
    }
}

/// Writes a table. A column name that starts with `#` is right-aligned, for numbers.
pub(crate) fn write_table(
    out: &mut String,
    columns: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) -> std::fmt::Result {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|name| name.trim_start_matches('#')));
    for (name, column) in columns.iter().zip(table.column_iter_mut()) {
        column.set_padding((0, 2));
        if name.starts_with('#') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row(row);
    }
    for line in table.lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Ids of the servers that may have tunnels, as far as these reports know.
pub(super) fn servers<'a>(reports: impl Iterator<Item = &'a StatusReport>) -> BTreeSet<&'a str> {
    let known = reports.flat_map(|report| {
        let own = (report.role == Role::Server).then_some(&report.server_id);
        own.into_iter().chain(report.peers.iter().map(|peer| &peer.server_id))
    });
    known.map(String::as_str).collect()
}

pub(super) fn more(out: &mut String, indent: &str, left: usize, what: &str) -> std::fmt::Result {
    if left == 0 { Ok(()) } else { writeln!(out, "{indent}… and {left} more {what}; --all shows them") }
}

impl RedirectStatus {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let state = match self.state {
            RedirectState::Off => return writeln!(out, "redirect: off"),
            RedirectState::On => "on".to_owned(),
            RedirectState::Degraded => {
                format!("DEGRADED: {}", harmless(self.reason.as_deref().unwrap_or("no reason known")))
            }
        };
        let Self { routes, routes_down, excluded, .. } = self;
        writeln!(
            out,
            "redirect: {state}; {routes} routes, {routes_down} of them down, {excluded} ranges excluded"
        )?;
        match (self.pods, &self.not_by_route) {
            (PodsWay::Route, _) => writeln!(out, "  pods, Services and other hosts by route")?,
            (PodsWay::Connect, None) => writeln!(out, "  pods at connect()")?,
            (PodsWay::Connect, Some(reason)) => {
                writeln!(out, "  pods at connect(), not by route: {}", harmless(reason))?;
            }
        }
        let counted = self.counters.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<_> = counted.map(|(name, count)| format!("{} {count}", harmless(name))).collect();
        if !counted.is_empty() {
            writeln!(out, "  {}", counted.join(", "))?;
        }
        Ok(())
    }
}

impl NodeStatus {
    /// Sort key: problems come first.
    pub(super) fn rank(&self) -> u8 {
        match &self.session {
            None if self.via.is_empty() => 0,
            None => 3,
            Some(_) if !self.in_inventory => 1,
            Some(session) if session.stalled > 0 => 2,
            Some(_) => 3,
        }
    }

    /// The cells for [`NODE_COLUMNS`]. `word` says that it has a session, which may be one of `servers`.
    pub(super) fn row(&self, word: &str, servers: usize) -> Vec<String> {
        let addresses = self.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let mut state = match (&self.session, self.last_seen_s) {
            (Some(session), _) => format!("{word} {}", age(session.since_s)),
            (None, _) if !self.via.is_empty() => format!("elsewhere: {}", harmless(&self.via.join(" "))),
            (None, Some(ago)) => format!("away {}", age(ago)),
            (None, None) => "never seen".to_owned(),
        };
        if !self.in_inventory {
            state.push_str(", not in inventory");
        }
        if !self.leaving.is_empty() {
            // The columns do not include the connections of these sessions.
            let connections: u32 = self.leaving.iter().map(|session| session.connections).sum();
            state.push_str(&format!(", {connections} at agents that leave"));
        }
        let none = || "-".to_owned();
        let tunnels = usize::from(self.session.is_some()) + self.via.len();
        let mut row = vec![self.name.to_string(), state, format!("{tunnels}/{servers}"), addresses];
        match &self.session {
            Some(session) => row.extend([
                session.peer.to_string(),
                session.rtt_ms.map_or_else(none, |rtt| format!("{rtt:.1} ms")),
                session.links.len().to_string(),
                session.limited_by().unwrap_or_else(none),
                session.connections.to_string(),
                session.stalled.to_string(),
                bytes(session.bytes_to_node),
                bytes(session.bytes_from_node),
                harmless(&session.agent_version),
            ]),
            None => row.extend(std::iter::repeat_with(none).take(9)),
        }
        let end = self.last_seen_s.map(|ago| match &self.last_end {
            Some(reason) => format!("{} ago: {}", age(ago), harmless(reason)),
            None => format!("{} ago", age(ago)),
        });
        row.push(end.unwrap_or_else(none));
        row
    }
}

impl SessionStatus {
    /// Limit of the link that is limited most.
    fn limited_by(&self) -> Option<String> {
        let share = |link: &LinkStatus| {
            link.window_limited.unwrap_or_default().max(link.buffer_limited.unwrap_or_default())
        };
        let worst = self.links.iter().max_by(|a, b| share(a).total_cmp(&share(b)))?;
        limited_by(worst.window_limited?, worst.buffer_limited?)
    }
}

#[cfg(test)]
mod tests {
    use tunnel_routing::{Conflict, ConflictKind};

    use super::*;
    use crate::inventory::SourceStatus;
    use crate::status::{ConflictStatus, InventoryStatus, ListenerStatus, PeerStatus};

    const ALL: Shown = Shown { all: true, wide: true };

    fn link(number: u32) -> LinkStatus {
        LinkStatus {
            number,
            connections: 2,
            rtt_ms: Some(12.34),
            delivery_rate: 1_000_000,
            retransmits: 0,
            window_limited: Some(if number == 1 { 0.456 } else { 0.0 }),
            buffer_limited: Some(0.01),
            window: 1 << 20,
        }
    }

    fn session(stalled: usize) -> SessionStatus {
        SessionStatus {
            peer: "203.0.113.9:40000".parse().unwrap(),
            epoch: 3,
            since_s: 3700,
            rtt_ms: Some(12.34),
            agent_version: "0.1.0".to_owned(),
            links: vec![link(0), link(1)],
            connections: 5,
            stalled,
            bytes_to_node: 1023,
            bytes_from_node: 5 << 20,
        }
    }

    fn node(name: &str, session: Option<usize>) -> NodeStatus {
        NodeStatus {
            name: name.parse().unwrap(),
            addresses: vec!["10.8.0.7".parse().unwrap()],
            kubelet_port: 10250,
            in_inventory: true,
            connected: session.is_some(),
            via: if name == "elsewhere" { vec!["cloud-2".to_owned()] } else { Vec::new() },
            session: session.map(self::session),
            leaving: if name == "replaced" { vec![self::session(0), self::session(0)] } else { Vec::new() },
            last_seen_s: (name == "gone").then_some(40),
            last_end: (name == "gone").then(|| "the agent has left".to_owned()),
        }
    }

    fn report(nodes: Vec<NodeStatus>) -> StatusReport {
        let conflict = Conflict {
            kind: ConflictKind::Ambiguous,
            address: "10.8.0.7".parse().ok(),
            nodes: Vec::new(),
            holder: None,
        };
        StatusReport {
            role: Role::Server,
            version: "0.1.0".to_owned(),
            server_id: "cloud-1".to_owned(),
            uptime_s: 90_000,
            ready: false,
            pending: vec!["redirect".to_owned()],
            nodes,
            listeners: vec![ListenerStatus {
                name: "https".to_owned(),
                address: "0.0.0.0:10263".parse().unwrap(),
                connections_active: 3,
                accepted: Some(9),
            }],
            peers: vec![PeerStatus {
                server_id: "cloud-2".to_owned(),
                version: "0.1.0".to_owned(),
                address: "192.0.2.2:10262".to_owned(),
                since_s: 61,
                rtt_ms: Some(0.2),
                draining: false,
                nodes: 7,
                connections: 2,
                bytes_to_node: 0,
                bytes_from_node: 0,
            }],
            redirect: RedirectStatus {
                state: RedirectState::On,
                routes: 2,
                routes_down: 1,
                counters: [("connect4/redirected".to_owned(), 7), ("connect4/direct".to_owned(), 0)].into(),
                ..RedirectStatus::default()
            },
            failures: vec![FailuresStatus { hop: "target".to_owned(), count: 60, recent: Vec::new() }],
            inventory: InventoryStatus {
                source: SourceStatus {
                    source: "/nodes.yaml".into(),
                    edge: 2,
                    cloud: 1,
                    last_error: Some("line 3".into()),
                    old_s: Some(7200),
                },
                conflicts: vec![ConflictStatus::from(&conflict); 12],
            },
        }
    }

    #[test]
    fn problems_come_first() {
        let mut unlisted = node("unlisted", Some(0));
        unlisted.in_inventory = false;
        let text = report(vec![
            node("b", Some(0)),
            node("stalls", Some(2)),
            unlisted,
            node("never", None),
            node("elsewhere", None),
            node("gone", None),
            node("replaced", Some(0)),
        ])
        .to_text(Shown { wide: true, all: false });
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in\n{text}"));
        let order = ["\ngone", "\nnever", "\nunlisted", "\nstalls", "\nb ", "\nelsewhere"].map(at);
        assert!(order.is_sorted(), "{text}");
        for line in [
            "tunnel-server 0.1.0 on cloud-1, up 1d1h: NOT READY, waits for redirect\n",
            "listener https at 0.0.0.0:10263: 3 active, 9 accepted\n",
            "redirect: on; 2 routes, 1 of them down, 0 ranges excluded\n  pods at connect()\n  connect4/redirected 7\n",
            "failed since the start, by hop: target 60\n",
            "inventory /nodes.yaml: 2 edge, 1 cloud\n  OLD, as of 2h0m ago, of the state directory: the API server has not answered since the start\n  NOT UP TO DATE, the last good state is in effect: line 3\n",
            "  … and 2 more conflicts; --all shows them\n",
            "server cloud-2 at 192.0.2.2:10262: up 1m1s, 7 nodes, 2 connections forwarded to it\n",
            "nodes: 5 of 7 connected: 4 here, 1 elsewhere\n",
            "here 1h1m, 10 at agents that leave",
            "here 1h1m, not in inventory",
            "elsewhere: cloud-2 ",
            " 1/2 ",
            "away 40s ",
            " 0/2 ",
            "40s ago: the agent has left",
            "never seen ",
            "here 1h1m",
            "12.3 ms",
            "window 46 %",
            "1023 B",
            "5.0 MiB",
        ] {
            at(line);
        }
    }

    #[test]
    fn ten_thousand_nodes_are_cut_and_all_are_not() {
        let nodes = (0..10_000).map(|i| node(&format!("edge-{i}"), (i != 9_999).then_some(0))).collect();
        let report = report(nodes);
        let text = report.to_text(Shown::default());
        assert!(text.lines().count() < 80, "{}", text.lines().count());
        assert!(text.contains("\nedge-9999"), "the one that is down is among those shown");
        assert!(text.contains("… and 9950 more nodes; --all shows them\n"));
        assert!(report.to_text(ALL).lines().count() > 10_000);
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with("edge-")).collect();
        let column = lines[1].find("12.3 ms").unwrap();
        assert!(lines[1..].iter().all(|line| line.find("12.3 ms") == Some(column)), "{text}");
        assert!(!text.contains("203.0.113.9") && !text.contains("LIMITED BY"), "only -o wide: {text}");
    }

    #[test]
    fn nothing_in_the_report_reaches_the_terminal_as_a_control_character() {
        // Escape sequence, its one-character form (CSI), title, new line, tab, delete.
        const EVIL: &str = "x\u{1b}[2J\u{9b}31m\u{1b}]0;t\u{7}\r\nFORGED\t\u{7f}\0";
        let nodes = vec![node("edge-1", Some(0)), node("gone", None), node("elsewhere", None)];
        let mut report = report(nodes);
        let lines = report.to_text(ALL).lines().count();
        report.version = EVIL.to_owned();
        report.server_id = EVIL.to_owned();
        report.pending = vec![EVIL.to_owned()];
        report.listeners[0].name = EVIL.to_owned();
        report.redirect.state = RedirectState::Degraded;
        report.redirect.reason = Some(EVIL.to_owned());
        report.failures[0].hop = EVIL.to_owned();
        report.redirect.counters = [(EVIL.to_owned(), 1)].into();
        report.inventory.source.source = EVIL.into();
        report.inventory.source.last_error = Some(EVIL.to_owned());
        report.inventory.conflicts[0].message = EVIL.to_owned();
        report.nodes[0].session.as_mut().unwrap().agent_version = EVIL.to_owned();
        report.nodes[1].last_end = Some(EVIL.to_owned());
        report.nodes[2].via = vec![EVIL.to_owned()];
        report.peers[0].server_id = EVIL.to_owned();
        report.peers[0].address = EVIL.to_owned();
        // As the command receives it.
        let report: StatusReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        let text = report.to_text(ALL);
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert_eq!(text.lines().count(), lines, "{text:?}");
        assert_eq!(text.matches("\u{fffd}\u{fffd}FORGED").count(), 15, "{text:?}");
    }

    #[test]
    fn the_report_survives_json() {
        let report = report(vec![node("edge-1", Some(1)), node("gone", None)]);
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<StatusReport>(&json).unwrap(), report);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["nodes"][0]["connected"], true);
        assert_eq!(value["inventory"]["source"], "/nodes.yaml");
        assert_eq!(value["inventory"]["conflicts"][0]["kind"], "ambiguous");
        assert_eq!(value["redirect"]["state"], "on");
    }
}

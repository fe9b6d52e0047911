//! The current connections: the answer of `/connections`, and its output by `tunnel-server status --connections`.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tunnel_link::connections::{blocked, first, stalled};
use tunnel_runtime::NodeName;
use tunnel_runtime::admin;
use tunnel_runtime::text::{age, bytes, harmless};

use super::table::write_table;
use crate::metrics::{Connection, Metrics};

/// `#` marks numeric columns.
const COLUMNS: &[&str] = &[
    "NODE",
    "LISTENER",
    "CLIENT",
    "CALLER",
    "DESTINATION",
    "VIA",
    "#AGE",
    "#LINK",
    "#TO NODE",
    "#FROM NODE",
    "#HELD",
    "#WINDOW LEFT",
    "STATE",
];

/// The answer of `/connections`. Its field names are an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionsReport {
    /// At most 1,000: first those whose receiver has read nothing for the longest time, then those with the most bytes.
    pub connections: Vec<ConnectionStatus>,
    /// Number of further connections.
    pub more: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionStatus {
    pub listener: String,
    pub client: SocketAddr,
    /// Identity of the caller, at a listener that authenticates callers.
    pub caller: Option<String>,
    /// None if the server dialled the destination itself.
    pub node: Option<NodeName>,
    pub destination: SocketAddr,
    /// Id of the other server, for a connection forwarded between servers.
    pub via: Option<String>,
    pub age_s: u64,
    /// True while the destination is being dialled.
    pub dialling: bool,
    /// Number of the link with the agent, or with the server of `via`.
    pub link: Option<u32>,
    pub bytes_to_node: u64,
    pub bytes_from_node: u64,
    /// Time for which the client has read nothing of the node's data, in milliseconds; None while it reads.
    pub client_blocked_ms: Option<u64>,
    /// Bytes held for it meanwhile.
    pub held_for_client: usize,
    /// Bytes that the node may still send before it has to wait for the client; None without a link.
    pub window_left: Option<u64>,
    /// Time for which the node, or the path to it, has taken nothing of the client's data, in milliseconds.
    pub node_blocked_ms: Option<u64>,
    /// Bytes read from the client that wait meanwhile. All others wait in the kernel's buffer.
    pub held_for_node: usize,
}

/// Answers `/connections`.
pub(crate) fn endpoint(metrics: Metrics) -> Arc<admin::Connections> {
    Arc::new(move |node: Option<&str>| admin::to_json(&ConnectionsReport::of(metrics.live.all(), node)))
}

impl ConnectionsReport {
    /// Report of one node, or of all.
    fn of(mut connections: Vec<Arc<Connection>>, node: Option<&str>) -> Self {
        if let Some(node) = node {
            connections.retain(|connection| connection.node.as_ref().is_some_and(|of| of.as_str() == node));
        }
        let (connections, more) = first(connections, |connection| Some(&*connection.relayed.get()?.traffic));
        let connections = connections.iter().map(|connection| ConnectionStatus::of(connection)).collect();
        Self { connections, more }
    }

    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let stalled = self.connections.iter().filter(|connection| connection.is_stalled()).count();
        let all = self.connections.len() + self.more;
        let among = if self.more > 0 && stalled == self.connections.len() { " or more" } else { "" };
        writeln!(out, "connections: {all}, {stalled}{among} of them stalled")?;
        if !self.connections.is_empty() {
            write_table(out, COLUMNS, self.connections.iter().map(ConnectionStatus::row))?;
        }
        if self.more > 0 {
            writeln!(out, "… and {} more", self.more)?;
        }
        Ok(())
    }
}

impl ConnectionStatus {
    fn of(connection: &Connection) -> Self {
        let relayed = connection.relayed.get();
        let traffic = relayed.map(|relayed| &*relayed.traffic);
        let (client_blocked_ms, held_for_client) = blocked(traffic.map(|traffic| &traffic.for_socket));
        let (node_blocked_ms, held_for_node) = blocked(traffic.map(|traffic| &traffic.for_tunnel));
        let link = relayed.and_then(|relayed| relayed.link.as_ref());
        let (bytes_to_node, bytes_from_node) = connection.bytes();
        Self {
            listener: connection.listener.to_owned(),
            client: connection.client,
            caller: connection.caller.get().map(|caller| caller.to_string()),
            node: connection.node.clone(),
            destination: connection.target,
            via: connection.via.get().map(|via| via.to_string()),
            age_s: connection.started.elapsed().as_secs(),
            dialling: connection.is_dialling(),
            link: link.map(|(number, _)| *number),
            bytes_to_node,
            bytes_from_node,
            client_blocked_ms,
            held_for_client,
            window_left: link
                .map(|(_, flow)| u64::from(flow.window()).saturating_sub(held_for_client as u64)),
            node_blocked_ms,
            held_for_node,
        }
    }

    fn is_stalled(&self) -> bool {
        stalled(self.client_blocked_ms).is_some() || stalled(self.node_blocked_ms).is_some()
    }

    /// The cells for [`COLUMNS`].
    fn row(&self) -> Vec<String> {
        let none = || "-".to_owned();
        let text = |text: &Option<String>| text.as_deref().map_or_else(none, harmless);
        let states = [
            self.dialling.then(|| "dialling".to_owned()),
            stalled(self.client_blocked_ms).map(|time| format!("client takes nothing for {time}")),
            stalled(self.node_blocked_ms).map(|time| format!("node takes nothing for {time}")),
        ];
        let states: Vec<_> = states.into_iter().flatten().collect();
        vec![
            self.node.as_ref().map_or_else(none, ToString::to_string),
            harmless(&self.listener),
            self.client.to_string(),
            text(&self.caller),
            self.destination.to_string(),
            text(&self.via),
            age(self.age_s),
            self.link.map_or_else(none, |link| link.to_string()),
            bytes(self.bytes_to_node),
            bytes(self.bytes_from_node),
            bytes((self.held_for_client + self.held_for_node) as u64),
            self.window_left.map_or_else(none, bytes),
            if states.is_empty() { none() } else { states.join(", ") },
        ]
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use tunnel_link::connections::MAX_ROWS;
    use tunnel_link::link::Flow;
    use tunnel_link::relay::Traffic;

    use super::*;
    use crate::metrics::Relayed;

    fn connection(node: Option<&str>, relayed: usize) -> Connection {
        let node = node.map(|node| node.parse().unwrap());
        let target = "192.168.50.2:9100".parse().unwrap();
        let connection = Connection::new("redirect", "10.70.0.1:40000".parse().unwrap(), node, target);
        let traffic = Traffic::default();
        traffic.count_from_socket(relayed);
        let link = Some((2, Arc::new(Flow::default())));
        let relayed = Relayed { traffic: Arc::new(traffic), link };
        assert!(connection.relayed.set(relayed).is_ok());
        connection
    }

    fn status() -> ConnectionStatus {
        ConnectionStatus { dialling: false, ..ConnectionStatus::of(&connection(Some("edge-1"), 5)) }
    }

    #[test]
    fn one_node_or_all_and_no_more_than_the_bound() {
        let metrics = Metrics::new(&mut Registry::default());
        let mut present: Vec<_> =
            (0..MAX_ROWS + 5).map(|number| metrics.live.enter(connection(Some("edge-1"), number))).collect();
        present.push(metrics.live.enter(connection(Some("edge-2"), 7)));
        present.push(metrics.live.enter(connection(None, 3)));
        let answer = endpoint(metrics);
        let report = |node| serde_json::from_value::<ConnectionsReport>(answer(node)).unwrap();
        let all = report(None);
        assert_eq!((all.connections.len(), all.more), (MAX_ROWS, 7));
        assert_eq!(all.connections[0].bytes_to_node, MAX_ROWS as u64 + 4, "what relayed most is first");
        let two = report(Some("edge-2"));
        assert_eq!((two.connections.len(), two.more), (1, 0));
        assert_eq!(two.connections[0].node.as_ref().map(NodeName::as_str), Some("edge-2"));
        assert_eq!(two.connections[0].window_left, Some(Flow::default().window().into()));
        assert!(two.connections[0].dialling, "the agent has not answered");
        assert!(report(Some("edge")).connections.is_empty());
        drop(present);
        assert_eq!(report(None), ConnectionsReport { connections: Vec::new(), more: 0 });
    }

    #[test]
    fn a_stalled_connection_stands_out() {
        let mut stalled = status();
        stalled.client_blocked_ms = Some(61_500);
        (stalled.held_for_client, stalled.window_left) = (1 << 20, Some(0));
        let mut both = status();
        (both.client_blocked_ms, both.node_blocked_ms) = (Some(999), Some(1000));
        let report = ConnectionsReport { connections: vec![stalled, both, status()], more: 3 };
        let text = report.to_text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "connections: 6, 2 of them stalled");
        assert!(lines[1].starts_with("NODE ") && lines[1].ends_with(" STATE"), "{text}");
        for part in ["edge-1 ", " redirect ", " 1.0 MiB ", " 0 B ", " client takes nothing for 1m1s"] {
            assert!(lines[2].contains(part), "{part}: {text}");
        }
        assert!(lines[3].ends_with(" node takes nothing for 1s"), "{text}");
        assert!(lines[4].ends_with(" -"), "{text}");
        assert_eq!(lines[5..], ["… and 3 more"]);
    }

    #[test]
    fn what_comes_from_elsewhere_is_harmless() {
        let mut hostile = status();
        hostile.caller = Some("\u{1b}[2J\n".to_owned());
        hostile.via = Some("\u{9b}2J\r".to_owned());
        let text = ConnectionsReport { connections: vec![hostile], more: 0 }.to_text();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert_eq!(text.lines().count(), 3, "{text:?}");
    }
}

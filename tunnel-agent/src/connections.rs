//! The connections that are relayed for servers now: the answer of `/connections`, and its text for `tunnel-agent
//! status --connections`.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_link::connections::{blocked, first, stalled};
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Traffic};
use tunnel_runtime::NodeName;
use tunnel_runtime::admin;
use tunnel_runtime::live::Live;
use tunnel_runtime::text::{age, bytes, harmless};

/// A connection whose target has been dialled.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The server's address as configured.
    pub(crate) server: Arc<str>,
    /// Number of the link, and its path.
    pub(crate) link: (u32, Arc<Flow>),
    pub(crate) target: SocketAddr,
    /// The address that was connected to: another one of this host if the target's is on no interface.
    pub(crate) dialled: IpAddr,
    pub(crate) started: Instant,
    pub(crate) traffic: Traffic,
    pub(crate) abort: Arc<Abort>,
}

/// Aborts connections to each address that this node loses. Never ends by itself. The program at the target may not
/// notice for hours, and a client that reuses its connection would send the next request to nowhere.
pub(crate) async fn end_lost(live: Arc<Live<Connection>>, mut addresses: watch::Receiver<Arc<Vec<IpAddr>>>) {
    let mut had = addresses.borrow_and_update().clone();
    while addresses.changed().await.is_ok() {
        let has = addresses.borrow_and_update().clone();
        let lost: Vec<IpAddr> = had.iter().copied().filter(|address| !has.contains(address)).collect();
        if !lost.is_empty() {
            for connection in live.all().iter().filter(|connection| lost.contains(&connection.dialled)) {
                connection.abort.trigger_for(Outcome::TargetReset, "this node has lost the target's address");
            }
        }
        had = has;
    }
}

/// The answer of `/connections`. Its field names are an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionsReport {
    /// At most 1,000: first those whose receiver has taken nothing for longest, then those that have relayed most.
    pub connections: Vec<ConnectionStatus>,
    /// Number of connections left out.
    pub more: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionStatus {
    pub server: String,
    pub link: u32,
    pub target: SocketAddr,
    pub age_s: u64,
    pub bytes_to_target: u64,
    pub bytes_from_target: u64,
    /// Milliseconds for which the target has taken nothing that the server has sent. None if it takes data as it comes.
    pub target_blocked_ms: Option<u64>,
    /// Bytes held for the target meanwhile.
    pub held_for_target: usize,
    /// Bytes that the server may still send before it has to wait for the target.
    pub window_left: u64,
    /// Milliseconds for which the server, or the path to it, has taken nothing that the target has sent.
    pub server_blocked_ms: Option<u64>,
    /// Bytes that were read from the target and wait meanwhile. All others wait in the kernel's buffer.
    pub held_for_server: usize,
}

/// Answers `/connections` of this node.
pub(crate) fn endpoint(live: Arc<Live<Connection>>, own: NodeName) -> Arc<admin::Connections> {
    Arc::new(move |node: Option<&str>| {
        let connections = if node.is_none_or(|node| node == own.as_str()) { live.all() } else { Vec::new() };
        admin::to_json(&ConnectionsReport::of(connections))
    })
}

impl ConnectionsReport {
    fn of(connections: Vec<Arc<Connection>>) -> Self {
        let (connections, more) = first(connections, |connection| Some(&connection.traffic));
        let connections = connections.iter().map(|connection| ConnectionStatus::of(connection)).collect();
        Self { connections, more }
    }

    pub fn to_text(&self) -> String {
        let mut text = format!("connections: {}\n", self.connections.len() + self.more);
        for connection in &self.connections {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{}", connection.line());
        }
        if self.more > 0 {
            let _ = writeln!(text, "… and {} more", self.more);
        }
        text
    }
}

impl ConnectionStatus {
    fn of(connection: &Connection) -> Self {
        let traffic = &connection.traffic;
        let (target_blocked_ms, held_for_target) = blocked(Some(&traffic.for_socket));
        let (server_blocked_ms, held_for_server) = blocked(Some(&traffic.for_tunnel));
        let (link, flow) = &connection.link;
        Self {
            server: connection.server.to_string(),
            link: *link,
            target: connection.target,
            age_s: connection.started.elapsed().as_secs(),
            bytes_to_target: traffic.to_socket(),
            bytes_from_target: traffic.from_socket(),
            target_blocked_ms,
            held_for_target,
            window_left: u64::from(flow.window()).saturating_sub(held_for_target as u64),
            server_blocked_ms,
            held_for_server,
        }
    }

    fn line(&self) -> String {
        let mut line = format!(
            "{} for {} on link {}, {}: {} to it, {} from it, {} held, {} left of the window",
            self.target,
            harmless(&self.server),
            self.link,
            age(self.age_s),
            bytes(self.bytes_to_target),
            bytes(self.bytes_from_target),
            bytes((self.held_for_target + self.held_for_server) as u64),
            bytes(self.window_left)
        );
        for (who, blocked_ms) in [("target", self.target_blocked_ms), ("server", self.server_blocked_ms)] {
            if let Some(time) = stalled(blocked_ms) {
                let _ = write!(line, "; the {who} takes nothing for {time}");
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use tunnel_link::connections::MAX_ROWS;

    use super::*;

    fn connection(relayed: usize) -> Connection {
        let traffic = Traffic::default();
        traffic.count_to_socket(relayed);
        Connection {
            server: "a:1".into(),
            link: (2, Arc::default()),
            target: "192.168.50.2:9100".parse().unwrap(),
            dialled: [192, 168, 50, 2].into(),
            started: Instant::now(),
            traffic,
            abort: Arc::default(),
        }
    }

    #[test]
    fn this_nodes_are_shown_and_no_more_than_the_bound() {
        let live = Arc::<Live<Connection>>::default();
        let present: Vec<_> = (0..MAX_ROWS + 5).map(|number| live.enter(connection(number))).collect();
        let answer = endpoint(live, "edge-1".parse().unwrap());
        let report = |node| serde_json::from_value::<ConnectionsReport>(answer(node)).unwrap();
        for own in [None, Some("edge-1")] {
            let report = report(own);
            assert_eq!((report.connections.len(), report.more), (MAX_ROWS, 5));
            assert_eq!(
                report.connections[0].bytes_to_target,
                MAX_ROWS as u64 + 4,
                "what relayed most is first"
            );
        }
        assert!(report(Some("edge-2")).connections.is_empty());
        drop(present);
        assert_eq!(report(None).to_text(), "connections: 0\n");
    }

    #[test]
    fn a_stalled_connection_stands_out() {
        let mut stalled = ConnectionStatus::of(&connection(2048));
        stalled.target_blocked_ms = Some(61_500);
        (stalled.held_for_target, stalled.window_left) = (1 << 20, 0);
        let mut hostile = ConnectionStatus::of(&connection(0));
        hostile.server = "\u{1b}[2J\n".to_owned();
        hostile.server_blocked_ms = Some(999);
        let text = ConnectionsReport { connections: vec![stalled, hostile], more: 3 }.to_text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "connections: 5");
        assert_eq!(
            lines[1],
            "192.168.50.2:9100 for a:1 on link 2, 0s: 2.0 KiB to it, 0 B from it, 1.0 MiB held, 0 B left of the window; the target takes nothing for 1m1s"
        );
        assert!(
            !lines[2].contains(|c: char| c.is_control()) && !lines[2].contains("takes nothing"),
            "{text:?}"
        );
        assert_eq!(lines[3..], ["… and 3 more"]);
    }
}

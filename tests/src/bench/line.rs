//! What is measured (lines), of whom (peers), in which order of topics (groups).
use std::fmt;

use serde::Serialize;

/// What Postern is measured beside, and Postern itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// No tunnel: the router lets the cloud into the site.
    Direct,
    /// Two HAProxy with TLS 1.3 between them.
    Haproxy,
    /// rathole, with its noise transport.
    Rathole,
    /// konnectivity, frontend `grpc`.
    KonnectivityGrpc,
    /// konnectivity, frontend `http-connect`.
    KonnectivityHttp,
    /// Our carrying on tonic instead of h2 itself.
    Tonic,
    /// One DNAT rule for each node.
    Iptables,
    /// This project, with its redirect on.
    Postern,
}

impl Peer {
    /// All, in the order of the columns.
    pub const ALL: [Self; 8] = [
        Self::Direct,
        Self::Haproxy,
        Self::Rathole,
        Self::KonnectivityGrpc,
        Self::KonnectivityHttp,
        Self::Tonic,
        Self::Iptables,
        Self::Postern,
    ];

    /// Those that carry connections between the two hosts.
    pub const CARRIERS: [Self; 7] = [
        Self::Direct,
        Self::Haproxy,
        Self::Rathole,
        Self::KonnectivityGrpc,
        Self::KonnectivityHttp,
        Self::Tonic,
        Self::Postern,
    ];

    /// Those that change what connect() costs, and the empty host.
    pub const REDIRECTORS: [Self; 3] = [Self::Direct, Self::Iptables, Self::Postern];

    /// As `--only` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Rathole => "rathole",
            Self::KonnectivityGrpc => "konnectivity-grpc",
            Self::KonnectivityHttp => "konnectivity-http",
            Self::Tonic => "tonic",
            Self::Iptables => "iptables",
            Self::Postern => "postern",
        }
    }

    /// Heading of its column.
    pub fn title(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "HAProxy pair",
            Self::Rathole => "rathole",
            Self::KonnectivityGrpc => "konnectivity grpc",
            Self::KonnectivityHttp => "konnectivity http-connect",
            Self::Tonic => "tonic on the data path",
            Self::Iptables => "iptables DNAT",
            Self::Postern => "Postern",
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Lines that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Memory with and without connections. The first, because it wants programs that have just started.
    Held,
    /// Connections that come and go.
    Connections,
    /// Small messages back and forth.
    RoundTrips,
    /// Much in one direction.
    Bulk,
    /// What the kernel is asked for, and how often a task sleeps.
    Counts,
    /// Round trips and new connections beside something that misbehaves.
    Beside,
    /// connect() alone.
    Connect,
    /// Many agents, many nodes, many connections; Postern alone.
    Scale,
}

impl Group {
    /// All, in the order of the report.
    pub const ALL: [Self; 8] = [
        Self::Connections,
        Self::RoundTrips,
        Self::Bulk,
        Self::Counts,
        Self::Held,
        Self::Beside,
        Self::Connect,
        Self::Scale,
    ];

    /// Those of one carrier, in the order in which they are measured.
    pub const CARRIED: [Self; 6] =
        [Self::Held, Self::Connections, Self::RoundTrips, Self::Bulk, Self::Counts, Self::Beside];

    /// As `--only` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Connections => "connections",
            Self::RoundTrips => "round-trips",
            Self::Bulk => "bulk",
            Self::Counts => "counts",
            Self::Beside => "beside",
            Self::Connect => "connect",
            Self::Scale => "scale",
        }
    }

    /// Heading of its table.
    pub fn title(self) -> &'static str {
        match self {
            Self::Held => "Memory, idle and with connections held",
            Self::Connections => "Connections: connect, 16 bytes there and back, close",
            Self::RoundTrips => "Round trips over open connections",
            Self::Bulk => "Bulk transfers",
            Self::Counts => "System calls and wake-ups of both ends",
            Self::Beside => "Others' p99 beside something that misbehaves",
            Self::Connect => "connect() alone, by the number of nodes",
            Self::Scale => "Scale: Postern alone, once in a run",
        }
    }

    /// What is a plot's axis only if its values are far apart.
    pub fn logarithmic(self) -> bool {
        matches!(self, Self::RoundTrips | Self::Beside)
    }

    /// Who is measured in it.
    pub fn peers(self) -> &'static [Peer] {
        match self {
            Self::Connect => &Peer::REDIRECTORS,
            Self::Scale => &[Peer::Postern],
            _ => &Peer::CARRIERS,
        }
    }

    /// Why the other peers are not.
    pub fn why_not(self, peer: Peer) -> &'static str {
        match (self, peer) {
            (Self::Connect, _) => "nothing is redirected: callers are told the proxy's own address",
            (_, Peer::Iptables) => "a rewritten address is no way into a site behind NAT; see connect()",
            _ => "not measured",
        }
    }
}

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// Rates.
    Higher,
    /// Times, memory.
    Lower,
}

impl Better {
    /// For a table.
    pub fn arrow(self) -> &'static str {
        match self {
            Self::Higher => "↑",
            Self::Lower => "↓",
        }
    }
}

/// One row of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Stable, for JSON and for the targets.
    pub id: String,
    /// Its table.
    pub group: Group,
    /// In words.
    pub title: String,
    /// Of the values.
    pub unit: &'static str,
    /// Which way is good.
    pub better: Better,
}

impl Line {
    fn new(group: Group, id: &str, title: &str, unit: &'static str) -> Self {
        let better = if unit.ends_with("/s") { Better::Higher } else { Better::Lower };
        Self { id: id.to_owned(), group, title: title.to_owned(), unit, better }
    }
}

/// Numbers of nodes, or of rules, at which connect() is measured.
pub const NODES: [usize; 4] = [1, 1_000, 5_000, 10_000];

/// What goes on beside the others.
pub const BESIDE: [(&str, &str); 6] = [
    ("alone", "nothing else"),
    ("stalled", "one reader that does not read"),
    ("stalled-500", "500 readers that do not read"),
    ("hole", "one dial into a black hole"),
    ("bulk-1", "one bulk download"),
    ("bulk-4", "four bulk downloads"),
];

/// Every line of a group.
pub fn lines(group: Group) -> Vec<Line> {
    let line = |id: &str, title: &str, unit| Line::new(group, id, title, unit);
    match group {
        Group::Connections => vec![
            line("connections-1", "one at once", "1/s"),
            line("connections-16", "16 at once", "1/s"),
            line("connections-1-p99", "one at once, p99 of one", "µs"),
            line("connections-cpu", "CPU time for 1,000 connections", "s"),
        ],
        Group::RoundTrips => round_trips(group),
        Group::Bulk => vec![
            line("bulk-down-1", "download, one stream", "MB/s"),
            line("bulk-up-1", "upload, one stream", "MB/s"),
            line("bulk-down-8", "download, 8 streams", "MB/s"),
            line("bulk-up-8", "upload, 8 streams", "MB/s"),
            line("bulk-down-cpu", "CPU time for 1 GB down, one stream", "s"),
            line("bulk-up-cpu", "CPU time for 1 GB up, one stream", "s"),
        ],
        Group::Counts => counts(group),
        Group::Held => vec![
            line("held-idle", "resident memory of both ends, no connection", "MB"),
            line("held", "resident memory of both ends, 2,000 connections", "MB"),
            line("held-cloud", "of it in the cloud", "MB"),
            line("held-edge", "of it at the edge", "MB"),
        ],
        Group::Beside => beside(group),
        Group::Connect => connect(group),
        Group::Scale => super::scale::lines(group),
    }
}

/// A line of the scale group.
pub fn scale_line(group: Group, id: &str, title: &str, unit: &'static str) -> Line {
    Line::new(group, id, title, unit)
}

fn round_trips(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (bytes, size) in ROUND_TRIP_SIZES {
        for connections in ROUND_TRIP_CONNECTIONS {
            for part in ["p50", "p99"] {
                let many = if connections == 1 { "one connection" } else { "32 connections" };
                let id = format!("round-trip-{bytes}-{connections}-{part}");
                lines.push(Line::new(group, &id, &format!("{size}, {many}, {part}"), "µs"));
            }
        }
    }
    lines
}

/// Bytes of a message, and how it is called.
pub const ROUND_TRIP_SIZES: [(usize, &str); 2] = [(64, "64 B"), (4096, "4 KiB")];
/// Connections at once.
pub const ROUND_TRIP_CONNECTIONS: [usize; 2] = [1, 32];

/// What the counts are taken of, and how it is called.
pub const COUNTED: [(&str, &str); 3] = [
    ("visit", "one connection: connect, 16 B there and back, close"),
    ("trip", "one round trip of 64 B"),
    ("mb", "1 MB down, one stream"),
];

fn counts(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (kind, title, unit) in [
        ("calls", "system calls", "calls"),
        ("wakes", "task wake-ups (voluntary context switches)", "wake-ups"),
    ] {
        for (id, of) in COUNTED {
            lines.push(Line::new(group, &format!("counts-{kind}-{id}"), &format!("{title}, {of}"), unit));
        }
    }
    lines
}

fn beside(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for (id, what) in BESIDE {
        for (kind, title) in [("trip", "round trip of 64 B"), ("visit", "connect, 16 B, close")] {
            lines.push(Line::new(
                group,
                &format!("beside-{id}-{kind}"),
                &format!("{title}, beside {what}"),
                "µs",
            ));
        }
    }
    lines
}

fn connect(group: Group) -> Vec<Line> {
    let mut lines = Vec::new();
    for nodes in NODES {
        let of = format!("{nodes} nodes or rules");
        lines.push(Line::new(group, &format!("connect-{nodes}"), &format!("connect() p50, {of}"), "µs"));
        let title = format!("an unrelated connect() p50, {of}");
        lines.push(Line::new(group, &format!("connect-other-{nodes}"), &title, "µs"));
        let title = format!("connect, 16 bytes, close, 16 at once, {of}");
        lines.push(Line::new(group, &format!("connect-rate-{nodes}"), &title, "1/s"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_and_names_are_unique() {
        let lines: Vec<Line> = Group::ALL.into_iter().flat_map(lines).collect();
        let ids: BTreeSet<&str> = lines.iter().map(|line| line.id.as_str()).collect();
        assert_eq!(ids.len(), lines.len());
        let names: BTreeSet<&str> =
            Group::ALL.map(Group::name).into_iter().chain(Peer::ALL.map(Peer::name)).collect();
        assert_eq!(names.len(), Group::ALL.len() + Peer::ALL.len(), "`--only` takes either");
    }

    #[test]
    fn rates_are_better_when_higher() {
        for line in Group::ALL.into_iter().flat_map(lines) {
            assert_eq!(line.better == Better::Higher, line.unit.ends_with("/s"), "{line:?}");
        }
    }
}

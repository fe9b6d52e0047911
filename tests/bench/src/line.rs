//! The measurements (lines), the programs that are measured (peers), and groups of lines.
use std::fmt;

use serde::{Deserialize, Serialize};

/// Postern, and its alternatives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    /// No tunnel: the router lets the cloud into the site.
    Direct,
    /// Two HAProxy with TLS 1.3 between them.
    Haproxy,
    /// The same with buffers as large as Postern's.
    HaproxyTuned,
    /// rathole, with its noise transport.
    Rathole,
    /// konnectivity, frontend `grpc`.
    KonnectivityGrpc,
    /// konnectivity, frontend `http-connect`.
    KonnectivityHttp,
    /// Postern's data path on tonic instead of h2.
    Tonic,
    /// One DNAT rule for each node.
    Iptables,
    /// This project, with its redirect on.
    Postern,
    /// The same, with the agent at another server.
    PosternForwarded,
}

impl Peer {
    /// All, in the order of the columns.
    pub(crate) const ALL: [Self; 10] = [
        Self::Direct,
        Self::Haproxy,
        Self::HaproxyTuned,
        Self::Rathole,
        Self::KonnectivityGrpc,
        Self::KonnectivityHttp,
        Self::Tonic,
        Self::Iptables,
        Self::Postern,
        Self::PosternForwarded,
    ];

    /// Peers that relay connections between the two hosts.
    pub(crate) const CARRIERS: [Self; 9] = [
        Self::Direct,
        Self::Haproxy,
        Self::HaproxyTuned,
        Self::Rathole,
        Self::KonnectivityGrpc,
        Self::KonnectivityHttp,
        Self::Tonic,
        Self::Postern,
        Self::PosternForwarded,
    ];

    /// Peers that are measured over wide-area paths.
    pub(crate) const FAR: [Self; 7] = [
        Self::Direct,
        Self::Haproxy,
        Self::HaproxyTuned,
        Self::Rathole,
        Self::KonnectivityGrpc,
        Self::KonnectivityHttp,
        Self::Postern,
    ];

    /// konnectivity's two modes.
    pub(crate) const KONNECTIVITY: [Self; 2] = [Self::KonnectivityGrpc, Self::KonnectivityHttp];

    /// Peers that change the cost of connect(), and the empty host.
    pub(crate) const REDIRECTORS: [Self; 3] = [Self::Direct, Self::Iptables, Self::Postern];

    /// Name for `--only`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::HaproxyTuned => "haproxy-tuned",
            Self::Rathole => "rathole",
            Self::KonnectivityGrpc => "konnectivity-grpc",
            Self::KonnectivityHttp => "konnectivity-http",
            Self::Tonic => "tonic",
            Self::Iptables => "iptables",
            Self::Postern => "postern",
            Self::PosternForwarded => "postern-forwarded",
        }
    }

    /// Heading of its column.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "HAProxy pair",
            Self::HaproxyTuned => "HAProxy pair, tuned",
            Self::Rathole => "rathole",
            Self::KonnectivityGrpc => "konnectivity grpc",
            Self::KonnectivityHttp => "konnectivity http-connect",
            Self::Tonic => "tonic on the data path",
            Self::Iptables => "iptables DNAT",
            Self::Postern => "Postern",
            Self::PosternForwarded => "Postern, forwarded",
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
pub(crate) enum Group {
    /// Memory with and without connections. Measured first, on programs that have just started.
    Held,
    /// Connections that come and go.
    Connections,
    /// Small messages back and forth.
    RoundTrips,
    /// Bulk transfers in one direction.
    Bulk,
    /// System calls and wake-ups.
    Counts,
    /// Round trips and new connections during a disturbance.
    Beside,
    Connect,
    /// Many agents, many nodes, many connections; Postern alone.
    Scale,
    /// A pod's connections by route, and what rules and routes cost other packets; Postern alone.
    Pods,
    /// Delay, little bandwidth, loss. Measured last: its paths take the place of the testbed's cables.
    Wan,
}

impl Group {
    /// All, in the order of the report.
    pub(crate) const ALL: [Self; 10] = [
        Self::Connections,
        Self::RoundTrips,
        Self::Bulk,
        Self::Counts,
        Self::Held,
        Self::Beside,
        Self::Connect,
        Self::Scale,
        Self::Pods,
        Self::Wan,
    ];

    /// Groups of one carrier, in the order in which they are measured.
    pub(crate) const RELAYED: [Self; 6] =
        [Self::Held, Self::Connections, Self::RoundTrips, Self::Bulk, Self::Counts, Self::Beside];

    /// True if it is measured without a wide-area path.
    pub(crate) fn is_on_host(self) -> bool {
        self != Self::Wan
    }

    /// Name for `--only`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Connections => "connections",
            Self::RoundTrips => "round-trips",
            Self::Bulk => "bulk",
            Self::Counts => "counts",
            Self::Beside => "beside",
            Self::Connect => "connect",
            Self::Scale => "scale",
            Self::Pods => "pods",
            Self::Wan => "wan",
        }
    }

    /// Heading of its table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Held => "Memory, idle and with connections held",
            Self::Connections => "Connections: connect, 16 bytes there and back, close",
            Self::RoundTrips => "Round trips over open connections",
            Self::Bulk => "Bulk transfers",
            Self::Counts => "System calls and wake-ups of both ends",
            Self::Beside => "Others' p99 beside something that misbehaves",
            Self::Connect => "connect() alone, by the number of nodes",
            Self::Scale => "Scale: Postern alone, once in a run",
            Self::Pods => "Pods by route: Postern alone, once in a run",
            Self::Wan => "Over wide-area paths",
        }
    }

    /// True if its values are so far apart that plots need a logarithmic axis.
    pub(crate) fn logarithmic(self) -> bool {
        matches!(self, Self::RoundTrips | Self::Beside | Self::Wan)
    }

    /// The peers that are measured.
    pub(crate) fn peers(self) -> &'static [Peer] {
        match self {
            Self::Connect => &Peer::REDIRECTORS,
            Self::Scale | Self::Pods => &[Peer::Postern],
            Self::Wan => &Peer::FAR,
            _ => &Peer::CARRIERS,
        }
    }
}

/// Direction in which values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Better {
    Higher,
    /// Times, memory.
    Lower,
    /// It only explains other lines.
    Neither,
}

impl Better {
    /// Arrow behind the unit.
    pub(crate) fn arrow(self) -> &'static str {
        match self {
            Self::Higher => " ↑",
            Self::Lower => " ↓",
            Self::Neither => "",
        }
    }
}

/// One row of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Line {
    /// Stable identifier in JSON.
    pub(crate) id: String,
    pub(crate) group: Group,
    pub(crate) title: String,
    /// Lines of one section share a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) section: Option<&'static str>,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
}

impl Line {
    pub(crate) fn new(group: Group, id: &str, title: &str, unit: &'static str) -> Self {
        let better = match unit {
            "%" => Better::Neither,
            _ if unit.ends_with("/s") => Better::Higher,
            _ => Better::Lower,
        };
        Self { id: id.to_owned(), group, title: title.to_owned(), section: None, unit, better }
    }

    /// Puts the line into a section.
    pub(crate) fn in_section(self, section: &'static str) -> Self {
        Self { section: Some(section), ..self }
    }
}

//! The JSON document returned by `/status`. Its field names are an interface.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tunnel_routing::Conflict;
use tunnel_routing::inventory::DEFAULT_KUBELET_PORT;
use tunnel_runtime::NodeName;

use crate::inventory::SourceStatus;
use crate::runtime::role::Role;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    pub version: String,
    pub server_id: String,
    #[serde(default)]
    pub role: Role,
    pub uptime_s: u64,
    pub ready: bool,
    /// Names of the steps that a start or a stop still waits for.
    pub pending: Vec<String>,
    pub nodes: Vec<NodeStatus>,
    pub listeners: Vec<ListenerStatus>,
    /// The other servers that this one is linked to.
    #[serde(default)]
    pub peers: Vec<PeerStatus>,
    pub redirect: RedirectStatus,
    /// Failed connections by hop.
    #[serde(default)]
    pub failures: Vec<FailuresStatus>,
    pub inventory: InventoryStatus,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub name: NodeName,
    pub addresses: Vec<IpAddr>,
    /// The port that its Node names; the default one without a Node.
    #[serde(default = "default_kubelet_port")]
    pub kubelet_port: u16,
    /// False if an agent is attached, but the inventory has no edge node of that name.
    pub in_inventory: bool,
    /// True if an agent is attached to this server.
    pub connected: bool,
    /// Ids of other servers that have the node.
    #[serde(default)]
    pub via: Vec<String>,
    /// Set only while connected.
    pub session: Option<SessionStatus>,
    /// Sessions of agents that have left or were replaced, which finish their connections; the oldest first.
    #[serde(default)]
    pub leaving: Vec<SessionStatus>,
    /// Seconds since the last session ended, if one has since the server started; also set during another session.
    pub last_seen_s: Option<u64>,
    /// Reason why it ended.
    pub last_end: Option<String>,
}

/// Of a server of an earlier version, which reports none.
fn default_kubelet_port() -> u16 {
    DEFAULT_KUBELET_PORT
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Address from which the agent dials.
    pub peer: SocketAddr,
    pub epoch: u64,
    pub since_s: u64,
    /// None before the first PING.
    pub rtt_ms: Option<f64>,
    pub agent_version: String,
    pub links: Vec<LinkStatus>,
    pub connections: u32,
    /// Connections whose receiver is not reading at present.
    pub stalled: usize,
    pub bytes_to_node: u64,
    pub bytes_from_node: u64,
}

/// One TCP connection with an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// 0 for the first; others come and go with the load.
    pub number: u32,
    pub connections: u32,
    /// None before the first PING.
    pub rtt_ms: Option<f64>,
    /// Delivery rate in bytes per second when the server last sent something; 0 before that.
    pub delivery_rate: u64,
    /// TCP segments retransmitted by the server.
    pub retransmits: u32,
    /// Share, 0 to 1, of the last 10 to 20 s of sending in which the agent's TCP receive window was full; None before the
    /// server sent anything, or before Linux 4.10.
    pub window_limited: Option<f64>,
    /// The same for the server's TCP send buffer.
    pub buffer_limited: Option<f64>,
    /// Bytes that one connection may have in flight.
    pub window: u32,
}

/// Another server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    pub server_id: String,
    pub version: String,
    /// Address at which it was dialled.
    pub address: String,
    pub since_s: u64,
    /// None before the first PING.
    pub rtt_ms: Option<f64>,
    /// True if it is about to stop.
    pub draining: bool,
    /// Number of nodes attached to it.
    pub nodes: usize,
    /// Connections that it forwards for this server.
    pub connections: u32,
    pub bytes_to_node: u64,
    pub bytes_from_node: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerStatus {
    pub name: String,
    pub address: SocketAddr,
    /// Connections relayed now; at the agents' listener, sessions.
    pub connections_active: u64,
    /// Connections since the server started; None at the agents' listener, which does not count them.
    pub accepted: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectStatus {
    pub state: RedirectState,
    /// Reason why it is degraded.
    pub reason: Option<String>,
    /// Number of times that a lost route or program had to be restored.
    pub mended: u64,
    /// Counts by `<hook>/<outcome>`, since the start.
    pub counters: BTreeMap<String, u64>,
    pub routes: usize,
    /// Routes to nodes without a session: connections to them fail immediately.
    pub routes_down: usize,
    /// Excluded ranges, not counting this host's own addresses.
    pub excluded: usize,
    /// The tunnelled ports: those of the flags, and those of the cluster's ConfigMap.
    #[serde(default)]
    pub ports: Vec<u16>,
    /// Source ranges that may use the virtual addresses, besides this host itself: its pods.
    #[serde(default)]
    pub clients: Vec<IpNet>,
    /// Empty. The previous version needs it, which reads this one's document while servers are upgraded.
    #[serde(skip_deserializing)]
    pub programs: [(); 0],
    /// Reason why the programs are not pinned and would vanish with a killed server; None also with `--bpffs=off`.
    pub not_pinned: Option<String>,
    /// How connections of pods, Services and other hosts get here.
    #[serde(default)]
    pub pods: PodsWay,
    /// Reason why not by route, with `--redirect-pods=auto`.
    pub not_by_route: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodsWay {
    /// As those of the host's processes.
    #[default]
    Connect,
    Route,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RedirectState {
    /// `--redirect=off`.
    #[default]
    Off,
    On,
    /// The last verification failed.
    Degraded,
}

/// The connections that failed at one hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailuresStatus {
    /// One of client, server, tunnel, policy and target.
    pub hop: String,
    /// Count since the server started.
    pub count: u64,
    /// The last failures, the newest first.
    pub recent: Vec<FailureStatus>,
}

/// A failed connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureStatus {
    pub ago_s: u64,
    pub listener: String,
    pub client: SocketAddr,
    /// None if the server dialled the destination itself.
    pub node: Option<NodeName>,
    pub destination: SocketAddr,
    /// As in the access log.
    pub outcome: String,
    pub detail: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryStatus {
    #[serde(flatten)]
    pub source: SourceStatus,
    pub conflicts: Vec<ConflictStatus>,
}

/// A contradiction in the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConflictStatus {
    #[serde(flatten)]
    pub conflict: Conflict,
    pub message: String,
}

impl From<&Conflict> for ConflictStatus {
    fn from(conflict: &Conflict) -> Self {
        Self { conflict: conflict.clone(), message: conflict.to_string() }
    }
}

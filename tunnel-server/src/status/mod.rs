//! The server's status: the answer of `/status`, and its output by `tunnel-server status`.

mod cluster;
mod connections;
mod merged;
mod model;
pub(crate) mod page;
mod report;
mod summary;
mod table;

pub(crate) use cluster::endpoint as cluster_endpoint;
pub(crate) use connections::endpoint as connections_endpoint;
pub use connections::{ConnectionStatus, ConnectionsReport};
pub use merged::merged;
pub use model::{
    ConflictStatus, FailureStatus, FailuresStatus, InventoryStatus, LinkStatus, ListenerStatus, NodeStatus,
    PeerStatus, PodsWay, RedirectState, RedirectStatus, SessionStatus, StatusReport,
};
pub use report::{AGENTS, Reporter, SourceReport};
pub use summary::summary;
pub use table::Shown;
pub(crate) use table::write_table;

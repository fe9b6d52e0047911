//! The server's status: what `/status` answers, and how `tunnel-server status` prints it.

mod model;
mod report;
mod table;

pub use model::{
    ConflictStatus, DoorStatus, InventoryStatus, LinkStatus, NodeStatus, PeerStatus, ProgramStatus,
    RedirectState, RedirectStatus, SessionStatus, StatusReport,
};
pub use report::{AGENTS, Reporter, SourceReport};

//! The server's status: what `/status` answers, and how `tunnel-server status` prints it.

mod merged;
mod model;
mod report;
mod table;

pub use merged::merged;
pub use model::{
    ConflictStatus, DoorStatus, FailureStatus, FailuresStatus, InventoryStatus, LinkStatus, NodeStatus,
    PeerStatus, ProgramStatus, RedirectState, RedirectStatus, SessionStatus, StatusReport,
};
pub use report::{AGENTS, Reporter, SourceReport};

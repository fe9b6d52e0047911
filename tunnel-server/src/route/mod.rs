//! From the inventory to routes: which address, name or token leads to which edge node.

mod host;
mod plan;
mod router;
mod snapshot;
mod tokens;

pub use host::follow_host;
pub use plan::{Conflict, ConflictKind};
pub use router::{Router, RouterConfig, host_addresses};
pub use snapshot::{ByAddress, NodeAddress, Snapshot};
pub use tokens::QUARANTINE;

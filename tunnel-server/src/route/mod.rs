//! From the inventory to routes: which address, name or token leads to which edge node.

mod plan;
mod router;
mod snapshot;
mod tokens;

pub use plan::{Conflict, ConflictKind};
pub use router::{Router, RouterConfig, host_addresses};
pub use snapshot::{ByAddress, NodeAddress, Snapshot};
pub use tokens::QUARANTINE;

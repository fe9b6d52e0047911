//! From the inventory to routes: which address, name or token leads to which edge node.

mod awaited;
mod capacity;
mod claims;
mod claims_file;
mod config;
mod conflict;
mod conflicts;
mod follow;
mod key;
mod plan;
mod planner;
mod pods;
mod report;
mod router;
mod rules;
mod snapshot;
mod tokens;

pub(crate) use awaited::RETURN;
pub use claims::CLOUD_CLAIM_DELAY;
pub use claims_file::{keep_claims, load_claims};
pub use config::{RouterConfig, host_addresses};
pub use conflict::{Conflict, ConflictKind};
pub use follow::{follow, update, update_services};
pub use router::{Holder, Router};
pub use snapshot::{ByAddress, NodeAddress, Snapshot};
pub use tokens::QUARANTINE;

//! Turns the inventory into routes: the edge node behind an address, a name or a virtual address.
#![forbid(unsafe_code)]

mod awaited;
mod claims;
mod claims_file;
mod config;
mod conflict;
mod desired;
mod follow;
mod held;
pub mod inventory;
mod own_ports;
mod plan;
mod planner;
mod report;
mod resolve;
mod router;
mod snapshot;
mod virtual_addresses;

pub use awaited::RETURN;
pub use claims::CLOUD_CLAIM_DELAY;
pub use claims_file::{keep_claims, load_claims};
pub use config::{RouterConfig, host_addresses};
pub use conflict::{Conflict, ConflictKind};
pub use desired::{Desired, MAX_ROUTES, Route, RouteTarget, Table};
pub use follow::{follow, update, update_services};
pub use own_ports::OwnPorts;
pub use resolve::{Resolved, split_host};
pub use router::{Router, TunnelHolder};
pub use snapshot::{ByAddress, NodeAddress, Snapshot};
pub use virtual_addresses::{QUARANTINE, reserved_addresses, reserved_addresses_v6};

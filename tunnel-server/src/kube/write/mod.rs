//! What the server writes to the cluster. Events about the ConfigMap are every server's; the rest is written by the holder of
//! the Lease, when it differs.

mod condition;
pub mod csr;
pub mod dns;
pub mod events;
pub mod lease;
pub mod service;
mod tracker;
pub mod tunnels;

pub use condition::CONDITION;

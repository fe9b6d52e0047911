//! Writes to the cluster. Every server writes Events about the ConfigMap; everything else is written by the holder of
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

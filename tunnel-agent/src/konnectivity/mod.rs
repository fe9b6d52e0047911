//! The agent for servers of Kubernetes' apiserver-network-proxy (konnectivity). Replaces its `proxy-agent`.
//!
//! There is one stream of packets with each server. All servers are reached through one address (`set.rs`). Targets are
//! dialled as for a tunnel-server, within the same policy (`dial.rs`).

mod dial;
mod metrics;
mod set;
mod shared;
mod status;
mod stream;
#[cfg(test)]
mod tests;
mod tls;

pub use metrics::KonnectivityMetrics;
pub use set::Set;
pub use shared::Shared;
pub use status::{KonnectivityServer, KonnectivityStatus};
pub(crate) use tls::{check_files, client_config, connect};

//! Metrics of the other servers.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tunnel_runtime::gauges::register_gauges;

use super::held::Peers;

/// Registers `postern_peers`; `registry` already has the prefix `postern`.
pub fn register_peers(registry: &mut Registry, peers: Arc<Peers>) {
    let help = "Other servers that this one is linked with";
    register_gauges(registry, move |gauges| gauges.count("peers", help, None, peers.all().len()));
}

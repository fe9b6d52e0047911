//! Metrics of the other servers.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::held::Peers;

/// Registers `postern_peers`; `registry` already has the prefix `postern`.
pub fn register_peers(registry: &mut Registry, peers: Arc<Peers>) {
    registry.register_collector(Box::new(Collected(peers)));
}

struct Collected(Arc<Peers>);

impl fmt::Debug for Collected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Collected")
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gauge = ConstGauge::new(i64::try_from(self.0.all().len()).unwrap_or(i64::MAX));
        let help = "Other servers that this one is linked with";
        gauge.encode(encoder.encode_descriptor("peers", help, None, gauge.metric_type())?)
    }
}

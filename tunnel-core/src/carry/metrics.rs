//! Metrics of the bytes held for receivers that do not read.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::stall::StallBudget;

/// Registers `stalled_bytes` and `stalled_limit_bytes` of this process. `registry` has the prefix `postern`.
pub fn register_stalled(registry: &mut Registry) {
    registry.register_collector(Box::new(Stalled(StallBudget::of_process())));
}

#[derive(Debug)]
struct Stalled(&'static Arc<StallBudget>);

impl Collector for Stalled {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, bytes) in [
            ("stalled", "Bytes held for receivers that do not read", self.0.held()),
            (
                "stalled_limit",
                "Bound of stalled_bytes, from the memory that the process may use",
                self.0.limit(),
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            let descriptor =
                encoder.encode_descriptor(name, help, Some(&Unit::Bytes), gauge.metric_type())?;
            gauge.encode(descriptor)?;
        }
        Ok(())
    }
}

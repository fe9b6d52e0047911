//! Metrics of the bytes held for receivers that do not read.

use prometheus_client::registry::{Registry, Unit};
use tunnel_runtime::gauges::register_gauges;

use super::stall::StallBudget;

/// Registers `stalled_bytes` and `stalled_limit_bytes` of this process. `registry` has the prefix `postern`.
pub fn register_stalled(registry: &mut Registry) {
    let (budget, bytes) = (StallBudget::of_process(), Unit::Bytes);
    register_gauges(registry, move |gauges| {
        gauges.count("stalled", "Bytes held for receivers that do not read", Some(&bytes), budget.held())?;
        let help = "Bound of stalled_bytes, from the memory that the process may use";
        gauges.count("stalled_limit", help, Some(&bytes), budget.limit())
    });
}

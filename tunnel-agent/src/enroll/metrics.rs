use std::time::SystemTime;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RenewalLabels {
    outcome: &'static str,
}

/// Metrics of the agent's identity. A clone counts into the same metrics.
#[derive(Clone, Debug, Default)]
pub struct IdentityMetrics {
    not_after: Gauge,
    renewals: Family<RenewalLabels, Counter>,
}

impl IdentityMetrics {
    /// Makes the metrics and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "postern_agent_certificate_expiry_timestamp_seconds",
            "End of the agent's certificate, Unix time",
            metrics.not_after.clone(),
        );
        registry.register(
            "postern_agent_certificate_renewals",
            "Attempts to renew the certificate by outcome",
            metrics.renewals.clone(),
        );
        metrics
    }

    pub(super) fn set_not_after(&self, end: SystemTime) {
        let seconds = end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        self.not_after.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    pub(super) fn count(&self, renewed: bool) {
        let outcome = if renewed { "renewed" } else { "failed" };
        self.renewals.get_or_create(&RenewalLabels { outcome }).inc();
    }
}

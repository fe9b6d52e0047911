//! Metrics of the certificate and its renewal.

use std::time::SystemTime;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use tunnel_runtime::gauges::registered;

use crate::Holder;

const RENEWED: &str = "renewed";
const FAILED: &str = "failed";

/// Handles of the metrics. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct IdentityMetrics {
    not_after: Gauge,
    renewals: Family<[(&'static str, &'static str); 1], Counter>,
}

impl IdentityMetrics {
    pub fn register(registry: &mut Registry, holder: Holder) -> Self {
        let name = |what| format!("postern_{holder}_certificate_{what}");
        let end = format!("End of the {holder}'s certificate, Unix time");
        let renewals = "Attempts to renew the certificate by outcome";
        let metrics = Self {
            not_after: registered(registry, name("expiry_timestamp_seconds"), end),
            renewals: registered(registry, name("renewals"), renewals),
        };
        // A series that appears with its first failure cannot be alerted on by its increase.
        for outcome in [RENEWED, FAILED] {
            drop(metrics.renewals.get_or_create(&[("outcome", outcome)]));
        }
        metrics
    }

    pub(crate) fn set_not_after(&self, end: SystemTime) {
        let seconds = end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        self.not_after.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    pub(crate) fn count(&self, renewed: bool) {
        let outcome = if renewed { RENEWED } else { FAILED };
        self.renewals.get_or_create(&[("outcome", outcome)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_outcomes_exist_before_the_first_renewal() {
        let mut registry = Registry::default();
        let metrics = IdentityMetrics::register(&mut registry, Holder::Agent);
        metrics.count(true);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for series in ["{outcome=\"renewed\"} 1", "{outcome=\"failed\"} 0"] {
            let line = format!("postern_agent_certificate_renewals_total{series}");
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}

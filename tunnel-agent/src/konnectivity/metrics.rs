//! Metrics of konnectivity's own agent, with the same names and help texts, so that dashboards and alerts keep working.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_link::outcome::Outcome;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct KonnectivityMetrics {
    pub(super) servers: Gauge,
    pub(super) server_count: Gauge,
    pub(super) connections: Gauge,
    dial_failures: Family<ReasonLabel, Counter>,
}

impl KonnectivityMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("konnectivity_network_proxy_agent");
        let metrics = Self::default();
        let help = "Current number of open server connections";
        registry.register("open_server_connections", help, metrics.servers.clone());
        let help = "Current number of servers agent is trying to connect to";
        registry.register("known_server_count", help, metrics.server_count.clone());
        let help = "Current number of open endpoint connections";
        registry.register("open_endpoint_connections", help, metrics.connections.clone());
        // The encoder adds `_total`.
        let help = "Number of failures dialing the remote endpoint, by reason (example: timeout)";
        registry.register("endpoint_dial_failure", help, metrics.dial_failures.clone());
        metrics
    }

    pub(super) fn dial_failed(&self, outcome: Outcome) {
        let reason = if outcome == Outcome::TimedOut { "timeout" } else { "unknown" };
        self.dial_failures.get_or_create(&ReasonLabel { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn dashboards_find_the_names_of_konnectivitys_agent() {
        let mut registry = Registry::default();
        let metrics = KonnectivityMetrics::register(&mut registry);
        metrics.servers.set(1);
        metrics.server_count.set(2);
        metrics.connections.set(3);
        metrics.dial_failed(Outcome::TimedOut);
        metrics.dial_failed(Outcome::Refused);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "open_server_connections 1",
            "known_server_count 2",
            "open_endpoint_connections 3",
            "endpoint_dial_failure_total{reason=\"timeout\"} 1",
            "endpoint_dial_failure_total{reason=\"unknown\"} 1",
        ] {
            let line = format!("\nkonnectivity_network_proxy_agent_{line}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }
}

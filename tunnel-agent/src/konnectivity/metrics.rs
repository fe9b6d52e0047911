//! Metrics of konnectivity's own agent, with the same names and help texts, so that dashboards and alerts keep working.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_link::outcome::Outcome;
use tunnel_runtime::gauges::registered;

#[derive(Clone, Debug, Default)]
pub struct KonnectivityMetrics {
    pub(super) servers: Gauge,
    pub(super) server_count: Gauge,
    pub(super) connections: Gauge,
    dial_failures: Family<[(&'static str, &'static str); 1], Counter>,
}

impl KonnectivityMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("konnectivity_network_proxy_agent");
        let servers = "Current number of open server connections";
        let server_count = "Current number of servers agent is trying to connect to";
        let connections = "Current number of open endpoint connections";
        let failures = "Number of failures dialing the remote endpoint, by reason (example: timeout)";
        Self {
            servers: registered(registry, "open_server_connections", servers),
            server_count: registered(registry, "known_server_count", server_count),
            connections: registered(registry, "open_endpoint_connections", connections),
            // The encoder adds `_total`.
            dial_failures: registered(registry, "endpoint_dial_failure", failures),
        }
    }

    pub(super) fn dial_failed(&self, outcome: Outcome) {
        let reason = if outcome == Outcome::TimedOut { "timeout" } else { "unknown" };
        self.dial_failures.get_or_create(&[("reason", reason)]).inc();
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

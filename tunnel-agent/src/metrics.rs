//! The agent's metrics (`postern_agent_*`), updated by the code that they measure.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::Totals;
use tunnel_runtime::gauges::registered;
use tunnel_runtime::live::Live;

use crate::connections::Connection;

/// A label's name and value.
type Label = [(&'static str, &'static str); 1];

/// Handles of the agent's metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    dials: Family<Label, Counter>,
    dial_seconds: Histogram,
    connections: Family<Label, Counter>,
    outbound: Family<Label, Counter>,
    pub(crate) connections_active: Gauge,
    /// Payload bytes, counted as they pass.
    pub(crate) relayed: Totals,
    /// Connections that are relayed for servers now.
    pub(crate) live: Arc<Live<Connection>>,
    pub(crate) sessions_started: Counter,
    pub(crate) sessions_ended: Counter,
}

impl Metrics {
    /// Registers the metrics under `postern_agent`.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("postern_agent");
        let bytes = Family::<Label, Counter>::default();
        let direction = |direction| bytes.get_or_create(&[("direction", direction)]).clone();
        let relayed = Totals { from_socket: direction("from_target"), to_socket: direction("to_target") };
        let dial_seconds = Histogram::new(exponential_buckets(0.0005, 4.0, 8));
        registry.register_with_unit("dial", "Time that dials took", Unit::Seconds, dial_seconds.clone());
        registry.register_with_unit("relayed", "Relayed payload", Unit::Bytes, bytes);
        let help = "Connections of workloads on this node to the cloud that ended, by outcome";
        let metrics = Self {
            dials: registered(registry, "dials", "Dials to targets by outcome"),
            dial_seconds,
            connections: registered(registry, "connections", "Relayed connections that ended, by outcome"),
            outbound: registered(registry, "outbound_connections", help),
            connections_active: registered(registry, "connections_active", "Connections relayed now"),
            relayed,
            live: Arc::default(),
            sessions_started: registered(registry, "sessions_started", "Sessions that a server attached"),
            sessions_ended: registered(registry, "sessions_ended", "Sessions, or attempts, that ended"),
        };
        for outcome in Outcome::ALL {
            let _ = metrics.connections.get_or_create(&[("outcome", outcome.as_str())]);
            let _ = metrics.outbound.get_or_create(&[("outcome", outcome.as_str())]);
        }
        for outcome in
            ["ok", "cancelled", "refused", "timed_out", "unreachable", "denied", "busy", "protocol"]
        {
            let _ = metrics.dials.get_or_create(&[("outcome", outcome)]);
        }
        metrics
    }

    pub(crate) fn dialled(&self, outcome: &'static str, took: Duration) {
        self.dials.get_or_create(&[("outcome", outcome)]).inc();
        self.dial_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn outbound(&self, outcome: Outcome) {
        self.outbound.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        self.connections.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }
}

//! The agent's metrics (`postern_agent_*`), updated by the code that they measure.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tunnel_core::carry::Totals;
use tunnel_core::live::Live;
use tunnel_core::outcome::Outcome;

use crate::connections::Connection;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

/// Handles of the agent's metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    dials: Family<OutcomeLabel, Counter>,
    dial_seconds: Histogram,
    connections: Family<OutcomeLabel, Counter>,
    outbound: Family<OutcomeLabel, Counter>,
    pub(crate) connections_active: Gauge,
    /// Payload bytes, counted as they pass.
    pub(crate) carried: Totals,
    /// Connections that are relayed for servers now.
    pub(crate) live: Arc<Live<Connection>>,
    pub(crate) sessions_started: Counter,
    pub(crate) sessions_ended: Counter,
}

impl Metrics {
    /// Registers the metrics under `postern_agent`.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("postern_agent");
        let bytes = Family::<DirectionLabel, Counter>::default();
        let direction = |direction| bytes.get_or_create(&DirectionLabel { direction }).clone();
        let carried = Totals { from_socket: direction("from_target"), to_socket: direction("to_target") };
        let metrics = Self {
            dials: Family::default(),
            dial_seconds: Histogram::new(exponential_buckets(0.0005, 4.0, 8)),
            connections: Family::default(),
            outbound: Family::default(),
            connections_active: Gauge::default(),
            carried,
            live: Arc::default(),
            sessions_started: Counter::default(),
            sessions_ended: Counter::default(),
        };
        registry.register("dials", "Dials to targets by outcome", metrics.dials.clone());
        registry.register_with_unit(
            "dial",
            "Time that dials took",
            Unit::Seconds,
            metrics.dial_seconds.clone(),
        );
        registry.register(
            "connections",
            "Carried connections that ended, by outcome",
            metrics.connections.clone(),
        );
        let help = "Connections of workloads on this node to the cloud that ended, by outcome";
        registry.register("outbound_connections", help, metrics.outbound.clone());
        registry.register(
            "connections_active",
            "Connections carried now",
            metrics.connections_active.clone(),
        );
        registry.register_with_unit("carried", "Carried payload", Unit::Bytes, bytes);
        registry.register(
            "sessions_started",
            "Sessions that a server attached",
            metrics.sessions_started.clone(),
        );
        registry.register(
            "sessions_ended",
            "Sessions, or attempts, that ended",
            metrics.sessions_ended.clone(),
        );
        for outcome in Outcome::ALL {
            let _ = metrics.connections.get_or_create(&OutcomeLabel { outcome: outcome.as_str() });
            let _ = metrics.outbound.get_or_create(&OutcomeLabel { outcome: outcome.as_str() });
        }
        for outcome in
            ["ok", "cancelled", "refused", "timed_out", "unreachable", "denied", "busy", "protocol"]
        {
            let _ = metrics.dials.get_or_create(&OutcomeLabel { outcome });
        }
        metrics
    }

    pub(crate) fn dialled(&self, outcome: &'static str, took: Duration) {
        self.dials.get_or_create(&OutcomeLabel { outcome }).inc();
        self.dial_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn outbound(&self, outcome: Outcome) {
        self.outbound.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).inc();
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        self.connections.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).inc();
    }
}

//! The server's metrics of the data path (`postern_*`).

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tunnel_core::carry::Totals;
use tunnel_core::outcome::Outcome;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectionLabels {
    door: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DoorLabel {
    door: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// Handles to the metrics; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    connections: Family<ConnectionLabels, Counter>,
    active: Family<DoorLabel, Gauge>,
    refused: Family<DoorLabel, Counter>,
    dial_seconds: Histogram,
    connection_seconds: Histogram,
    handshakes: Family<ResultLabel, Counter>,
    sessions_refused: Family<ResultLabel, Counter>,
    /// Payload bytes, counted as they pass.
    pub carried: Totals,
    /// Live sessions.
    pub tunnels: Gauge,
}

impl Metrics {
    /// Registers the metrics; `registry` has the prefix `postern` already.
    pub fn new(registry: &mut Registry) -> Self {
        let bytes = Family::<DirectionLabel, Counter>::default();
        let direction = |direction| bytes.get_or_create(&DirectionLabel { direction }).clone();
        let carried = Totals { from_socket: direction("to_node"), to_socket: direction("from_node") };
        let metrics = Self {
            connections: Family::default(),
            active: Family::default(),
            refused: Family::default(),
            carried,
            dial_seconds: Histogram::new(exponential_buckets(0.0005, 4.0, 8)),
            connection_seconds: Histogram::new(exponential_buckets(0.001, 8.0, 8)),
            handshakes: Family::default(),
            sessions_refused: Family::default(),
            tunnels: Gauge::default(),
        };
        registry.register(
            "connections",
            "Connections that ended, by door and outcome",
            metrics.connections.clone(),
        );
        registry.register("connections_active", "Connections carried now, by door", metrics.active.clone());
        registry.register(
            "callers_refused",
            "Clients that a door turned away before a node was known",
            metrics.refused.clone(),
        );
        registry.register_with_unit("carried", "Carried payload", Unit::Bytes, bytes);
        registry.register_with_unit(
            "dial",
            "Time until the agent answered a dial",
            Unit::Seconds,
            metrics.dial_seconds.clone(),
        );
        registry.register_with_unit(
            "connection",
            "Duration of connections",
            Unit::Seconds,
            metrics.connection_seconds.clone(),
        );
        registry.register(
            "agent_handshakes",
            "Connections to the agent port, by result",
            metrics.handshakes.clone(),
        );
        registry.register(
            "agent_sessions_refused",
            "Sessions refused after their handshake, by reason",
            metrics.sessions_refused.clone(),
        );
        registry.register("tunnels", "Agents attached now", metrics.tunnels.clone());
        // Series start at zero, so that rates work from the first event on.
        for result in ["attached", "grpc", "failed", "turned_away"] {
            let _ = metrics.handshakes.get_or_create(&ResultLabel { result });
        }
        for result in ["impostor", "flood", "older"] {
            let _ = metrics.sessions_refused.get_or_create(&ResultLabel { result });
        }
        metrics
    }

    /// Starts a door's series at zero.
    pub fn door(&self, door: &'static str) {
        for outcome in Outcome::ALL {
            let _ = self.connections.get_or_create(&ConnectionLabels { door, outcome: outcome.as_str() });
        }
        let _ = self.active.get_or_create(&DoorLabel { door });
        let _ = self.refused.get_or_create(&DoorLabel { door });
    }

    pub(crate) fn opened(&self, door: &'static str) {
        self.active.get_or_create(&DoorLabel { door }).inc();
    }

    pub(crate) fn closed(&self, door: &'static str, outcome: Outcome, took: Duration) {
        self.active.get_or_create(&DoorLabel { door }).dec();
        self.connections.get_or_create(&ConnectionLabels { door, outcome: outcome.as_str() }).inc();
        self.connection_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn turned_away(&self, door: &'static str) {
        self.refused.get_or_create(&DoorLabel { door }).inc();
    }

    pub(crate) fn dialled(&self, took: Duration) {
        self.dial_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn handshake(&self, result: &'static str) {
        self.handshakes.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn session_refused(&self, result: &'static str) {
        self.sessions_refused.get_or_create(&ResultLabel { result }).inc();
    }

    /// Connections that `door` carries now.
    pub fn active_at(&self, door: &'static str) -> i64 {
        self.active.get_or_create(&DoorLabel { door }).get()
    }

    /// Connections of `door` that have ended.
    pub fn ended_at(&self, door: &'static str) -> u64 {
        Outcome::ALL
            .iter()
            .map(|outcome| {
                self.connections.get_or_create(&ConnectionLabels { door, outcome: outcome.as_str() }).get()
            })
            .sum()
    }
}

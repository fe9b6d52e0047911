//! The agent's metrics (`postern_agent_*`), updated by the code that they measure.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::Totals;
use tunnel_runtime::gauges::registered;
use tunnel_runtime::live::Live;
use tunnel_runtime::log_once::LogRarely;

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
    /// Of the messages about failed dials, by outcome: a port scan causes any number of these.
    failures_told: Arc<Mutex<BTreeMap<&'static str, LogRarely>>>,
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
            failures_told: Arc::default(),
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

    /// Counts a failed dial for this server, and logs it once a minute for each outcome.
    pub(crate) fn dial_failed(
        &self,
        outcome: &'static str,
        took: Duration,
        server: impl Display,
        reason: impl Display,
    ) {
        self.dialled(outcome, took);
        if let Some(left_out) = self.tells(outcome, Instant::now()) {
            tracing::info!(%server, %reason, left_out, "failed to connect to the target");
        }
    }

    /// Returns the number of failures left out since the last one that was logged, if this one is to be.
    fn tells(&self, outcome: &'static str, now: Instant) -> Option<u64> {
        self.failures_told.lock().entry(outcome).or_default().due(now)
    }

    pub(crate) fn outbound(&self, outcome: Outcome) {
        self.outbound.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        self.connections.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_scan_does_not_fill_the_log() {
        let (metrics, now) = (Metrics::new(&mut Registry::default()), Instant::now());
        assert_eq!(metrics.tells("refused", now), Some(0));
        assert_eq!((0..1000).filter_map(|_| metrics.clone().tells("refused", now)).count(), 0);
        assert_eq!(metrics.tells("denied", now), Some(0), "another reason");
        assert_eq!(metrics.tells("refused", now + Duration::from_secs(60)), Some(1000));
    }
}

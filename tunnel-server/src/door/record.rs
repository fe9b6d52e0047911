//! One connection's line in the access log and its metrics, written however the connection ends.

use std::fmt::Display;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_core::carry::Traffic;
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::DrainGuard;
use tunnel_core::outcome::Outcome;

use super::{Hall, Opening, millis_since};
use crate::admission::Admitted;
use crate::metrics::Metrics;
use crate::session::Session;

/// The target of the access log's events.
const ACCESS: &str = "tunnel_server::access";

/// A connection from the moment its node is known. Dropping it without [`Record::end`] (its task was cancelled, or
/// panicked) records that too.
pub(super) struct Record {
    door: &'static str,
    client: SocketAddr,
    node: NodeName,
    target: SocketAddr,
    started: Instant,
    to_node: u64,
    from_node: u64,
    outcome: Outcome,
    detail: String,
    metrics: Metrics,
    in_flight: DrainGuard,
    _place: Option<Admitted>,
}

impl Record {
    pub(super) fn new(
        door: &'static str,
        client: SocketAddr,
        opening: &Opening,
        hall: &Hall,
        place: Option<Admitted>,
    ) -> Self {
        hall.metrics.opened(door);
        Self {
            door,
            client,
            node: opening.node.clone(),
            target: opening.target,
            started: Instant::now(),
            to_node: 0,
            from_node: 0,
            outcome: Outcome::Shutdown,
            detail: String::new(),
            metrics: hall.metrics.clone(),
            in_flight: hall.drain.guard(),
            _place: place,
        }
    }

    /// Fires when the drain's time is up.
    pub(super) fn forced(&self) -> CancellationToken {
        self.in_flight.shutdown().forced_token().clone()
    }

    pub(super) fn dialled(&self, took: Duration) {
        self.metrics.dialled(took);
    }

    /// Counts a connection's bytes as they pass: for itself, for the session and for the metrics.
    pub(super) fn traffic(&self, session: &Session) -> Traffic {
        Traffic::part_of(vec![session.carried.clone(), self.metrics.carried.clone()])
    }

    /// Takes the bytes that were carried into the line.
    pub(super) fn carried(&mut self, traffic: &Traffic) {
        (self.to_node, self.from_node) = (traffic.from_socket(), traffic.to_socket());
    }

    /// Ends the record.
    pub(super) fn end(mut self, outcome: Outcome, detail: &dyn Display) {
        self.outcome = outcome;
        self.detail = detail.to_string();
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.metrics.closed(self.door, self.outcome, self.started.elapsed());
        tracing::info!(
            target: ACCESS,
            door = self.door,
            client = %self.client,
            node = %self.node,
            destination = %self.target,
            to_node = self.to_node,
            from_node = self.from_node,
            duration_ms = millis_since(self.started),
            outcome = %self.outcome,
            error = (!self.detail.is_empty()).then_some(self.detail.as_str()),
            "connection"
        );
    }
}

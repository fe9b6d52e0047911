//! A connection's access log line and metrics, recorded however the connection ends.

use std::fmt::Display;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tunnel_core::carry::{Totals, Traffic};
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::DrainGuard;
use tunnel_core::outcome::Outcome;

use super::context::{DoorContext, OpenRequest};
use crate::admission::Share;
use crate::metrics::Metrics;

/// The `tracing` target of the access log's events.
const ACCESS: &str = "tunnel_server::access";

/// A connection from when its node is known. Dropping it without [`AccessLogGuard::end`], as when its task is cancelled
/// or panics, records that too.
pub(crate) struct AccessLogGuard {
    door: &'static str,
    client: SocketAddr,
    node: NodeName,
    target: SocketAddr,
    started: Instant,
    to_node: u64,
    from_node: u64,
    outcome: Outcome,
    detail: String,
    /// The other server, of a connection that one passes on to another.
    via: Option<Box<str>>,
    metrics: Metrics,
    in_flight: DrainGuard,
    /// Boxed: the future of a connection holds several copies of this struct's size.
    place: Option<Box<Share>>,
}

impl AccessLogGuard {
    pub(crate) fn new(
        door: &'static str,
        client: SocketAddr,
        request: &OpenRequest,
        context: &DoorContext,
    ) -> Self {
        context.metrics.opened(door);
        Self {
            door,
            client,
            node: request.node.clone(),
            target: request.target,
            started: Instant::now(),
            to_node: 0,
            from_node: 0,
            outcome: Outcome::Shutdown,
            detail: String::new(),
            via: None,
            metrics: context.metrics.clone(),
            in_flight: context.drain.guard(),
            place: None,
        }
    }

    /// Another server has the node, or the client.
    pub(crate) fn via(&mut self, server_id: &str) {
        self.via = Some(server_id.into());
    }

    /// Keeps the connection's place until its end.
    pub(crate) fn hold(&mut self, place: Share) {
        self.place = Some(Box::new(place));
    }

    /// Why the connection ends when its link's [`crate::session::Link::over`] is cancelled.
    pub(crate) fn why_over(&self) -> Outcome {
        if self.in_flight.shutdown().is_forced() { Outcome::Shutdown } else { Outcome::TunnelLost }
    }

    pub(crate) fn dialled(&self, took: Duration) {
        self.metrics.dialled(took);
    }

    /// Counts the connection's bytes, and adds them to those of the session, or of the other server, and of all
    /// connections.
    pub(crate) fn traffic(&self, carried: &Totals) -> Traffic {
        Traffic::part_of(vec![carried.clone(), self.metrics.carried.clone()])
    }

    pub(crate) fn carried(&mut self, traffic: &Traffic) {
        (self.to_node, self.from_node) = (traffic.from_socket(), traffic.to_socket());
    }

    pub(crate) fn end(mut self, outcome: Outcome, detail: &dyn Display) {
        self.outcome = outcome;
        self.detail = detail.to_string();
    }
}

impl Drop for AccessLogGuard {
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
            duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            outcome = %self.outcome,
            via = self.via.as_deref(),
            error = (!self.detail.is_empty()).then_some(self.detail.as_str()),
            "connection"
        );
    }
}

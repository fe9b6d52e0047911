//! A connection's access log line and metrics, recorded however the connection ends.

use std::fmt::Display;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tunnel_core::carry::{Totals, Traffic};
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::DrainGuard;
use tunnel_core::outcome::Outcome;

use super::context::{DoorContext, OpenRequest};
use crate::admission::Share;
use crate::failures::Failure;
use crate::metrics::Metrics;

/// The `tracing` target of the access log's events.
const ACCESS: &str = "tunnel_server::access";

/// A connection from when its node is known. Dropping it without [`AccessLogGuard::end`], as when its task is cancelled
/// or panics, records that too.
pub(crate) struct AccessLogGuard {
    door: &'static str,
    client: SocketAddr,
    /// None: this server dials the target itself.
    node: Option<NodeName>,
    target: SocketAddr,
    started: Instant,
    to_node: u64,
    from_node: u64,
    outcome: Outcome,
    detail: String,
    /// The other server, of a connection that one passes on to another.
    via: Option<Box<str>>,
    /// Who has shown who it is, at a door that asks for that.
    caller: Option<Box<str>>,
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
        let mut record = Self::start(door, client, Some(request.node.clone()), request.target, context);
        if let Some(caller) = &request.caller {
            record.called_by(caller);
        }
        record
    }

    /// Of a connection to a target that is not an edge node's.
    pub(crate) fn direct(
        door: &'static str,
        client: SocketAddr,
        target: SocketAddr,
        context: &DoorContext,
    ) -> Self {
        Self::start(door, client, None, target, context)
    }

    fn start(
        door: &'static str,
        client: SocketAddr,
        node: Option<NodeName>,
        target: SocketAddr,
        context: &DoorContext,
    ) -> Self {
        context.metrics.opened(door);
        Self {
            door,
            client,
            node,
            target,
            started: Instant::now(),
            to_node: 0,
            from_node: 0,
            outcome: Outcome::Shutdown,
            detail: String::new(),
            via: None,
            caller: None,
            metrics: context.metrics.clone(),
            in_flight: context.drain.guard(),
            place: None,
        }
    }

    /// Another server has the node, or the client.
    pub(crate) fn via(&mut self, server_id: &str) {
        self.via = Some(server_id.into());
    }

    /// How it ended if it is dropped.
    pub(crate) fn presume(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Who it is for.
    pub(crate) fn called_by(&mut self, caller: &dyn Display) {
        self.caller = Some(caller.to_string().into());
    }

    /// When the connection has to end.
    pub(crate) fn forced(&self) -> &CancellationToken {
        self.in_flight.shutdown().forced_token()
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
            node = self.node.as_ref().map(display),
            destination = %self.target,
            to_node = self.to_node,
            from_node = self.from_node,
            duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            outcome = %self.outcome,
            via = self.via.as_deref(),
            caller = self.caller.as_deref(),
            error = (!self.detail.is_empty()).then_some(self.detail.as_str()),
            "connection"
        );
        if self.outcome != Outcome::Ok {
            self.metrics.failed(Failure {
                at: Instant::now(),
                door: self.door,
                client: self.client,
                node: self.node.take(),
                destination: self.target,
                outcome: self.outcome,
                detail: std::mem::take(&mut self.detail),
            });
        }
    }
}

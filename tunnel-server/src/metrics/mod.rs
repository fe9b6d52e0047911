//! The server's metrics of the data path (`postern_*`).

mod connection;
mod failures;
mod permit;

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Totals, end_quiet};
use tunnel_runtime::gauges::registered;
use tunnel_runtime::live::Live;

pub(crate) use connection::{Connection, Relayed};
pub(crate) use failures::FailedConnection;
use failures::Failures;
#[cfg(test)]
pub(crate) use permit::UNANSWERED;
pub(crate) use permit::{HeldPermit, Judgement, Permit};

use crate::admission::{Full, SourceBuckets};

/// Metrics by labels, which are name and value.
type By<const LABELS: usize, M> = Family<[(&'static str, &'static str); LABELS], M>;

/// Handles to the metrics; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    connections: By<2, Counter>,
    active: By<1, Gauge>,
    refused: By<1, Counter>,
    busy: By<2, Counter>,
    dial_seconds: Histogram,
    connection_seconds: Histogram,
    handshakes: By<1, Counter>,
    tls_handshakes: By<1, Counter>,
    sessions_refused: By<1, Counter>,
    enrolments: By<2, Counter>,
    /// The last connections that failed.
    pub(crate) failures: Arc<Failures>,
    warnings: Arc<Mutex<SourceBuckets>>,
    /// The connections that are open now.
    pub(crate) live: Arc<Live<Connection>>,
    /// Payload bytes, counted as they pass.
    pub relayed: Totals,
    /// Live sessions.
    pub tunnels: Gauge,
    /// Sessions whose agents are leaving.
    pub(crate) sessions_leaving: Gauge,
}

impl Metrics {
    /// Registers the metrics; `registry` has the prefix `postern` already.
    pub fn new(registry: &mut Registry) -> Self {
        let bytes = By::<1, Counter>::default();
        let direction = |direction| bytes.get_or_create(&[("direction", direction)]).clone();
        let relayed = Totals { from_socket: direction("to_node"), to_socket: direction("from_node") };
        let seconds = |registry: &mut Registry, name, help, first, factor| {
            let histogram = Histogram::new(exponential_buckets(first, factor, 8));
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let ended = "Connections that ended, by listener and outcome";
        let refused = "Clients that a listener turned away before a node was known";
        let busy = "Connections refused at a bound of a listener, by what has too many open: the listener, the source, the node, the source at one agent, or unauthenticated clients";
        let tls = "TLS handshakes that succeeded on the ports of agents, by whether they resumed a session";
        let enrolments = "Connections for an enrolment or a renewal, by whether the client showed a certificate and how they ended";
        let leaving = "Sessions of agents that have left or were replaced, which finish what they relay";
        registry.register_with_unit("relayed", "Relayed payload", Unit::Bytes, bytes);
        let metrics = Self {
            connections: registered(registry, "connections", ended),
            active: registered(registry, "connections_active", "Connections relayed now, by listener"),
            refused: registered(registry, "callers_refused", refused),
            busy: registered(registry, "connections_over_limit", busy),
            relayed,
            dial_seconds: seconds(registry, "dial", "Time until the agent answered a dial", 0.0005, 4.0),
            connection_seconds: seconds(registry, "connection", "Duration of connections", 0.001, 8.0),
            handshakes: registered(registry, "agent_handshakes", "Connections to the agent port, by result"),
            tls_handshakes: registered(registry, "agent_tls_handshakes", tls),
            sessions_refused: registered(
                registry,
                "agent_sessions_refused",
                "Sessions refused after their handshake, by reason",
            ),
            enrolments: registered(registry, "enrollment_connections", enrolments),
            failures: Arc::default(),
            warnings: Arc::new(Mutex::new(SourceBuckets::of_warnings())),
            live: Arc::default(),
            tunnels: registered(registry, "tunnels", "Agents attached now"),
            sessions_leaving: registered(registry, "agent_sessions_leaving", leaving),
        };
        // Series start at zero, so that rates work from the first event.
        for result in [
            "attached",
            "additional",
            "peer",
            "redirector",
            "outbound",
            "grpc",
            "failed",
            "turned_away",
            "silent",
            "left",
            "evicted",
        ] {
            let _ = metrics.handshakes.get_or_create(&[("result", result)]);
        }
        for resumed in ["true", "false"] {
            let _ = metrics.tls_handshakes.get_or_create(&[("resumed", resumed)]);
        }
        let results = [
            "impostor",
            "flood",
            "older",
            "revoked",
            "superseded",
            "retired",
            "expired",
            "unknown_node",
            "edge_node",
            "token",
        ];
        for result in results {
            let _ = metrics.sessions_refused.get_or_create(&[("result", result)]);
        }
        for client in ["certified", "unauthenticated"] {
            for result in ["answered", "left", "idle", "slow", "evicted", "refused", "draining"] {
                let _ = metrics.enrolments.get_or_create(&[("client", client), ("result", result)]);
            }
        }
        metrics
    }

    /// Starts the series of a listener at zero.
    pub fn listener(&self, listener: &'static str) {
        for outcome in Outcome::ALL {
            let _ = self.connections.get_or_create(&[("listener", listener), ("outcome", outcome.as_str())]);
        }
        let _ = self.active.get_or_create(&[("listener", listener)]);
        let _ = self.refused.get_or_create(&[("listener", listener)]);
        for reason in Full::LABELS {
            let _ = self.busy.get_or_create(&[("listener", listener), ("reason", reason)]);
        }
    }

    pub(crate) fn opened(&self, listener: &'static str) {
        self.active.get_or_create(&[("listener", listener)]).inc();
    }

    pub(crate) fn closed(&self, listener: &'static str, outcome: Outcome, took: Duration) {
        self.active.get_or_create(&[("listener", listener)]).dec();
        self.connections.get_or_create(&[("listener", listener), ("outcome", outcome.as_str())]).inc();
        self.connection_seconds.observe(took.as_secs_f64());
    }

    /// Like [`Metrics::closed`], for a connection that was not relayed: its duration means nothing.
    pub(crate) fn answered(&self, listener: &'static str) {
        self.active.get_or_create(&[("listener", listener)]).dec();
        self.connections.get_or_create(&[("listener", listener), ("outcome", Outcome::Ok.as_str())]).inc();
    }

    /// Returns the connections whose right is judged again while they are open.
    pub(crate) fn judged_connections(&self) -> Vec<Arc<Connection>> {
        self.live.all_that(|connection| connection.permit.get().is_some())
    }

    /// Ends each connection as soon as it relays nothing.
    pub(crate) async fn end_quiet(&self) {
        end_quiet(|| self.live.all(), Connection::relaying).await;
    }

    /// The same, of the connections that are on these links now.
    pub(crate) async fn end_quiet_on(&self, links: &[Arc<Flow>]) {
        let connections = self.live.all_that(|connection| connection.is_on(links));
        let connections: Vec<_> = connections.iter().map(Arc::downgrade).collect();
        // Where many agents end at once, as in an update, few of them relay anything.
        if connections.is_empty() {
            return;
        }
        end_quiet(|| connections.iter().filter_map(Weak::upgrade).collect(), Connection::relaying).await;
    }

    pub(crate) fn turned_away(&self, listener: &'static str) {
        self.refused.get_or_create(&[("listener", listener)]).inc();
    }

    /// Reports whether a refused client is worth a warning: not those after the first hundred of its source, and one a second.
    pub(crate) fn warns_of(&self, client: IpAddr) -> bool {
        self.warnings.lock().take(client, Instant::now())
    }

    pub(crate) fn over_limit(&self, listener: &'static str, reason: &Full) {
        self.busy.get_or_create(&[("listener", listener), ("reason", reason.label())]).inc();
    }

    pub(crate) fn enrolment(&self, client: &'static str, result: &'static str) {
        self.enrolments.get_or_create(&[("client", client), ("result", result)]).inc();
    }

    pub(crate) fn dialled(&self, took: Duration) {
        self.dial_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn handshake(&self, result: &'static str) {
        self.handshakes.get_or_create(&[("result", result)]).inc();
    }

    pub(crate) fn tls_handshake(&self, resumed: bool) {
        let resumed = if resumed { "true" } else { "false" };
        self.tls_handshakes.get_or_create(&[("resumed", resumed)]).inc();
    }

    pub(crate) fn session_refused(&self, result: &'static str) {
        self.sessions_refused.get_or_create(&[("result", result)]).inc();
    }

    pub fn active_at(&self, listener: &'static str) -> i64 {
        self.active.get_or_create(&[("listener", listener)]).get()
    }

    pub fn ended_at(&self, listener: &'static str) -> u64 {
        Outcome::ALL
            .iter()
            .map(|outcome| {
                self.connections.get_or_create(&[("listener", listener), ("outcome", outcome.as_str())]).get()
            })
            .sum()
    }
}

//! The state of one session.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls_pki_types::CertificateDer;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tunnel_core::carry::StallBound;
use tunnel_core::link::{self, Flow};
use tunnel_core::proto::{AgentEvent, Draining, agent_event};

use super::shared::{Announced, Shared};
use crate::dial::Dialler;
use crate::metrics::Metrics;

type EventResult = Result<AgentEvent, tonic::Status>;

/// One session with one server.
pub(super) struct SessionState {
    pub(super) shared: Arc<Shared>,
    /// The server's address as configured.
    pub(super) server: String,
    pub(super) epoch: u64,
    pub(super) dialler: Dialler,
    pub(super) stalls: StallBound,
    /// Ends the session.
    pub(super) stop: CancellationToken,
    pub(super) flow: Arc<Flow>,
    pub(super) loopback_ports: ArcSwap<BTreeSet<u16>>,
    pub(super) phase: watch::Sender<SessionPhase>,
    /// Read by the server once it has attached.
    pub(super) events: mpsc::Sender<EventResult>,
    event_stream: Mutex<Option<mpsc::Receiver<EventResult>>>,
    server_chain: Arc<[CertificateDer<'static>]>,
    connections: Arc<AtomicU32>,
}

/// How far a session is, mostly by what the server has said about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum SessionPhase {
    /// Connected, not yet attached.
    #[default]
    Connecting,
    /// The server called Attach: the session is in use.
    Attached {
        /// The server's own name for itself.
        server_id: String,
        since: SystemTime,
    },
    /// The server is attached already, through the other address.
    SameServer { through: String },
    /// The server stops soon, or this agent leaves it: nothing new is opened.
    Draining,
    /// The server refused this session, for this reason.
    Refused(String),
    /// The server may take the next one.
    RefusedForNow(String),
    /// The server will never accept this certificate again.
    CertificateRefused(String),
    /// A newer session of this node, from `peer`, took over; this one must not fight it.
    Replaced { peer: String },
}

impl SessionState {
    pub(super) fn new(
        shared: Arc<Shared>,
        server: String,
        epoch: u64,
        server_chain: Arc<[CertificateDer<'static>]>,
        flow: Arc<Flow>,
    ) -> Self {
        let (events, event_stream) = mpsc::channel(64);
        Self {
            dialler: Dialler::new(shared.policy.clone()),
            stop: shared.forced.child_token(),
            shared,
            server,
            epoch,
            stalls: StallBound::new(link::AGENT_STALL_BYTES, link::STREAM_WINDOW as usize),
            flow,
            loopback_ports: ArcSwap::default(),
            phase: watch::Sender::default(),
            events,
            event_stream: Mutex::new(Some(event_stream)),
            server_chain,
            connections: Arc::default(),
        }
    }

    /// Counts a carried connection until the guard is dropped.
    pub(super) fn connection(&self) -> ConnectionGuard {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let metrics = self.shared.metrics.clone();
        metrics.connections_active.inc();
        ConnectionGuard { connections: self.connections.clone(), metrics }
    }

    pub(super) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Passes a trust bundle on to be installed.
    pub(super) async fn announce(&self, bundle: String) {
        let (server, server_chain) = (self.server.clone(), self.server_chain.clone());
        let _ = self.shared.bundles.send(Announced { bundle, server, server_chain }).await;
    }

    /// Whether the server has ever had this session in use.
    pub(super) fn was_attached(&self) -> bool {
        !matches!(&*self.phase.borrow(), SessionPhase::Connecting | SessionPhase::SameServer { .. })
    }

    /// Tells the server to open nothing new here, and ends the session once nothing is carried, as when the server drains.
    pub(super) fn leave(&self) {
        // A full queue means that the server does not read its events; then it learns from the end of the link.
        let _ = self.events.try_send(Ok(draining()));
        self.phase.send_replace(SessionPhase::Draining);
    }

    /// The receiver of `events`, for the first Attach only.
    pub(super) fn take_event_stream(&self) -> Option<mpsc::Receiver<EventResult>> {
        self.event_stream.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

pub(super) const fn draining() -> AgentEvent {
    AgentEvent { event: Some(agent_event::Event::Draining(Draining {})) }
}

/// Counts a carried connection.
pub(super) struct ConnectionGuard {
    connections: Arc<AtomicU32>,
    metrics: Metrics,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections_active.dec();
    }
}

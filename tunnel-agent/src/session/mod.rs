//! The sessions with the servers: dial, attach, serve, and dial again.

mod epoch;
mod link_loop;
mod links;
mod refusal;
mod serve;
mod service;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tunnel_core::carry::StallBound;
use tunnel_core::identity::NodeName;
use tunnel_core::link::{self, Rtt};
use tunnel_core::proto::{AgentEvent, Draining, agent_event};

pub use epoch::{EpochError, EpochSource};
pub use link_loop::{LinkLoop, LinkStatus, Phase};
pub use links::Links;
pub use serve::{SessionEnd, present_chain};

use crate::metrics::Metrics;
use crate::policy::Policy;

/// Dials that may be pending at once for one server: a black hole behind the node must not hold unbounded state.
pub const PENDING_DIALS: usize = 512;

/// What every session of this agent shares.
pub struct Shared {
    /// The node that the certificate names.
    pub node: NodeName,
    /// Numbers the sessions.
    pub epochs: EpochSource,
    /// What may be dialled.
    pub policy: Arc<Policy>,
    /// The node's addresses, as told to the servers.
    pub addresses: watch::Receiver<Arc<Vec<IpAddr>>>,
    /// Takes the trust bundles that servers announce.
    pub bundles: mpsc::Sender<Announced>,
    /// Which servers are attached, and through which address.
    pub attached: Attached,
    /// Counters.
    pub metrics: Metrics,
    /// Take nothing new, finish what is carried.
    pub draining: CancellationToken,
    /// End everything.
    pub forced: CancellationToken,
}

/// The servers that are attached: two addresses that lead to one server must not take turns replacing each other.
#[derive(Debug, Default)]
pub struct Attached {
    /// Server id to configured address, and the session's number.
    servers: Mutex<HashMap<String, (String, u64)>>,
    released: Notify,
}

impl Attached {
    /// Claims a server for the link through `address`.
    ///
    /// # Errors
    /// The address through which it is attached already.
    fn claim(&self, server_id: &str, address: &str, epoch: u64) -> Result<(), String> {
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        match servers.get(server_id) {
            Some((other, _)) if other != address => Err(other.clone()),
            _ => {
                servers.insert(server_id.to_owned(), (address.to_owned(), epoch));
                Ok(())
            }
        }
    }

    /// Gives up what a session claimed, and not what its successor through the same address did.
    fn release(&self, epoch: u64) {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, (_, holder)| *holder != epoch);
        self.released.notify_waiters();
    }

    /// Waits until some link gives up its server.
    async fn released(&self) {
        self.released.notified().await;
    }
}

/// A trust bundle that a server announced over its session.
#[derive(Debug)]
pub struct Announced {
    /// PEM.
    pub bundle: String,
    /// The server's address as configured.
    pub server: String,
    /// What the server showed in its TLS handshake, leaf first.
    pub server_chain: Arc<[CertificateDer<'static>]>,
}

/// One session with one server.
pub struct SessionState {
    pub(crate) shared: Arc<Shared>,
    /// The server's address as configured.
    pub(crate) server: String,
    pub(crate) epoch: u64,
    pub(crate) policy: Arc<Policy>,
    pub(crate) metrics: Metrics,
    pub(crate) stalls: StallBound,
    pub(crate) pending: Semaphore,
    pub(crate) stop: CancellationToken,
    pub(crate) rtt: Rtt,
    server_chain: Arc<[CertificateDer<'static>]>,
    connections: Arc<AtomicU32>,
    loopback_ports: ArcSwap<BTreeSet<u16>>,
    notices: watch::Sender<Notice>,
    events: mpsc::Sender<Result<AgentEvent, tonic::Status>>,
    /// Handed to the first Attach.
    event_stream: Mutex<Option<mpsc::Receiver<Result<AgentEvent, tonic::Status>>>>,
}

/// What the server told about this session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Notice {
    /// Connected, not yet attached.
    #[default]
    Connecting,
    /// Attach was called: the session is in use.
    Attached {
        /// The server's own name for itself.
        server_id: String,
        /// When.
        since: SystemTime,
    },
    /// The server is attached already, through another address.
    SameServer {
        /// That address.
        through: String,
    },
    /// The server stops soon.
    Draining,
    /// The server does not take this session.
    Refused(String),
    /// A newer session of the same node took over; this one must not fight it.
    Replaced {
        /// Where the newer session comes from.
        peer: String,
    },
}

impl SessionState {
    fn new(
        shared: Arc<Shared>,
        server: String,
        epoch: u64,
        server_chain: Arc<[CertificateDer<'static>]>,
    ) -> Self {
        let (events, event_stream) = mpsc::channel(64);
        Self {
            policy: shared.policy.clone(),
            metrics: shared.metrics.clone(),
            stop: shared.forced.child_token(),
            shared,
            server,
            epoch,
            stalls: StallBound::new(link::AGENT_STALL_BYTES, link::STREAM_WINDOW as usize),
            pending: Semaphore::new(PENDING_DIALS),
            rtt: Rtt::default(),
            server_chain,
            connections: Arc::default(),
            loopback_ports: ArcSwap::default(),
            notices: watch::Sender::new(Notice::default()),
            events,
            event_stream: Mutex::new(Some(event_stream)),
        }
    }

    /// Counts a carried connection until the guard is dropped.
    pub(crate) fn connection(&self) -> ConnectionGuard {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.metrics.connections_active.inc();
        ConnectionGuard { connections: self.connections.clone(), metrics: self.metrics.clone() }
    }

    pub(crate) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn loopback_ports(&self) -> Arc<BTreeSet<u16>> {
        self.loopback_ports.load_full()
    }

    pub(crate) const fn pending_limit(&self) -> usize {
        PENDING_DIALS
    }

    /// Hands a bundle on to whoever keeps the identity.
    async fn announce(&self, bundle: String) {
        let (server, server_chain) = (self.server.clone(), self.server_chain.clone());
        let _ = self.shared.bundles.send(Announced { bundle, server, server_chain }).await;
    }

    /// Whether the server has had this session in use.
    fn was_attached(&self) -> bool {
        !matches!(&*self.notices.borrow(), Notice::Connecting | Notice::SameServer { .. })
    }

    /// Tells the server to open nothing new here, and ends the session once nothing is carried, as when the server drains.
    fn leave(&self) {
        let event = AgentEvent { event: Some(agent_event::Event::Draining(Draining {})) };
        // A full queue means that the server does not read its events; then it learns it from the end of the link.
        let _ = self.events.try_send(Ok(event));
        self.notices.send_replace(Notice::Draining);
    }

    fn take_event_stream(&self) -> Option<mpsc::Receiver<Result<AgentEvent, tonic::Status>>> {
        self.event_stream.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A carried connection in the session's count.
pub(crate) struct ConnectionGuard {
    connections: Arc<AtomicU32>,
    metrics: Metrics,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections_active.dec();
    }
}

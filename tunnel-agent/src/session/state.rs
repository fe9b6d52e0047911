//! State of one session.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tunnel_link::link;
use tunnel_link::proto::{AgentEvent, Load, agent_event};
use tunnel_link::relay::{Abort, Relay, Side, StallBound, Traffic};
use tunnel_pki::enrol::Announced;
use tunnel_runtime::live::{Live, Present};

use super::connect::Path;
use super::session_end::Refusal;
use super::shared::Shared;
use crate::busy::{Busy, BusyGuard, Counted};
use crate::dial::Dialler;

/// Maximum number of ports in one line of the log.
const LOGGED: usize = 8;

type EventResult = Result<AgentEvent, tonic::Status>;

/// One link of a session with one server: the first, by which the server controls the session, or an additional one.
pub(super) struct SessionState {
    pub(super) shared: Arc<Shared>,
    /// The server's address as configured.
    pub(super) server: Arc<str>,
    pub(super) path: Path,
    pub(super) epoch: u64,
    /// Epochs of the earlier sessions with this server that finish what they relay.
    pub(super) finishing: Vec<u64>,
    /// Number of the link in the session, 0 for the first.
    pub(super) link: u32,
    pub(super) common: Arc<Common>,
    /// Ends the link. On the first link, ends the session.
    pub(super) stop: CancellationToken,
    /// Cancelled with `stop`, or earlier to tell the server that this session ends on purpose. It opens no more streams then, and
    /// closes the link once its connections have ended.
    pub(super) farewell: CancellationToken,
    /// Cancelled when this agent drains or leaves the server. The session then ends once it has no connections left.
    pub(super) leaving: CancellationToken,
    /// Takes the numbers of additional links that the server asks for.
    pub(super) asked: Option<mpsc::Sender<u32>>,
    pub(super) phase: watch::Sender<SessionPhase>,
    /// Set while nothing arrives on the link although it should.
    pub(super) silent: AtomicBool,
    /// Cancelled when the server serves no more and sends nothing new.
    pub(super) served: CancellationToken,
    /// Cancelled when a later session with the same server, or its successor, is in use.
    pub(super) superseded: CancellationToken,
    /// Read by the server once it has attached.
    pub(super) events: mpsc::Sender<EventResult>,
    event_stream: Mutex<Option<mpsc::Receiver<EventResult>>>,
    /// The first link, for an additional one.
    first: Option<Arc<Self>>,
}

/// State shared by all links of a session.
pub(super) struct Common {
    pub(super) dialler: Dialler,
    pub(super) stalls: StallBound,
    pub(super) loopback_ports: ArcSwap<BTreeSet<u16>>,
    /// On all links.
    pub(super) connections: Arc<Busy>,
    /// Numbers of additional links that are connecting or connected.
    additional: Arc<Live<u32>>,
}

impl Common {
    /// Reserves the number of an additional link until it is dropped. `None` if it is in use, or not one that a server
    /// may ask for. Only the session's own task calls this: two calls at once might reserve the same number.
    pub(super) fn place(&self, number: u32) -> Option<Present<u32>> {
        let asked = (1..link::MAX_LINKS).contains(&number);
        let free = asked && self.additional.all_that(|used| *used == number).is_empty();
        free.then(|| self.additional.enter(number))
    }
}

/// Progress of a session, mostly as the server reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum SessionPhase {
    /// Connected, not yet attached.
    #[default]
    Connecting,
    /// The server called Attach: the session is in use.
    Attached {
        /// The server's own name for itself.
        server_id: String,
        since: Instant,
    },
    /// The session is not wanted.
    Refused(Refusal),
    /// The server stops soon, or another takes over from it.
    Draining,
    /// A session of this agent's successor took over. This one finishes its connections.
    Succeeded,
}

impl SessionState {
    /// The first link. `asked` takes the numbers of the links that the server asks for.
    pub(super) fn first(
        shared: Arc<Shared>,
        server: &str,
        (epoch, finishing): (u64, Vec<u64>),
        path: Path,
        asked: mpsc::Sender<u32>,
        leaving: CancellationToken,
    ) -> Self {
        let (events, event_stream) = mpsc::channel(64);
        let common = Common {
            dialler: Dialler::new(&shared.runtime),
            stalls: StallBound::new(link::AGENT_STALL_BYTES, link::STREAM_WINDOW as usize),
            loopback_ports: ArcSwap::default(),
            connections: Arc::default(),
            additional: Arc::default(),
        };
        let stop = shared.runtime.shutdown.forced_token().child_token();
        Self {
            farewell: stop.child_token(),
            stop,
            leaving,
            shared,
            server: server.into(),
            path,
            epoch,
            finishing,
            link: 0,
            common: Arc::new(common),
            asked: Some(asked),
            phase: watch::Sender::default(),
            silent: AtomicBool::new(false),
            served: CancellationToken::new(),
            superseded: CancellationToken::new(),
            events,
            event_stream: Mutex::new(Some(event_stream)),
            first: None,
        }
    }

    /// An additional link of the session that began with `first`. It ends with that session.
    pub(super) fn additional(first: Arc<Self>, link: u32, path: Path) -> Self {
        let (events, event_stream) = mpsc::channel(1);
        let stop = first.stop.child_token();
        Self {
            farewell: stop.child_token(),
            stop,
            leaving: first.leaving.clone(),
            shared: first.shared.clone(),
            server: first.server.clone(),
            path,
            epoch: first.epoch,
            finishing: Vec::new(),
            link,
            common: first.common.clone(),
            asked: None,
            phase: watch::Sender::default(),
            silent: AtomicBool::new(false),
            served: CancellationToken::new(),
            superseded: CancellationToken::new(),
            events,
            event_stream: Mutex::new(Some(event_stream)),
            first: Some(first),
        }
    }

    /// Claims the server, unless another address leads to it or this session ends. An additional link only checks that it has
    /// reached the server of its session.
    ///
    /// # Errors
    /// The reason why not, as sent to the server.
    pub(super) fn claim(&self, server_id: &str) -> Result<(), String> {
        match &self.first {
            None => {
                self.shared.attached.claim(server_id, &self.server, self.epoch).map_err(|through| {
                    let reason = format!("this agent is attached to this server through {through}");
                    self.phase.send_replace(SessionPhase::Refused(Refusal::SameServer(through)));
                    reason
                })?;
                if self.leaving.is_cancelled() || self.stop.is_cancelled() {
                    self.release();
                    return Err("this agent leaves this server".to_owned());
                }
                Ok(())
            }
            Some(first) => match &*first.phase.borrow() {
                SessionPhase::Attached { server_id: other, .. } if other == server_id => Ok(()),
                _ => {
                    self.phase.send_replace(SessionPhase::Refused(Refusal::OtherServer));
                    Err("this link is for the session with another server".to_owned())
                }
            },
        }
    }

    /// Releases the claim of [`Self::claim`].
    pub(super) fn release(&self) {
        if self.first.is_none() {
            self.shared.attached.release(self.epoch);
        }
    }

    /// Stores the loopback ports that the server names. The agent's policy bounds them at each dial.
    pub(super) fn name_loopback_ports(&self, ports: BTreeSet<u16>) {
        let policy = &self.shared.runtime.policy;
        let refused: Vec<_> =
            ports.iter().filter(|port| !policy.opens_loopback(**port)).take(LOGGED).collect();
        let changed = **self.common.loopback_ports.load() != ports;
        if changed && !refused.is_empty() && policy.follows_servers() {
            tracing::warn!(
                server = %self.server, ports = ?refused,
                fix = "add them to --loopback-ports if servers may open them",
                "server names loopback ports that --loopback-ports does not contain, keeping them closed"
            );
        }
        self.common.loopback_ports.store(Arc::new(ports));
    }

    /// Counts a relayed connection until both are dropped.
    pub(super) fn connection(&self) -> (BusyGuard, Counted) {
        (self.common.connections.hold(), Counted::new(&self.shared.runtime.metrics.connections_active))
    }

    /// Number of connections that the session relays, on all links.
    pub(super) fn connections(&self) -> u32 {
        u32::try_from(self.common.connections.count()).unwrap_or(u32::MAX)
    }

    /// The relay of a connection on this link.
    pub(super) fn relay<'a>(&'a self, abort: &'a Arc<Abort>, traffic: &'a Traffic) -> Relay<'a> {
        Relay { side: Side::Agent, flow: &self.path.flow, stalls: &self.common.stalls, abort, traffic }
    }

    /// Sends the server an event that means nothing, to get traffic on the link.
    pub(super) fn nudge(&self) {
        let event = agent_event::Event::Load(Load::default());
        // A full queue means that the server does not read its events.
        let _ = self.events.try_send(Ok(AgentEvent { event: Some(event) }));
    }

    /// Number of links of the session, connected or connecting.
    pub(super) fn links(&self) -> usize {
        1 + self.common.additional.all().len()
    }

    /// Hands a trust bundle over to be installed. The server does not wait: the queue is full while a disk does not answer.
    pub(super) fn announce(&self, bundle: String) {
        let (server, server_chain) = (self.server.to_string(), self.path.chain.clone());
        let (bundles, stop) = (self.shared.bundles.clone(), self.stop.clone());
        let announced = Announced { bundle, server, server_chain };
        if let Err(TrySendError::Full(announced)) = bundles.try_send(announced) {
            tokio::spawn(stop.run_until_cancelled_owned(async move { bundles.send(announced).await }));
        }
    }

    /// True if the server has ever had this session in use.
    pub(super) fn was_attached(&self) -> bool {
        let phase = self.phase.borrow();
        !matches!(&*phase, SessionPhase::Connecting | SessionPhase::Refused(Refusal::SameServer(_)))
    }

    /// Returns the receiver of `events`, to the first Attach only.
    pub(super) fn take_event_stream(&self) -> Option<mpsc::Receiver<EventResult>> {
        self.event_stream.lock().take()
    }
}

//! The common part of the first link of a session and of additional ones.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::PingPong;
use h2::client::SendRequest;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tunnel_link::grpc::Channel;
use tunnel_link::link::{self, Congestion, Flow, HANDSHAKE_TIMEOUT};
use tunnel_link::proto::agent_client::AgentClient;
use tunnel_link::proto::{Notice, Refused, notice};
use tunnel_pki::TrustBundle;
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use crate::metrics::Metrics;
use crate::pki::{Refusal, Standing};
use crate::runtime::settings::Settings;
use crate::session::{Fenced, Session, Sessions};

/// How long an agent may take to acknowledge a notice.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for the last bytes of a link that has ended, or of the additional links of an agent that has left.
const LAST_BYTES: Duration = Duration::from_secs(10);
/// Events that an agent may send within [`EVENT_SPAN`]; more is a flood.
pub(super) const MAX_EVENTS: u32 = 200;
pub(super) const EVENT_SPAN: Duration = Duration::from_secs(10);

/// The parts that another server of this host has taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Handover {
    #[default]
    Nothing,
    /// It accepts the agents, and this one still the connections to them. They are told within the time `over`, not all at
    /// once: each dials at once.
    Agents {
        over: Duration,
    },
    All,
}

/// The context of all links.
pub struct LinkContext {
    pub server_id: String,
    /// The roots to announce to agents.
    pub bundle: watch::Receiver<Arc<TrustBundle>>,
    /// For the ports that agents dial on their node's loopback.
    pub settings: watch::Receiver<Arc<Settings>>,
    pub sessions: Arc<Sessions>,
    /// The nodes whose agents may have sessions.
    pub standing: Standing,
    pub metrics: Metrics,
    /// Agents are notified; nothing new is accepted.
    pub draining: CancellationToken,
    pub handover: watch::Receiver<Handover>,
    /// Ends every connection: the time of the drain is up.
    pub forced: CancellationToken,
    /// Ends every link.
    pub stop: CancellationToken,
    /// Of the links.
    pub congestion: Congestion,
    /// How many streams a link opens before another one takes its place.
    pub most_streams: u32,
    /// How long the drain may take, for the agents to know.
    pub drain_timeout: Duration,
}

/// Why a link has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("link lost: {}", link::reason(.0))]
    Link(#[from] h2::Error),
    #[error("the agent closed the connection")]
    Closed,
    #[error("the agent has left")]
    Left,
    #[error(transparent)]
    Dead(#[from] link::LinkDead),
    #[error("the agent did not answer Attach within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    NoHello,
    #[error("evicted: too many unauthenticated connections")]
    Evicted,
    #[error("Attach failed: {}", printable(.0.message(), 200))]
    Attach(Box<Status>),
    #[error("link lost: {}", printable(&link::reason(&**.0), 200))]
    Lost(Box<Status>),
    #[error("the agent's first event is not Hello")]
    NotHello,
    #[error("the certificate names node {certified}, but Hello says {claimed:?}")]
    Impostor { certified: NodeName, claimed: String },
    #[error(transparent)]
    Fenced(#[from] Fenced),
    #[error(transparent)]
    NotAdmitted(#[from] Refusal),
    #[error("the agent sent Hello again")]
    HelloAgain,
    #[error("the agent sent more than {MAX_EVENTS} events in {} s", EVENT_SPAN.as_secs())]
    Flood,
    #[error("closed by this server: replaced, failed, one of too many, or stopping")]
    Stopped,
    #[error("{0}")]
    NotJoined(String),
    #[error("an additional link sends no events")]
    Unasked,
    #[error("no longer needed")]
    Idle,
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Attach(Box::new(status))
    }
}

impl End {
    pub(super) const fn label(&self) -> &'static str {
        match self {
            Self::Impostor { .. } => "impostor",
            Self::Flood => "flood",
            Self::Fenced(_) => "older",
            Self::NotAdmitted(refusal) => refusal.label(),
            _ => "failed",
        }
    }
}

/// A link whose HTTP/2 connection is driven by another task.
pub(super) struct Transport {
    pub(super) send: SendRequest<Bytes>,
    pub(super) pings: PingPong,
    pub(super) flow: Arc<Flow>,
}

pub(super) fn refused(reason: String) -> notice::Notice {
    notice::Notice::Refused(Refused { reason, ..Refused::default() })
}

/// After the agent has left on purpose: lets clients that read slowly receive what was relayed.
pub(super) async fn finish(context: &LinkContext, session: &Session, connections: impl Fn() -> u32) {
    tokio::select! {
        () = idle(connections) => {}
        () = session.closed.cancelled() => {}
        () = context.stop.cancelled() => {}
        () = tokio::time::sleep(context.drain_timeout) => {}
    }
}

/// Calls `end` once there are no connections any more, as clients may still receive their last bytes.
pub(super) fn end_after_last_bytes(
    session: &Arc<Session>,
    connections: impl Fn() -> u32 + Send + 'static,
    end: impl FnOnce() + Send + 'static,
) {
    let Some(runtime) = Handle::try_current().ok().filter(|_| connections() > 0) else { return end() };
    let closed = session.closed.clone();
    runtime.spawn(async move {
        let _ = closed.run_until_cancelled(tokio::time::timeout(LAST_BYTES, idle(connections))).await;
        end();
    });
}

/// Returns true if the agent has answered. If not, it may never learn of it: the call is reset, behind which it is as good as lost.
pub(super) async fn notify(client: &mut AgentClient<Channel>, notice: notice::Notice) -> bool {
    let notice = Notice { notice: Some(notice) };
    match tokio::time::timeout(NOTICE_TIMEOUT, Box::pin(client.notify(notice))).await {
        Ok(Ok(_)) => true,
        Ok(Err(status)) => {
            tracing::debug!(error = %status, "agent refused a notice");
            true
        }
        Err(_) => {
            tracing::debug!("agent did not acknowledge a notice in time");
            false
        }
    }
}

/// Waits until there are no connections any more.
async fn idle(connections: impl Fn() -> u32) {
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    while connections() > 0 {
        tick.tick().await;
    }
}

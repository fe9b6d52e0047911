//! AgentService: each call is one agent's stream.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::konnectivity::agent_service_server::AgentService;
use tunnel_link::konnectivity::{Packet, Packets, single};
use tunnel_link::link::Flow;
use tunnel_link::proto::Hello;
use tunnel_runtime::NodeName;
use tunnel_runtime::text::printable;

use super::agent;
use super::identity::{AgentTokens, ByToken, by_token};
use super::state::Agent;
use crate::agent_port::attach::{self, Presented};
use crate::agent_port::handshakes::Handshakes;
use crate::agent_port::limits::CertifiedPlace;
use crate::peers::Peers;
use crate::pki::{Credential, Refusal};
use crate::session::Sessions;

/// Version shown for such an agent.
const VERSION: &str = "konnectivity";
/// Maximum number of packets that wait for an agent to read, of at most 32 KiB each.
const PACKETS: usize = 64;
/// Size of the buffer between the session and the agent's end of it, in bytes each way.
const PIPE: usize = 256 << 10;
/// Maximum time that an agent's second stream waits for the end of its first: an agent closes one to a server that it
/// already has.
const OLDER: Duration = Duration::from_secs(5);
/// Maximum time that a session in use lasts once its agent's token has expired.
const EXPIRED: Duration = Duration::from_secs(3600);

/// The port; serves connections in `mod.rs`.
pub struct KonnectivityPort {
    pub(in crate::agent_port) handshakes: Handshakes,
    pub(in crate::agent_port) tokens: Arc<AgentTokens>,
    /// Counts the servers: agents are told the number.
    pub(in crate::agent_port) peers: Arc<Peers>,
}

/// The service of one connection.
pub(super) struct Service {
    pub(super) port: Arc<KonnectivityPort>,
    pub(super) peer: SocketAddr,
    /// From its certificate, if it has one.
    pub(super) certified: Option<Presented>,
    pub(super) worker: Handle,
    /// Cancelled by the first accepted call.
    pub(super) attached: CancellationToken,
    /// The accepted calls.
    pub(super) streams: TaskTracker,
}

#[tonic::async_trait]
impl AgentService for Service {
    type ConnectStream = ReceiverStream<Result<Packet, Status>>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (metadata, peer, context) = (request.metadata(), self.peer, &self.port.handshakes.context);
        let turned_away = |status: Status| {
            tracing::warn!(%peer, reason = printable(status.message(), 300), "konnectivity agent rejected");
            context.metrics.handshake("failed");
            status
        };
        let agent_id = single(metadata, "agentid").ok_or_else(|| {
            turned_away(Status::invalid_argument("one agentid is needed in the call's metadata"))
        })?;
        let (presented, by_token) = match &self.certified {
            Some(presented) => (presented.clone(), None),
            None => {
                let by_token = by_token(&self.port.tokens, metadata, peer.ip()).await;
                let by_token = by_token.map_err(turned_away)?;
                // Now: the API server accepts no token of a deleted node.
                let credential = Arc::new(Credential::token(SystemTime::now()));
                (Presented { node: by_token.node.clone(), credential }, Some(by_token))
            }
        };
        let node = presented.node.clone();
        let identifiers = single(metadata, "agentidentifiers").unwrap_or_default();
        tracing::info!(
            %node, %peer,
            agent_id = printable(agent_id, 100),
            identifiers = printable(identifiers, 300),
            "konnectivity agent connected"
        );
        if let Some(live) = context.sessions.get(&node)
            && live.agent_version != VERSION
        {
            let reason = format!("node {node} has a tunnel-agent, which is attached");
            return Err(turned_away(Status::failed_precondition(reason)));
        }
        let Some(place) = self.port.handshakes.limits.certified(&node, peer.ip()) else {
            return Err(turned_away(Status::resource_exhausted("too many connections of this node")));
        };
        let under_way = self.streams.token();
        self.attached.cancel();
        let (packets, answers) = mpsc::channel(PACKETS);
        let servers = self.port.peers.servers(&context.server_id);
        let mut response = Response::new(ReceiverStream::new(answers));
        let server_id = MetadataValue::try_from(&context.server_id);
        let server_id = server_id.map_err(|error| Status::internal(error.to_string()))?;
        response.metadata_mut().insert("serverid", server_id);
        response.metadata_mut().insert("servercount", servers.into());
        let (port, worker) = (self.port.clone(), self.worker.clone());
        let (agent, told) = ((presented, by_token, place), packets.clone());
        let stop = context.stop.clone();
        tokio::spawn(self.port.handshakes.links.track_future(async move {
            let _under_way = under_way;
            // Made here: a future that is moved into another one takes its space twice.
            let session = run((port, peer, worker), agent, told, request.into_inner());
            let Some(Err(status)) = stop.run_until_cancelled(session).await else { return };
            tracing::debug!(%peer, error = %status, "konnectivity agent stream failed");
            let _ = packets.try_send(Err(status));
        }));
        Ok(response)
    }
}

/// The Hello for an agent that does not know this protocol. Its sessions are numbered in order, which is below any
/// clock: a tunnel-agent replaces them however slow its node's clock is, and none of them replaces a tunnel-agent's.
fn hello(node: &NodeName, sessions: &Sessions, successor: bool) -> Hello {
    Hello {
        node: node.to_string(),
        epoch: sessions.next_id(),
        agent_version: VERSION.to_owned(),
        max_links: 1,
        successor,
        ..Hello::default()
    }
}

/// Attaches, and relays until either end has ended the session. An agent has a certificate, or it was let in `by_token`.
async fn run(
    (port, peer, worker): (Arc<KonnectivityPort>, SocketAddr, Handle),
    (presented, by_token, place): (Presented, Option<ByToken>, CertifiedPlace),
    packets: Packets,
    incoming: Streaming<Packet>,
) -> Result<(), Status> {
    let Handshakes { context, links, .. } = &port.handshakes;
    let Presented { node, credential } = presented.clone();
    let older = context.sessions.get(&presented.node);
    if let Some(older) = &older {
        tokio::select! {
            () = older.closed.cancelled() => {}
            () = tokio::time::sleep(OLDER) => {}
            () = packets.closed() => return Ok(()),
        }
    }
    // The older session, which may be draining, finishes its connections.
    let hello = hello(&presented.node, &context.sessions, older.is_some());
    let (near, far) = tokio::io::duplex(PIPE);
    let link = (near, Arc::<Flow>::default());
    let session = attach::run(context.clone(), link, peer, presented, worker, place);
    let session = context.stop.clone().run_until_cancelled_owned(Box::pin(session));
    tokio::spawn(links.track_future(session));
    let mut serving = std::pin::pin!(agent::serve(Arc::new(Agent::new(hello, packets)), far, incoming));
    let lapsed = async {
        let Some(by_token) = by_token.map(Arc::new) else { return std::future::pending().await };
        let reason = by_token.clone().lapsed().await;
        if by_token.has_expired() {
            // The agent shows its next one only when it connects again.
            let unused = context.sessions.unused(&node, &credential);
            let _ = tokio::time::timeout(EXPIRED, unused).await;
        }
        reason
    };
    let reason = tokio::select! {
        ended = &mut serving => return ended,
        reason = lapsed => reason,
    };
    let refusal = Refusal::Token(reason);
    if context.sessions.refuse(&node, &credential, &refusal) {
        // The session tells the agent why it ends, as any other one.
        return serving.await;
    }
    context.metrics.session_refused(refusal.label());
    Err(Status::permission_denied(refusal.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent_port::attach::tests::context;

    #[tokio::test]
    async fn a_tunnel_agent_whose_clock_is_wrong_replaces_one() {
        let (context, _inputs) = context();
        let node = "edge-1".parse().unwrap();
        let [first, second] = [false, true].map(|successor| hello(&node, &context.sessions, successor));
        assert!(second.epoch > first.epoch, "the next one of its kind replaces it");
        // A clock that starts in 1970, a minute after its host was booted.
        assert!(second.epoch < 60_000);
    }
}

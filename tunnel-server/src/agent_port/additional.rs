//! An additional link of a session, requested by the server. It only relays connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tonic::Streaming;
use tunnel_link::grpc::Channel;
use tunnel_link::link::keep_alive;
use tunnel_link::proto::agent_client::AgentClient;
use tunnel_link::proto::{AgentEvent, Hello};
use tunnel_runtime::NodeName;

use super::limits::CertifiedPlace;
use super::link::{End, LinkContext, Transport, end_after_last_bytes, finish, notify, refused};
use crate::session::{Link, Session, Streams};

/// Interval at which an unused link is detected.
const CHECK: Duration = Duration::from_secs(5);

/// Takes the link out of use when its task ends for any reason.
struct Joined {
    session: Arc<Session>,
    link: Arc<Link>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.session.links.part(&self.link);
        // A client that reads slowly may not have received everything when the agent closes the link.
        let (link, ended) = (self.link.clone(), self.link.clone());
        end_after_last_bytes(&self.session, move || link.connections(), move || ended.over.cancel());
    }
}

/// Adds a link to the session that `hello` names.
///
/// # Errors
/// The reason, as sent to the agent.
fn join(
    context: &LinkContext,
    node: &NodeName,
    hello: &Hello,
    place: &CertifiedPlace,
    link: impl FnOnce(&Session) -> Arc<Link>,
) -> Result<Joined, String> {
    let session = context.sessions.get(node).filter(|session| session.epoch == hello.epoch);
    // The link reached another server, or the session has ended meanwhile.
    let session = session
        .ok_or_else(|| format!("no session with number {} is attached to this server", hello.epoch))?;
    let permit = place.additional().ok_or("the nodes have as many additional links as open files allow")?;
    let link = link(&session);
    session.links.join(link.clone())?;
    Ok(Joined { session, link, _permit: permit })
}

/// Adds the link to its session, and serves it until it ends.
pub(super) async fn serve(
    context: &LinkContext,
    Transport { send, pings, flow }: Transport,
    (client, mut events): (&mut AgentClient<Channel>, Streaming<AgentEvent>),
    (node, peer): (&NodeName, SocketAddr),
    hello: &Hello,
    worker: Handle,
    place: CertifiedPlace,
) -> End {
    let streams = Streams::new(context.most_streams);
    let link =
        |session: &Session| Link::new(hello.link, flow, session.over.child_token(), send, worker, streams);
    let joined = match join(context, node, hello, &place, link) {
        Ok(joined) => joined,
        Err(reason) => {
            notify(client, refused(reason.clone())).await;
            return End::NotJoined(reason);
        }
    };
    let Joined { session, link, .. } = &joined;
    place.attached();
    context.metrics.handshake("additional");
    tracing::debug!(%node, %peer, epoch = session.epoch, link = link.number, "additional link attached");
    let mut alive = std::pin::pin!(keep_alive(pings, &link.flow, || session.stalls.sweep()));
    let mut tick = tokio::time::interval(CHECK);
    loop {
        tokio::select! {
            event = events.message() => match event {
                Ok(Some(_)) => return End::Unasked,
                Ok(None) => {
                    session.links.part(link);
                    finish(context, session, || link.connections()).await;
                    return End::Left;
                }
                Err(status) => return End::Lost(Box::new(status)),
            },
            dead = &mut alive => return dead.into(),
            _ = tick.tick() => if session.links.part_if_idle(link) { return End::Idle },
            // Also cancelled with the session.
            () = link.over.cancelled() => return End::Stopped,
            () = context.stop.cancelled() => return End::Stopped,
        }
    }
}

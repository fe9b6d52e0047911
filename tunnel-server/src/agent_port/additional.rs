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

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::listener::ListenerContext;
    use crate::session::{Links, Placing, Taken, test_link};

    const SECOND: Duration = Duration::from_secs(1);

    /// An additional link, and a connection on it.
    async fn in_use() -> (Joined, Taken) {
        let far = Duration::from_millis(50);
        let links = Links::new(test_link(0, far).await, 2, Placing::Apart);
        let session = ListenerContext::without_nodes().sessions.replace_on("edge-1", 1, links);
        // Another link is asked for once the first one is in use.
        let first = session.links.take();
        let link = test_link(1, far).await;
        session.links.join(link.clone()).unwrap();
        let taken = session.links.take();
        assert_eq!((first.number, taken.number), (0, 1));
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Joined { session, link, _permit: permit }, taken)
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_has_ended_stays_until_its_clients_have_its_last_bytes() {
        let (joined, slow) = in_use().await;
        let (session, link) = (joined.session.clone(), joined.link.clone());
        drop(joined);
        assert_eq!(session.links.all().len(), 1, "new connections go elsewhere");
        assert!(timeout(5 * SECOND, link.over.cancelled()).await.is_err());
        drop(slow);
        timeout(SECOND, link.over.cancelled()).await.expect("they have all of it");

        let (joined, _reads_nothing) = in_use().await;
        let (link, ended) = (joined.link.clone(), Instant::now());
        drop(joined);
        link.over.cancelled().await;
        assert_eq!(ended.elapsed().as_secs(), 10);

        let (joined, _cut) = in_use().await;
        let (session, link) = (joined.session.clone(), joined.link.clone());
        drop(joined);
        session.close();
        timeout(SECOND, link.over.cancelled()).await.expect("its session has ended");

        let (joined, unused) = in_use().await;
        drop(unused);
        let link = joined.link.clone();
        drop(joined);
        assert!(link.over.is_cancelled(), "there is nothing to wait for");
    }
}

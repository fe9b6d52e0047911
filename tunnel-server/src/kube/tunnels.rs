//! Tunnels as the cluster sees them: Events on their Nodes, and a condition of the Node.

mod condition;
mod news;
mod reign;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_core::identity::NodeName;

use super::{Cluster, events};
use crate::session::Sessions;
use news::News;

pub use condition::CONDITION;

/// An agent that is replaced by another one within this time has not been away.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// The nodes that have a tunnel to this server.
type Live = watch::Receiver<Arc<HashSet<NodeName>>>;

/// Tells the cluster of this server's tunnels until the stop: Events by every server, the condition by the one that
/// leads. Conditions wait for the inventory to change for the first time since `cluster` was made: until then the nodes
/// are not known.
pub async fn run(cluster: Cluster, sessions: Arc<Sessions>) {
    let changed = sessions.changed();
    follow(cluster, changed, move || sessions.live()).await;
}

/// What [`run`] does with the sessions' nodes: `live` gives them, and `changed` says when to ask.
pub async fn follow(
    cluster: Cluster,
    mut changed: watch::Receiver<u64>,
    live: impl Fn() -> Vec<NodeName> + Send,
) {
    let now = || Arc::new(live().into_iter().collect::<HashSet<_>>());
    let (sender, nodes) = watch::channel(now());
    let looking = async {
        loop {
            sender.send_replace(now());
            if changed.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    let stop = cluster.stop.clone();
    let telling = tell(cluster.clone(), nodes.clone());
    let conditions = condition::run(cluster, nodes);
    let all = async { tokio::join!(looking, telling, conditions) };
    let _ = stop.run_until_cancelled(all).await;
}

/// Publishes the Events.
async fn tell(cluster: Cluster, mut live: Live) {
    let mut news = News::default();
    live.mark_changed();
    loop {
        let due = news.due();
        tokio::select! {
            changed = live.changed() => match changed {
                Ok(()) => news.observe(Instant::now(), &live.borrow_and_update()),
                Err(_) => return,
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        for (node, up) in news.take(Instant::now()) {
            let server = &cluster.identity;
            let (kind, reason, note) = if up {
                (EventType::Normal, "TunnelUp", format!("the agent has a tunnel to server {server}"))
            } else {
                (EventType::Warning, "TunnelDown", format!("the agent's tunnel to server {server} has ended"))
            };
            cluster.events.publish(events::node(node.as_str()), kind, reason, note);
        }
    }
}

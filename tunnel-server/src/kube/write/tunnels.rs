//! This server's tunnels, for the Events and the condition of their Nodes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tunnel_core::identity::NodeName;

use super::events::Events;
use super::{condition, tunnel_events};
use crate::kube::context::KubeContext;
use crate::session::Sessions;

/// An agent that is replaced by another one within this time has not been away.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Reports this server's tunnels until the stop: Events by every server, the condition by the one that leads.
pub async fn run(context: KubeContext, events: Events, sessions: Arc<Sessions>) {
    let changed = sessions.changed();
    follow(context, events, changed, move || sessions.live()).await;
}

/// [`run`] with the nodes that `live` gives whenever there was a change.
pub async fn follow(
    context: KubeContext,
    events: Events,
    mut changed: watch::Receiver<u64>,
    live: impl Fn() -> Vec<NodeName> + Send,
) {
    let now = || Arc::new(live().into_iter().collect::<HashSet<_>>());
    let (sender, nodes) = watch::channel(now());
    let update = async {
        loop {
            sender.send_replace(now());
            if changed.changed().await.is_err() {
                return;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    let (stop, identity) = (context.stop.clone(), context.identity.clone());
    let reports = tunnel_events::run(&identity, events, nodes.clone());
    let conditions = condition::run(context, nodes);
    let all = async { tokio::join!(update, reports, conditions) };
    let _ = stop.run_until_cancelled(all).await;
}

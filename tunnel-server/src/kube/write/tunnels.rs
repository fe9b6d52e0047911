//! Tunnels, for the Events and the condition of their Nodes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tunnel_core::identity::NodeName;

use super::events::Events;
use super::{condition, tunnel_events};
use crate::kube::context::KubeContext;
use crate::peers::Peers;
use crate::session::Sessions;

/// An agent that is replaced by another one within this time has not been away.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Reports tunnels until the stop: each server its own as Events, and the one that leads those of all as the condition.
pub async fn run(context: KubeContext, events: Events, sessions: Arc<Sessions>, peers: Arc<Peers>) {
    let own = Tunnels { changed: sessions.changed(), nodes: move || sessions.live() };
    let elsewhere = Tunnels { changed: peers.changed(), nodes: move || peers.nodes() };
    follow(context, events, own, elsewhere).await;
}

/// Nodes with tunnels, and when they change.
pub struct Tunnels<F> {
    pub changed: watch::Receiver<u64>,
    pub nodes: F,
}

/// [`run`] with these tunnels: this server's own, and those to other servers.
pub async fn follow(
    context: KubeContext,
    events: Events,
    mut own: Tunnels<impl Fn() -> Vec<NodeName> + Send>,
    mut elsewhere: Tunnels<impl Fn() -> Vec<NodeName> + Send>,
) {
    let (own_now, here) = watch::channel(Arc::default());
    let (all_now, anywhere) = watch::channel(Arc::default());
    let update = async {
        loop {
            let here: HashSet<NodeName> = (own.nodes)().into_iter().collect();
            let anywhere = here.iter().cloned().chain((elsewhere.nodes)()).collect::<HashSet<_>>();
            all_now.send_replace(Arc::new(anywhere));
            own_now.send_replace(Arc::new(here));
            let changed = tokio::select! {
                changed = own.changed.changed() => changed,
                changed = elsewhere.changed.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    let (stop, identity) = (context.stop.clone(), context.identity.clone());
    let reports = tunnel_events::run(&identity, events, here);
    let conditions = condition::run(context, anywhere);
    let all = async { tokio::join!(update, reports, conditions) };
    let _ = stop.run_until_cancelled(all).await;
}

//! The handles that most parts of the server work with.

pub mod role;
mod server_id;
pub mod settings;

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_redirect::Redirect;
use tunnel_routing::Router;
use tunnel_runtime::gauges::register_gauges;
use tunnel_runtime::lifecycle::{Drain, Readiness, Shutdown};
use tunnel_runtime::settled::Settling;

use server_id::server_id;

use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::session::{Sessions, Workers, register_links};

/// Made once, and cloned whole.
#[derive(Clone)]
pub struct Runtime {
    pub server_id: String,
    pub router: Arc<Router>,
    pub sessions: Arc<Sessions>,
    /// The other servers.
    pub peers: Arc<Peers>,
    pub metrics: Metrics,
    /// None: it is off.
    pub redirect: Option<Arc<Redirect>>,
    /// The threads that own the links.
    pub workers: Arc<Workers>,
    pub readiness: Readiness,
    /// The queues between an event and what shows it.
    pub settling: Settling,
    /// Counts what is relayed, and knows when the server drains and when connections have to end.
    pub drain: Drain,
    /// Notified when callers' rights may have changed, to judge open connections at once.
    pub rights: Arc<Notify>,
    pub tasks: TaskTracker,
    /// Ends the tasks and the links.
    pub stop: CancellationToken,
}

impl Runtime {
    /// Without a redirect. Metrics go into `registry`, which has the prefix `postern`.
    pub fn new(router: Arc<Router>, workers: Arc<Workers>, registry: &mut Registry) -> Self {
        let metrics = Metrics::new(registry);
        let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
        register_links(registry, sessions.clone());
        let peers = Arc::new(Peers::new(router.clone()));
        let held = peers.clone();
        let help = "Other servers that this one is linked with";
        register_gauges(registry, move |gauges| gauges.count("peers", help, None, held.all().len()));
        Self {
            server_id: server_id(),
            router,
            sessions,
            peers,
            metrics,
            redirect: None,
            workers,
            readiness: Readiness::default(),
            settling: Settling::default(),
            drain: Drain::new(Shutdown::default()),
            rights: Arc::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }
}

/// A router for tests that do not look at routes.
#[cfg(test)]
pub(crate) fn without_nodes(registry: &mut Registry) -> Arc<Router> {
    let virtual_addresses = ("198.18.0.0/15".parse().unwrap(), "fd00:706f::/64".parse().unwrap());
    let config = tunnel_routing::RouterConfig::new(virtual_addresses.0, virtual_addresses.1, [10250]);
    Arc::new(Router::new(config, registry))
}

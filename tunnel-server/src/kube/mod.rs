//! The Kubernetes side, and the only part of the server that knows Kubernetes: what the server reads from the cluster
//! (`read/`), and what it writes there (`write/`).
//!
//! Every part lives through outages of the API server by itself; none of them can end a tunnel or take a route away
//! because the API server is silent.

mod context;
mod partial_node;
pub mod read;
mod reconcile;
pub mod write;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::config::HostPort;
use tunnel_core::lifecycle::ReadyGuard;
use tunnel_kube::{Health, KubeError};

pub use self::context::{KubeContext, KubeOptions, ObjectNames};
use self::read::authority::{self, AuthorityError};
use self::read::revocations::RevocationMap;
use self::read::{configmap, names, nodes, peers, revocations, service_ranges};
use self::write::events::Events;
use self::write::{csr, dns, lease, service, tunnels};
use crate::inventory::{Inventory, Selector, SourceStatus};
use crate::peers::Peers;
use crate::pki::{
    Ca, KnownNodes, Lifetimes, PkiMetrics, RevocationStore, ServerCertificate, ServerNames, Standing,
};
use crate::route::{Router, update};
use crate::session::Sessions;
use crate::settings::{Doors, Settings};
use crate::status::SourceReport;

/// The Kubernetes side before its CA is known.
pub struct Kube {
    client: kube::Client,
    namespace: Arc<str>,
    names: Arc<ObjectNames>,
    health: Health,
    nodes: Family<[(&'static str, &'static str); 1], Gauge>,
}

/// The parts of the server that the Kubernetes side works on.
pub struct Parts<'a> {
    pub router: Arc<Router>,
    pub sessions: Arc<Sessions>,
    /// The other servers.
    pub fleet: Arc<Peers>,
    pub certificate: Arc<ServerCertificate>,
    /// What the certificate names in any cluster.
    pub server_names: ServerNames,
    pub server_id: &'a str,
    pub selector: Selector,
    /// Nodes that vanish all at once count as gone.
    pub allow_empty: bool,
    pub doors: Doors,
    pub state_dir: PathBuf,
    /// Other servers that were given, for those that the cluster names.
    pub given_peers: BTreeSet<HostPort>,
    /// Gets the other servers.
    pub peers: watch::Sender<Arc<BTreeSet<HostPort>>>,
    pub pki_metrics: PkiMetrics,
    /// Gets the ConfigMap's ports.
    pub settings: watch::Sender<Arc<Settings>>,
    /// Gets the nodes' names: an agent must be one of them.
    pub known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub revocations: RevocationStore,
    pub standing: Standing,
    /// Done once the nodes are known.
    pub nodes_known: ReadyGuard,
    pub tasks: &'a TaskTracker,
    /// The server stops soon: its agents leave, which is not to be written to the cluster.
    pub draining: CancellationToken,
    pub stop: CancellationToken,
}

impl Kube {
    /// Makes the client; no request is made. Metrics go into `registry`, which has the prefix `postern`.
    ///
    /// # Errors
    /// When there is no usable configuration.
    pub async fn connect(options: &KubeOptions, registry: &mut Registry) -> Result<Self, KubeError> {
        let (client, namespace) = options.connect().await?;
        let nodes = Family::default();
        registry.register("inventory_nodes", "Nodes in the inventory, by role", nodes.clone());
        Ok(Self {
            client,
            namespace: namespace.into(),
            names: Arc::new(options.names.clone()),
            health: Health::register(registry),
            nodes,
        })
    }

    /// The CA of the cluster's Secret; waits for the API server when there is none on this host either.
    ///
    /// # Errors
    /// When the CA cannot be used, or `stop` ends the wait.
    pub async fn authority(
        &self,
        state_dir: &Path,
        lifetimes: Lifetimes,
        stop: &CancellationToken,
    ) -> Result<Ca, AuthorityError> {
        let (client, secret) = (self.client.clone(), &self.names.ca_secret);
        authority::obtain(client, &self.namespace, secret, state_dir, lifetimes, stop).await
    }

    /// Reads the revocations once, before anyone is let in. While the API server is away the copy in the state directory
    /// is used.
    pub async fn revocations(&self, store: &RevocationStore) {
        let map = RevocationMap::new(self.client.clone(), &self.namespace, &self.names.revocations);
        if let Err(error) = map.copy_to(store).await {
            tracing::error!(%error, "the revocations in the state directory are used as they are");
        }
    }

    /// What `status` shows of the source of the nodes.
    pub fn status(&self, router: &Arc<Router>) -> SourceReport {
        let (health, router) = (self.health.clone(), Arc::clone(router));
        Box::new(move || {
            let (edge, cloud) = router.snapshot().inventory().counts();
            let lost = health.report().into_iter().find(|watch| !watch.synced && watch.last_error.is_some());
            let last_error =
                lost.and_then(|watch| Some(format!("{}: {}", watch.resource, watch.last_error?)));
            SourceStatus { source: "API server".to_owned(), edge, cloud, last_error }
        })
    }

    /// Starts every part. What writes for all servers stops when `draining` does, the rest with `stop`.
    pub fn start(self, parts: Parts<'_>) {
        let Parts { router, tasks, stop, draining, doors, .. } = parts;
        let (inventory, nodes) = watch::channel(Arc::new(Inventory::default()));
        let (client, id) = (self.client, parts.server_id);
        let leader = lease::start(client.clone(), &self.namespace, &self.names.lease, id, draining.clone());
        // The process waits for its tasks: once the Lease was given back another server may lead.
        tasks.spawn(lease::released(leader.clone()));
        let events = Events::start(client.clone(), id, stop.clone());
        let context = KubeContext {
            client,
            namespace: self.namespace,
            names: self.names,
            identity: id.into(),
            leader,
            inventory: nodes,
            settings: parts.settings.subscribe(),
            health: self.health,
            stop: stop.clone(),
        };
        let writers = KubeContext { stop: draining, ..context.clone() };
        let publish =
            publish_nodes(router.clone(), inventory, parts.known_nodes, self.nodes, parts.nodes_known);
        let (client, health) = (context.client.clone(), context.health.clone());
        tasks.spawn(nodes::run(client, parts.selector, health, parts.allow_empty, publish, stop.clone()));
        tasks.spawn(configmap::run(context.clone(), events.clone(), doors, parts.settings));
        tasks.spawn(service_ranges::run(context.clone(), router.clone()));
        tasks.spawn(follow_ports(router, context.settings.clone(), stop));
        let (given, state_dir) = (parts.given_peers, parts.state_dir.clone());
        tasks.spawn(peers::run(context.clone(), given, state_dir, parts.peers));
        tasks.spawn(authority::follow(context.clone(), parts.state_dir));
        tasks.spawn(revocations::follow(context.clone(), parts.revocations));
        tasks.spawn(csr::run(writers.clone(), parts.certificate.ca(), parts.standing, parts.pki_metrics));
        tasks.spawn(dns::run(writers.clone(), events.clone()));
        tasks.spawn(service::run(writers.clone(), doors));
        tasks.spawn(tunnels::run(writers, events, parts.sessions, parts.fleet));
        tasks.spawn(names::run(context, parts.certificate, parts.server_names));
    }
}

/// Gives each inventory to the router, to the writers and to the metrics.
fn publish_nodes(
    router: Arc<Router>,
    inventory: watch::Sender<Arc<Inventory>>,
    known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    gauge: Family<[(&'static str, &'static str); 1], Gauge>,
    known: ReadyGuard,
) -> impl FnMut(Inventory) -> BoxFuture<'static, ()> + Send {
    let mut known = Some(known);
    move |nodes| {
        let (edge, cloud) = nodes.counts();
        for (role, count) in [("edge", edge), ("cloud", cloud)] {
            gauge.get_or_create(&[("role", role)]).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let (router, inventory, known) = (router.clone(), inventory.clone(), known.take());
        let known_nodes = known_nodes.clone();
        async move {
            update(router, nodes.clone()).await;
            known_nodes.send_replace(Some(Arc::new(nodes.creation_times())));
            inventory.send_replace(Arc::new(nodes));
            drop(known);
        }
        .boxed()
    }
}

async fn follow_ports(
    router: Arc<Router>,
    mut settings: watch::Receiver<Arc<Settings>>,
    stop: CancellationToken,
) {
    settings.mark_changed();
    loop {
        tokio::select! {
            changed = settings.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
        let settings = settings.borrow_and_update().clone();
        router.set_ports(&settings.tunnelled, &settings.loopback);
    }
}

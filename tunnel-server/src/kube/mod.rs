//! The Kubernetes side: what the server reads from the cluster (`read/`), what it writes there (`write/`), and what it
//! looks up for a client that waits (`lookups.rs`). Only `crate::caller` asks the API server itself: who a caller is, and
//! what it may do.
//!
//! Every part lives through outages of the API server by itself; none of them can end a tunnel or take a route away
//! because the API server is silent.

mod apply;
pub mod cache;
mod context;
mod error;
mod lookups;
mod object;
mod partial;
pub mod read;
mod reconcile;
pub mod write;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::Router;
use tunnel_routing::inventory::{Inventory, Selector};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::gauges::registered;
use tunnel_runtime::lifecycle::ReadyGuard;

pub use self::apply::{Apply, Said};
use self::cache::{Age, ClusterCache};
pub(crate) use self::context::object_name;
pub use self::context::{KubeContext, KubeOptions, ObjectNames};
pub use self::error::ClusterError;
pub use self::lookups::Lookups;
use self::read::authority;
use self::read::revocations::RevocationMap;
use self::read::{configmap, names, nodes, peers, revocations, service_ranges};
use self::write::events::Events;
use self::write::tunnels::Tunnels;
use self::write::{csr, dns, lease, service, tunnels};
use crate::inventory::{NodeCount, SourceStatus};
use crate::pki::{
    Ca, KnownNodes, Lifetimes, PkiMetrics, RevocationStore, ServerCertificate, ServerNames, Standing,
};
use crate::runtime::Runtime;
use crate::runtime::settings::{Listeners, Settings};
use crate::status::SourceReport;

/// The Kubernetes side before its CA is known.
pub struct Kube {
    /// Also asks about callers, pods and endpoints.
    pub client: kube::Client,
    namespace: Arc<str>,
    names: Arc<ObjectNames>,
    /// How watches are doing, also those of the listeners.
    pub health: Health,
    nodes: NodeCount,
    records_left_out: Gauge,
    age: Age,
}

/// The parts of the server that the Kubernetes side works on.
pub struct Parts<'a> {
    pub runtime: &'a Runtime,
    pub state_dir: PathBuf,
    pub listeners: Listeners,
    pub selector: Selector,
    /// Nodes that vanish all at once count as gone.
    pub allow_empty: bool,
    /// Has the other servers that were given, and gets those that the cluster names.
    pub peers: watch::Sender<Arc<BTreeSet<HostPort>>>,
    /// Gets the ConfigMap's ports.
    pub settings: watch::Sender<Arc<Settings>>,
    /// Gets the nodes' names: an agent must be one of them.
    pub known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    /// Done once the nodes are known.
    pub nodes_known: ReadyGuard,
    /// Done once the ConfigMap's ports are known, or are not waited for any more.
    pub ports_known: ReadyGuard,
    /// None: this is a redirector, which writes nothing.
    pub writes: Option<Writes>,
}

/// The parts of the server for what is written to the cluster.
pub struct Writes {
    pub certificate: Arc<ServerCertificate>,
    /// Names of the certificate in any cluster.
    pub server_names: ServerNames,
    /// Edge nodes get the condition `PosternTunnel`.
    pub node_condition: bool,
    /// DNS records of the nodes are written, with the zones of their names.
    pub dns_records: Option<Vec<NodeName>>,
    pub pki_metrics: PkiMetrics,
    pub standing: Standing,
    /// False while this server's successor may write to the cluster in its place.
    pub eligible: watch::Receiver<bool>,
}

impl Kube {
    /// The client's namespace has the objects of these names. Metrics go into `registry`, which has the prefix `postern`.
    pub fn new(
        (client, namespace): (kube::Client, String),
        names: ObjectNames,
        nodes: NodeCount,
        registry: &mut Registry,
    ) -> Self {
        let help = "Nodes without a DNS record: the ConfigMap is full, or their names have dots and are in no zone of --dns-zones; 0 on servers that do not write it";
        let records_left_out = registered(registry, "dns_records_left_out", help);
        Self {
            client,
            namespace: namespace.into(),
            names: Arc::new(names),
            health: Health::register(registry),
            nodes,
            records_left_out,
            age: Age::register(registry),
        }
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
    ) -> Result<Ca, ClusterError> {
        let (client, secret) = (self.client.clone(), &self.names.ca_secret);
        authority::obtain(client, &self.namespace, secret, state_dir, lifetimes, stop).await
    }

    /// Reads the revocations once, before anyone is let in. While the API server is away the copy in the state directory
    /// is used.
    pub async fn revocations(&self, store: &RevocationStore) {
        let map = RevocationMap::new(self.client.clone(), &self.namespace, &self.names.revocations);
        if let Err(error) = map.copy_to(store).await {
            tracing::error!(%error, "failed to read the revocations, using those of the state directory");
        }
    }

    /// State of the source of the nodes, for `status`.
    pub fn status(&self, router: &Arc<Router>) -> SourceReport {
        let (health, router, age) = (self.health.clone(), Arc::clone(router), self.age.clone());
        Box::new(move || {
            let (edge, cloud) = router.snapshot().inventory().counts();
            let lost = health.report().into_iter().find(|watch| !watch.synced && watch.last_error.is_some());
            let last_error =
                lost.and_then(|watch| Some(format!("{}: {}", watch.resource, watch.last_error?)));
            SourceStatus { source: "API server".to_owned(), edge, cloud, last_error, old_s: age.seconds() }
        })
    }

    /// Starts every part; for a redirector only those that it follows. What writes for all servers stops when the drain starts,
    /// the rest with the stop. The receiver is true while this server writes to the cluster.
    pub fn start(self, parts: Parts<'_>) -> watch::Receiver<bool> {
        let Parts { runtime, state_dir, listeners, writes, .. } = parts;
        let (router, tasks, stop) = (runtime.router.clone(), &runtime.tasks, runtime.stop.clone());
        // The server stops soon: its agents leave, which is not to be written to the cluster.
        let draining = runtime.drain.shutdown().draining_token().clone();
        // Writers to the cluster go by the cluster's objects, not by the state directory.
        let (inventory, nodes) = watch::channel(Arc::new(Inventory::default()));
        let (say_ranges, ranges) = watch::channel(Vec::new());
        let (say_ports, ports) = watch::channel(Arc::<Settings>::default());
        let (client, id) = (self.client, runtime.server_id.as_str());
        let (leader, events) = match &writes {
            Some(writes) => {
                let lease = &self.names.lease;
                let (eligible, over) = (writes.eligible.clone(), draining.clone());
                let leader = lease::start(client.clone(), &self.namespace, lease, id, eligible, over);
                // The process waits for its tasks: once the Lease was given back another server may lead.
                tasks.spawn(lease::released(leader.clone()));
                (leader, Some(Events::start(client.clone(), id, stop.clone())))
            }
            None => (watch::channel(false).1, None),
        };
        let context = KubeContext {
            client,
            namespace: self.namespace,
            names: self.names,
            identity: id.into(),
            leader: leader.clone(),
            inventory: nodes.clone(),
            settings: ports.clone(),
            health: self.health,
            stop: stop.clone(),
        };
        let writers = KubeContext { stop: draining, ..context.clone() };
        let (cache, health) = (ClusterCache::new(&state_dir), context.health.clone());
        let last_known = last_known(cache.clone(), router.clone());
        let said = Said { nodes, ranges, ports };
        let (heard, known, settings) =
            (said.clone(), parts.known_nodes.subscribe(), parts.settings.subscribe());
        runtime
            .settling
            .stage("nodes", move || apply::applied(heard.clone(), known.clone(), settings.clone()));
        let apply = Apply {
            said,
            router,
            settings: parts.settings,
            known_nodes: parts.known_nodes,
            count: self.nodes,
            cache,
            age: self.age,
            health: health.clone(),
            nodes_known: Some(parts.nodes_known),
            ports_known: Some(parts.ports_known),
        };
        tasks.spawn(apply.run(stop.clone()));
        let publish = move |nodes| drop(inventory.send_replace(Arc::new(nodes)));
        let (client, selector, allow_empty) = (context.client.clone(), parts.selector, parts.allow_empty);
        tasks.spawn(nodes::run(client, selector, health, allow_empty, last_known, publish, stop));
        tasks.spawn(configmap::run(context.clone(), events.clone(), listeners.clone(), say_ports));
        tasks.spawn(service_ranges::run(context.clone(), say_ranges, service_ranges::AGAIN));
        tasks.spawn(peers::run(context.clone(), state_dir.clone(), parts.peers));
        let (Some(writes), Some(events)) = (writes, events) else { return leader };
        tasks.spawn(revocations::follow(context.clone(), RevocationStore::new(&state_dir)));
        tasks.spawn(authority::follow(context.clone(), state_dir));
        let ca = writes.certificate.ca.clone();
        tasks.spawn(csr::run(writers.clone(), ca, writes.standing, writes.pki_metrics));
        if let Some(zones) = writes.dns_records {
            tasks.spawn(dns::run(writers.clone(), events.clone(), zones, self.records_left_out));
        }
        tasks.spawn(service::run(writers.clone(), listeners));
        let (sessions, peers) = (runtime.sessions.clone(), runtime.peers.clone());
        let own = Tunnels { changed: sessions.changed(), nodes: move || sessions.live() };
        let elsewhere = Tunnels { changed: peers.changed(), nodes: move || peers.nodes() };
        tasks.spawn(tunnels::run(writers, events, own, elsewhere, writes.node_condition));
        tasks.spawn(names::run(context, writes.certificate, writes.server_names));
        leader
    }
}

/// The nodes in effect, else those of the state directory: against these an API server that has none is not believed.
pub async fn last_known(cache: ClusterCache, router: Arc<Router>) -> Inventory {
    let known = router.snapshot().inventory().clone();
    if known.is_empty() {
        return cache.load().await.map(|content| content.nodes).unwrap_or_default();
    }
    known
}

//! The Kubernetes side: what the server learns from the API server, and what it writes there.
//!
//! Every part follows its own objects and lives through outages of the API server; none of them can end a tunnel or
//! take a route away because the API server is silent.

pub mod authority;
pub mod client;
pub mod csr;
pub mod dns;
pub mod events;
pub mod leader;
pub mod names;
pub mod nodes;
pub mod service;
pub mod settings;
pub mod tunnels;
pub mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::lifecycle::ReadyGuard;

use self::authority::AuthorityError;
use self::client::KubeError;
use self::events::Events;
use self::settings::{Doors, Settings};
use self::watch::Health;
use crate::inventory::{Inventory, Selector, SourceStatus};
use crate::pki::{Ca, Lifetimes, PkiMetrics, ServerCertificate, ServerNames};
use crate::route::Router;
use crate::session::Sessions;
use crate::status::SourceReport;

/// Who writes: the field manager of server-side apply, and the controller that Events name.
pub const MANAGER: &str = "postern";

/// How to reach the API server, and what the objects there are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeOptions {
    /// None: the configuration that a pod has.
    pub kubeconfig: Option<PathBuf>,
    /// None: the pod's namespace, else that of the kubeconfig's context, else `kube-system`.
    pub namespace: Option<String>,
    pub names: ObjectNames,
}

/// The names of the objects, all in one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectNames {
    /// ConfigMap with the port lists.
    pub configmap: String,
    /// ConfigMap that gets the DNS records.
    pub dns_configmap: String,
    /// Service that agents dial.
    pub service: String,
    /// Service for components in the cloud.
    pub internal_service: String,
    /// Secret with the CA.
    pub ca_secret: String,
    /// Lease of the server that writes.
    pub lease: String,
    /// ServiceAccount of agents that run as pods.
    pub agent_service_account: String,
}

impl Default for ObjectNames {
    fn default() -> Self {
        Self {
            configmap: "tunnel-server-cfg".into(),
            dns_configmap: "tunnel-nodes".into(),
            service: "x-tunnel-server-svc".into(),
            internal_service: "x-tunnel-server-internal-svc".into(),
            ca_secret: "tunnel-server-ca".into(),
            lease: "tunnel-server".into(),
            agent_service_account: "tunnel-agent".into(),
        }
    }
}

/// What every part of the Kubernetes side works with.
#[derive(Clone)]
pub struct Cluster {
    pub client: kube::Client,
    pub namespace: Arc<str>,
    pub names: Arc<ObjectNames>,
    /// This server's name for itself; it is the Lease's holder by this name.
    pub identity: Arc<str>,
    /// Whether this server holds the Lease.
    pub leader: channel::Receiver<bool>,
    /// The nodes.
    pub inventory: channel::Receiver<Arc<Inventory>>,
    /// What the ConfigMap says.
    pub settings: channel::Receiver<Arc<Settings>>,
    pub events: Events,
    pub health: Health,
    /// Ends every part.
    pub stop: CancellationToken,
}

/// The Kubernetes side before its CA is known.
pub struct Kube {
    client: kube::Client,
    namespace: Arc<str>,
    names: Arc<ObjectNames>,
    health: Health,
    nodes: Family<[(&'static str, &'static str); 1], Gauge>,
}

/// What the Kubernetes side works on.
pub struct Parts<'a> {
    pub router: Arc<Router>,
    pub sessions: Arc<Sessions>,
    pub certificate: Arc<ServerCertificate>,
    /// What the certificate names whatever the cluster says.
    pub server_names: ServerNames,
    pub server_id: &'a str,
    pub selector: Selector,
    pub doors: Doors,
    pub state_dir: PathBuf,
    pub pki_metrics: PkiMetrics,
    /// Gets what the ConfigMap says.
    pub settings: channel::Sender<Arc<Settings>>,
    /// Done once the nodes are known.
    pub nodes_known: ReadyGuard,
    pub tasks: &'a TaskTracker,
    /// The server stops soon: its agents leave, and what it would write of that is wrong.
    pub draining: CancellationToken,
    pub stop: CancellationToken,
}

impl Kube {
    /// Makes the client; no request is made. Metrics go into `registry`, which has the prefix `postern`.
    ///
    /// # Errors
    /// When there is no usable configuration.
    pub async fn connect(options: &KubeOptions, registry: &mut Registry) -> Result<Self, KubeError> {
        let (client, namespace) = client::connect(options).await?;
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

    /// Starts every part. What writes for all servers ends when `draining` does, the rest with `stop`.
    pub fn start(self, parts: Parts<'_>) {
        let Parts { router, sessions, certificate, server_names, tasks, stop, .. } = parts;
        let (inventory, known) = channel::channel(Arc::new(Inventory::default()));
        let lease = &self.names.lease;
        let leader = leader::start(
            self.client.clone(),
            &self.namespace,
            lease,
            parts.server_id,
            parts.draining.clone(),
        );
        // The process waits for its tasks: another server may lead at once when the Lease was given back.
        tasks.spawn(leader::released(leader.clone()));
        let cluster = Cluster {
            events: Events::start(self.client.clone(), parts.server_id, stop.clone()),
            client: self.client,
            namespace: self.namespace,
            names: self.names,
            identity: parts.server_id.into(),
            leader,
            inventory: known,
            settings: parts.settings.subscribe(),
            health: self.health,
            stop: stop.clone(),
        };
        let writers = Cluster { stop: parts.draining, ..cluster.clone() };
        let mut nodes_known = Some(parts.nodes_known);
        let (following, gauge) = (Arc::clone(&router), self.nodes);
        let publish = move |nodes: Inventory| {
            let (edge, cloud) = nodes.counts();
            for (role, count) in [("edge", edge), ("cloud", cloud)] {
                gauge.get_or_create(&[("role", role)]).set(i64::try_from(count).unwrap_or(i64::MAX));
            }
            following.set_inventory(nodes.clone());
            inventory.send_replace(Arc::new(nodes));
            drop(nodes_known.take());
        };
        let (client, health) = (cluster.client.clone(), cluster.health.clone());
        tasks.spawn(nodes::run(client, parts.selector, health, publish, stop.clone()));
        tasks.spawn(settings::run(cluster.clone(), parts.doors, parts.settings));
        tasks.spawn(follow_ports(router, cluster.settings.clone(), stop));
        tasks.spawn(authority::follow(cluster.clone(), parts.state_dir));
        tasks.spawn(csr::run(writers.clone(), certificate.ca(), parts.pki_metrics));
        tasks.spawn(dns::run(writers.clone()));
        tasks.spawn(service::run(writers.clone(), parts.doors));
        tasks.spawn(tunnels::run(writers, sessions));
        tasks.spawn(names::run(cluster, certificate, server_names));
    }
}

/// The redirect and the doors take up the ConfigMap's ports.
async fn follow_ports(
    router: Arc<Router>,
    mut settings: channel::Receiver<Arc<Settings>>,
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

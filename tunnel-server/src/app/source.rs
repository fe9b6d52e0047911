//! Where nodes and CA come from: a file and the state directory, or a Kubernetes cluster.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tunnel_routing::inventory::Inventory;
use tunnel_routing::{Router, update};
use tunnel_runtime::lifecycle::{Readiness, Shutdown};
use tunnel_runtime::reloaded::{FileMetrics, ReloadedFile};

use crate::config::Config;
use crate::inventory::{self, NodeCount, SourceStatus};
use crate::kube::read::cluster_ips;
use crate::kube::{Kube, Lookups, Parts};
use crate::listener::{ClusterIps, ClusterServices};
use crate::pki::{Ca, Lifetimes, RevocationStore};
use crate::runtime::Runtime;
use crate::status::SourceReport;

pub(crate) enum Source {
    /// A redirector has no CA.
    File {
        file: ReloadedFile<Inventory>,
        path: PathBuf,
        inventory: Inventory,
        count: NodeCount,
        ca: Option<Ca>,
    },
    Kubernetes(Kube),
}

impl Source {
    /// Reads the files, or makes the client of the API server without a request. Metrics go into `registry`, which has
    /// the prefix `postern`.
    pub(crate) async fn open(
        config: &Config,
        lifetimes: Lifetimes,
        files: &FileMetrics,
        registry: &mut Registry,
    ) -> anyhow::Result<Self> {
        let count = NodeCount::register(registry);
        match &config.nodes.inventory {
            Some(path) => {
                let nodes = &config.nodes;
                let (selector, allow_empty) = (nodes.edge_selector.clone(), nodes.allow_empty_inventory);
                let (file, inventory) = inventory::open(path, selector, allow_empty, files)?;
                let ca = match config.redirector {
                    Some(_) => None,
                    None => Some(Ca::load_or_create(&config.process.state_dir, lifetimes)?),
                };
                Ok(Self::File { file, path: path.clone(), inventory, count, ca })
            }
            None => {
                let cluster = config.kube.connect().await?;
                Ok(Self::Kubernetes(Kube::new(cluster, config.kube.names.clone(), count, registry)))
            }
        }
    }

    /// The API server's address, which is no edge node's. None without Kubernetes, and where it has only a name.
    pub(crate) async fn api_server(config: &Config) -> Option<IpAddr> {
        match config.nodes.inventory {
            Some(_) => None,
            None => tunnel_kube::api_server_address(config.kube.kubeconfig.as_deref()).await,
        }
    }

    /// To ask the API server, if there is one.
    pub(crate) fn client(&self) -> Option<kube::Client> {
        match self {
            Self::File { .. } => None,
            Self::Kubernetes(kube) => Some(kube.client.clone()),
        }
    }

    /// The Services of the cluster and where they lead, if there is one: they are followed by a task.
    pub(crate) fn services(&self, runtime: &Runtime) -> Option<ClusterServices> {
        match self {
            Self::File { .. } => None,
            Self::Kubernetes(kube) => {
                let (followed, services) = watch::channel(ClusterIps::default());
                let stop = runtime.stop.clone();
                runtime.tasks.spawn(cluster_ips::run(
                    kube.client.clone(),
                    kube.health.clone(),
                    followed,
                    stop,
                ));
                Some(ClusterServices::new(services, Arc::new(Lookups::new(kube.client.clone()))))
            }
        }
    }

    /// State of the source, for the status.
    pub(crate) fn status(&self, router: &Arc<Router>) -> SourceReport {
        match self {
            Self::File { file, path, .. } => {
                let (problem, router, source) = (file.problem(), router.clone(), path.display().to_string());
                Box::new(move || {
                    let (edge, cloud) = router.snapshot().inventory().counts();
                    let last_error = problem.get().map(|error| error.reason);
                    SourceStatus { source: source.clone(), edge, cloud, last_error, old_s: None }
                })
            }
            Self::Kubernetes(kube) => kube.status(router),
        }
    }

    /// A server's CA; in a cluster this may wait for the API server. None: the drain has started meanwhile.
    pub(crate) async fn authority(
        &self,
        config: &Config,
        lifetimes: Lifetimes,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Option<Ca>> {
        let kube = match self {
            Self::File { ca, .. } => return Ok(ca.clone()),
            Self::Kubernetes(kube) => kube,
        };
        let _waiting = readiness.pending("the CA of the cluster");
        let stop = shutdown.draining_token();
        let ca = match kube.authority(&config.process.state_dir, lifetimes, stop).await {
            Err(_) if stop.is_cancelled() => return Ok(None),
            ca => ca?,
        };
        kube.revocations(&RevocationStore::new(&config.process.state_dir)).await;
        Ok(Some(ca))
    }

    /// Keeps the parts of the server up to date with the source until the drain; in a cluster, also writes to it.
    pub(crate) async fn start(self, parts: Parts<'_>) {
        match self {
            Self::File { file, inventory, count, .. } => {
                let Runtime { router, tasks, drain, .. } = parts.runtime;
                let (router, known) = (router.clone(), parts.known_nodes);
                let apply = move |inventory: Inventory| {
                    let (router, known) = (router.clone(), known.clone());
                    count.set(&inventory);
                    async move {
                        update(router, inventory.clone()).await;
                        known.send_replace(Some(Arc::new(inventory)));
                        Ok(())
                    }
                };
                // It refuses nothing.
                let _ = apply(inventory).await;
                tasks.spawn(file.run(apply, drain.shutdown().draining_token().clone()));
            }
            Self::Kubernetes(kube) => drop(kube.start(parts)),
        }
    }
}

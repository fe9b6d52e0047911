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

use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::inventory::Inventory;
use events::Events;
use settings::Settings;
use watch::Health;

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
    pub leader: tokio::sync::watch::Receiver<bool>,
    /// The nodes.
    pub inventory: tokio::sync::watch::Receiver<Arc<Inventory>>,
    /// What the ConfigMap says.
    pub settings: tokio::sync::watch::Receiver<Arc<Settings>>,
    pub events: Events,
    pub health: Health,
    /// Ends every part.
    pub stop: CancellationToken,
}

//! What every part of the Kubernetes side works with.

use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{ClientSettings, Health, KubeError};

use crate::inventory::Inventory;
use crate::settings::Settings;

/// How long one write may take. Together with the ten seconds after which a server that cannot renew the Lease stops
/// writing, it ends before another server may hold the Lease.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(4);

/// How to reach the API server, and what the objects there are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeOptions {
    /// None: the configuration that a pod has.
    pub kubeconfig: Option<PathBuf>,
    /// None: the pod's namespace, else that of the kubeconfig's context, else `kube-system`.
    pub namespace: Option<String>,
    pub names: ObjectNames,
}

impl KubeOptions {
    /// A client, and the namespace of the objects.
    ///
    /// # Errors
    /// When the configuration is missing or wrong; no request is made.
    pub async fn connect(&self) -> Result<(kube::Client, String), KubeError> {
        match &self.kubeconfig {
            Some(path) => {
                tunnel_kube::connect_lasting(path.clone(), self.namespace.clone(), ClientSettings::SERVER)
                    .await
            }
            None => tunnel_kube::connect(None, self.namespace.as_deref(), &ClientSettings::SERVER).await,
        }
    }
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
    pub ca_secret: String,
    /// Lease of the server that writes.
    pub lease: String,
    /// ConfigMap with the revoked nodes.
    pub revocations: String,
    /// ServiceAccount of agents that run as pods.
    pub agent_service_account: String,
    /// ServiceAccount of redirectors.
    pub redirector_service_account: String,
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
            revocations: "tunnel-revoked-agents".into(),
            agent_service_account: "tunnel-agent".into(),
            redirector_service_account: "tunnel-redirector".into(),
        }
    }
}

/// The cluster as one server sees it.
#[derive(Clone)]
pub struct KubeContext {
    pub client: kube::Client,
    pub namespace: Arc<str>,
    pub names: Arc<ObjectNames>,
    /// This server's name for itself, under which it holds the Lease.
    pub identity: Arc<str>,
    /// Whether this server holds the Lease.
    pub leader: watch::Receiver<bool>,
    /// The nodes. They are not known before the first change.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The ConfigMap's ports. They are not known before the first change.
    pub settings: watch::Receiver<Arc<Settings>>,
    pub health: Health,
    pub stop: CancellationToken,
}

/// Waits until the value is so; for ever if nobody can change it any more.
pub(super) async fn becomes(value: &mut watch::Receiver<bool>, wanted: bool) {
    if value.wait_for(|now| *now == wanted).await.is_err() {
        pending::<()>().await;
    }
}

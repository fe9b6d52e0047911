//! Values shared by all parts of the Kubernetes side.

use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{ClientSettings, Health};
use tunnel_routing::inventory::Inventory;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::ConfigError;

use crate::runtime::settings::Settings;

/// Time limit of one write. A server that cannot renew the Lease stops writing after ten seconds; with this limit its
/// last write ends before another server may hold the Lease.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(4);

/// How to reach the API server, and what the objects there are called.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Kubernetes")]
pub struct KubeOptions {
    /// Kubeconfig for the API server [default: the service account of the pod that this runs in].
    #[arg(long, value_name = "FILE", alias = "kube-config", conflicts_with = "inventory")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the objects below [default: the pod's, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAMESPACE", value_parser = object_name)]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub names: ObjectNames,
}

impl KubeOptions {
    /// Returns a client and the namespace of the objects.
    ///
    /// # Errors
    /// If the configuration is missing or invalid; no request is made.
    pub async fn connect(&self) -> Result<(kube::Client, String), ConfigError> {
        let (kubeconfig, namespace) = (self.kubeconfig.clone(), self.namespace.clone());
        tunnel_kube::connect_lasting(kubeconfig, namespace, ClientSettings::SERVER).await
    }
}

/// The names of the objects, all in one namespace.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Kubernetes")]
pub struct ObjectNames {
    /// ConfigMap with the port lists: http-proxy-ports, https-proxy-ports, dnat-ports-pair, localhost-proxy-ports.
    #[arg(long, value_name = "NAME", env = "POSTERN_CONFIGMAP", default_value_t = Self::default().configmap,
          value_parser = object_name)]
    pub configmap: String,
    /// ConfigMap to write the nodes' DNS records to, for CoreDNS's hosts plugin.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().dns_configmap, value_parser = object_name)]
    pub dns_configmap: String,
    /// Service that agents dial; the server's certificate follows it.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().service, value_parser = object_name)]
    pub service: String,
    /// Service for clients in the cloud; edge nodes' DNS records point to it.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().internal_service, value_parser = object_name)]
    pub internal_service: String,
    /// Secret that holds the CA; the first server creates it.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().ca_secret, value_parser = object_name)]
    pub ca_secret: String,
    /// Lease whose holder writes DNS records, Service ports, certificates and conditions.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().lease, value_parser = object_name)]
    pub lease: String,
    /// ConfigMap with the nodes that `tunnel-server agent revoke` has shut out; it creates it.
    #[arg(id = "revocations-configmap", long, value_name = "NAME", default_value_t = Self::default().revocations,
          value_parser = object_name)]
    pub revocations: String,
    /// ServiceAccount of agents that run as pods: it entitles them to a certificate for the node that they run on.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().agent_service_account,
          value_parser = object_name)]
    pub agent_service_account: String,
    /// ServiceAccount of redirectors: it entitles them to a redirector's certificate for the node that they run on.
    #[arg(long, value_name = "NAME", default_value_t = Self::default().redirector_service_account,
          value_parser = object_name)]
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

/// Checks a name as the API server does: an RFC 1123 subdomain, like that of a node.
pub(crate) fn object_name(value: &str) -> Result<String, String> {
    value.parse::<NodeName>().map(|name| name.to_string()).map_err(|_| {
        "not the name of an object; use lower-case letters, digits, - and ., such as tunnel-server".to_owned()
    })
}

/// The cluster as seen by one server.
#[derive(Clone)]
pub struct KubeContext {
    pub client: kube::Client,
    pub namespace: Arc<str>,
    pub names: Arc<ObjectNames>,
    /// Name under which this server holds the Lease.
    pub identity: Arc<str>,
    /// True while this server holds the Lease.
    pub leader: watch::Receiver<bool>,
    /// The nodes; not known before the first change.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The ConfigMap's ports; not known before the first change.
    pub settings: watch::Receiver<Arc<Settings>>,
    pub health: Health,
    pub stop: CancellationToken,
}

/// Waits until the value is `wanted`; forever if the sender is gone.
pub(super) async fn becomes(value: &mut watch::Receiver<bool>, wanted: bool) {
    if value.wait_for(|now| *now == wanted).await.is_err() {
        pending::<()>().await;
    }
}

//! Options for the API server.

use std::path::PathBuf;

/// Default Service that leads to the servers.
pub const DEFAULT_SERVICE: &str = "x-tunnel-server-svc";

/// The API server to use, and the Service to find there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeOptions {
    /// None: the configuration of a pod.
    pub kubeconfig: Option<PathBuf>,
    /// None: the pod's namespace, else that of the kubeconfig's context, else `kube-system`.
    pub namespace: Option<String>,
    /// Service that leads to the servers.
    pub service: String,
}

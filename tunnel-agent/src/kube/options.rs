//! How the agent reaches the API server.

use std::path::PathBuf;

/// The Service that leads to the servers by default.
pub const DEFAULT_SERVICE: &str = "x-tunnel-server-svc";

/// How to reach the API server, and which Service to find there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeOptions {
    /// None: the configuration that a pod has.
    pub kubeconfig: Option<PathBuf>,
    /// None: the pod's namespace, else that of the kubeconfig's context, else `kube-system`.
    pub namespace: Option<String>,
    /// The Service that leads to the servers.
    pub service: String,
}

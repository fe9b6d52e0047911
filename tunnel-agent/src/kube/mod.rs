//! The Kubernetes side of the agent: its servers, its certificate and its pods, from the API server.
//!
//! No connection depends on it. While the API server is unreachable, the agent uses the last known servers and pods,
//! and renews the certificate at a server. The files `servers.json` and `pod-ranges.json` in the state directory keep
//! them over a restart.
//!
//! | verb | resource | for |
//! |---|---|---|
//! | list, watch | services (the one) | addresses of the servers |
//! | list, watch | endpointslices.discovery.k8s.io (of that Service) | the same, with a Service of type NodePort |
//! | create, get | certificatesigningrequests.certificates.k8s.io | the certificate |
//! | get | nodes (its own) | the ranges of its pods, with `--pod-targets=on` |

pub mod discover;
pub mod node;
pub mod servers;

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

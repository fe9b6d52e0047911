//! The Kubernetes side of the agent: its servers, its certificate and its pods, from the API server.
//!
//! None of it is needed to carry: while the API server is away, the servers and the pods are the last known ones, and the
//! certificate is renewed at a server. The files `servers` and `pod-ranges` of the state directory have them for a restart
//! meanwhile.
//!
//! | verb | resource | for |
//! |---|---|---|
//! | list, watch | services (the one) | where the servers are |
//! | list, watch | endpointslices.discovery.k8s.io (of that Service) | the same, with a Service of type NodePort |
//! | create, get | certificatesigningrequests.certificates.k8s.io | the certificate |
//! | get | nodes (its own) | the ranges of its pods |

pub mod client;
pub mod discover;
pub mod node;
mod remembered;
pub mod servers;
mod watch;

use std::path::PathBuf;

pub use client::{ApiServer, KubeError};

/// The Service that leads to the servers by default.
pub const DEFAULT_SERVICE: &str = "x-tunnel-server-svc";

/// How to reach the API server, and what to look for there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeOptions {
    /// None: the configuration that a pod has.
    pub kubeconfig: Option<PathBuf>,
    /// None: the pod's namespace, else that of the kubeconfig's context, else `kube-system`.
    pub namespace: Option<String>,
    /// The Service that leads to the servers.
    pub service: String,
}

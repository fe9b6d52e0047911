//! A real Kubernetes on the testbed: the control plane on the cloud host, a containerd and a kubelet on the cloud host
//! and on each edge host, and kubectl. None of it is configured for a tunnel.
pub mod api;
mod balancer;
pub mod control_plane;
pub mod endpoints;
pub mod host;
pub mod image;
pub mod kubectl;
pub mod manifests;
pub mod metrics_server;
pub mod monitoring;
mod names;
pub mod peers;
pub mod pki;
mod pod_logs;
pub mod pods;
pub mod postern;
mod running;
pub mod terminal;
pub mod tls;
pub mod webhook;

pub use names::{CLOUD_NODE, EDGE_NODE};
pub use running::Cluster;

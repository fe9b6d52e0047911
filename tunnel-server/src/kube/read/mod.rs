//! What the server reads from the cluster: each file follows one kind of object. While the API server is silent, what it
//! last said stays in effect.

pub mod authority;
pub mod cluster_ips;
pub mod configmap;
pub mod names;
pub mod nodes;
pub mod peers;
pub mod revocations;
pub mod service_ranges;

/// The label by which EndpointSlices name their Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

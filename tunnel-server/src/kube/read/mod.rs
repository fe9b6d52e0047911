//! Reads from the cluster: each file follows one kind of object. While the API server does not answer, its last state
//! stays in effect.

pub mod authority;
pub mod cluster_ips;
pub mod configmap;
pub mod names;
pub mod nodes;
pub mod peers;
pub mod revocations;
pub mod service_ranges;

/// Label of EndpointSlices with the name of their Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

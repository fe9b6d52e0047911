//! Names and addresses of every test cluster.

/// Address range of Services.
pub(super) const SERVICE_CIDR: &str = "10.96.0.0/16";
/// Cluster IP of the Service `kubernetes`.
pub(super) const KUBERNETES_SERVICE: &str = "10.96.0.1";
/// Node on the cloud host.
pub const CLOUD_NODE: &str = "cloud-1";
/// Node on edge 1.
pub const EDGE_NODE: &str = "edge-1";

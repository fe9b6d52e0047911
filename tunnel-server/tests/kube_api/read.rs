//! Objects that the server reads from the cluster.

mod authority;
mod configmap;
mod names;
mod nodes;
mod revocations;
mod service_ranges;

//! The Kubernetes side of the agent: its servers, its certificate and its pods, from the API server.
//!
//! No connection needs it: while the API server is away, the servers and the pods are the last known ones, and the
//! certificate is renewed at a server. The files `servers.json` and `pod-ranges.json` of the state directory keep them for a
//! restart in the meantime.
//!
//! | verb | resource | for |
//! |---|---|---|
//! | list, watch | services (the one) | where the servers are |
//! | list, watch | endpointslices.discovery.k8s.io (of that Service) | the same, with a Service of type NodePort |
//! | create, get | certificatesigningrequests.certificates.k8s.io | the certificate |
//! | get | nodes (its own) | the ranges of its pods, with `--pod-targets=on` |

pub mod discover;
pub mod node;
mod options;
pub mod servers;

pub use options::{DEFAULT_SERVICE, KubeOptions};
pub use tunnel_kube::{ApiServer, KubeError};

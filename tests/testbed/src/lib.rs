//! The environment of the end-to-end tests: network namespaces and cgroups wired into a cloud host and edges behind
//! NAT, the real programs in them, and a real Kubernetes on top ([`cluster`]).
//!
//! A run is a process of its own ([`supervisor`]) that builds a [`Testbed`], moves itself into the cloud's cgroup and
//! network namespace, and only then starts its runtime. So a plain `TcpStream::connect` in a scenario is exactly the
//! cloud client that the redirect sees. However that process ends, its supervisor removes everything that has the
//! run's unique name.
#![forbid(unsafe_code)]

pub mod access_log;
pub mod admin;
pub mod agent;
pub mod asleep;
pub mod authority;
pub mod cgroup;
pub mod client;
pub mod cluster;
pub mod dns;
pub mod document;
pub mod id;
pub mod inventory;
pub mod load_target;
pub mod logs;
pub mod maps;
pub mod metrics;
pub mod netns;
pub mod percentiles;
pub mod process;
pub mod prometheus;
pub mod report;
pub mod server;
pub mod snapshot;
pub mod supervisor;
pub mod sweep;
pub mod target;
pub mod tls;
mod topology;
pub mod visitors;
pub mod wait;
pub mod wan;

pub use topology::{CLOUD, CloudHost, Edge, NEIGHBOUR, POD, POD_CIDR, ROUTER, Shape, Testbed};

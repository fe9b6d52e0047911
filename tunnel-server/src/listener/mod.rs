//! Listeners for clients, and the ways in which each finds the node of a connection.
//!
//! Each is one file behind the trait [`Listener`], which reads from an accepted connection its node and target. Everything
//! after that (the session, the bytes, the access log, the metrics) is the same for all. A [`Listener`] may also hand a
//! connection to `front/`, which speaks HTTP with the client and with the targets of its requests.

mod access_log;
mod answer;
pub mod client_hello;
mod cluster;
mod config;
mod connect;
mod context;
mod direct;
mod egress;
mod front;
#[cfg(test)]
mod hosts_tests;
mod http;
mod https;
mod judge;
mod map;
mod moved;
mod piped;
mod preface;
mod proxy;
mod redirect;
mod serve;
mod socket;
mod upstream;
mod way;
mod workload;

pub(crate) use access_log::AccessLogGuard;
pub use cluster::{Cluster, ClusterIps, ClusterService, Endpoint, Listed};
pub use config::{ConnectConfig, ListenerConfig, parse_secure_ports};
pub(crate) use config::{MOST_SECURE_PORTS, Others};
pub(crate) use connect::{Gatekeeper, Reception, Services};
pub use context::{ListenerContext, OpenError, OpenRequest};
pub use egress::EgressConfig;
pub(crate) use egress::{ClusterServices, Egress, EgressTls, NAME as EGRESS, Socket as EgressSocket};
pub(crate) use front::{Admission, Front, Material, MetricsPage, Pods, TargetTls};
pub use front::{RequestTarget, parse_destination, target_head};
pub(crate) use http::{HTTP, METRICS, PLAIN};
pub(crate) use https::{HTTPS, Https};
pub(crate) use judge::{judge_open, until_withdrawn};
pub(crate) use map::{MAP, Maps};
pub(crate) use moved::end_moved;
pub use piped::{Piped, PipedRecord};
pub(crate) use proxy::{CONNECT, Connect};
pub(crate) use redirect::{REDIRECT, Redirected};
#[cfg(test)]
pub(crate) use serve::tests;
pub(crate) use serve::{Listener, serve};
pub(crate) use workload::{EDGE, Workload};

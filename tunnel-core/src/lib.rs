//! Shared by both ends of the tunnel: the protocol, the link and its settings, relaying of connections, identity,
//! lifecycle, configuration and the admin endpoints.
#![forbid(unsafe_code)]

pub mod admin;
pub mod backoff;
pub mod bench;
pub mod bundle;
pub mod cgroup;
pub mod config;
pub mod connections;
pub mod doctor;
pub mod error;
pub mod fair;
pub mod gauges;
pub mod grpc;
pub mod identity;
pub mod kernel;
pub mod konnectivity;
pub mod lifecycle;
pub mod limits;
pub mod link;
pub mod live;
pub mod log_once;
mod log_queue;
pub mod logging;
pub mod memory;
pub mod net;
pub mod outcome;
pub mod output;
pub mod proto;
pub mod relay;
pub mod state_file;
pub mod takeover;
mod tcp_info;
pub mod text;

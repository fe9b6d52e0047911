//! The cloud side of the tunnel: listeners, sessions, the CA, the cluster, and what they are to the operator.
#![forbid(unsafe_code)]

mod admission;
pub mod agent_port;
pub mod app;
pub mod caller;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod inventory;
pub mod kube;
pub mod listen;
pub mod listener;
pub mod maps;
pub mod metrics;
pub mod peers;
pub mod pki;
pub mod policy;
pub mod runtime;
pub mod session;
pub mod status;
pub mod takeover;

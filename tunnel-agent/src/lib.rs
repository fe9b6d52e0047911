//! The edge side of the tunnel: dials the servers and lets them reach this node.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod app;
pub mod cli;
pub mod config;
mod dial;
pub mod identity;
pub mod kube;
pub mod metrics;
pub mod policy;
pub mod reach;
mod servers;
pub mod session;
pub mod status;
mod turns;

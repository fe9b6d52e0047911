//! The edge side of the tunnel: dials the servers and lets them reach this node.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod app;
pub mod config;
pub mod dial;
pub mod enroll;
pub mod kube;
pub mod metrics;
pub mod policy;
pub mod session;
pub mod status;

//! The edge side of the tunnel: dials the servers and lets them reach this node.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod app;
mod busy;
pub mod cli;
pub mod config;
pub mod connections;
mod dial;
pub mod doctor;
mod handover;
pub mod konnectivity;
pub mod kube;
mod listeners;
pub mod metrics;
pub mod outbound;
pub mod places;
pub mod policy;
pub mod runtime;
mod servers;
pub mod session;
pub mod status;
pub mod takeover;

pub use tunnel_pki::enrol::reach;

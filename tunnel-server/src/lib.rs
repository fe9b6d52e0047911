//! The cloud side of the tunnel: redirect, doors, routes, sessions and identity.
#![deny(unsafe_code)]

pub mod accept;
mod admission;
pub mod agent_port;
pub mod app;
pub mod cli;
pub mod config;
pub mod door;
pub mod inventory;
pub mod kube;
mod listeners;
pub mod metrics;
pub mod peers;
pub mod pki;
pub mod redirect;
pub mod route;
mod server_id;
pub mod session;
pub mod settings;
mod source;
pub mod status;
mod takeover;

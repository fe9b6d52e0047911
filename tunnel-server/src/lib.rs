//! The cloud side of the tunnel: redirect, doors, routing, sessions and identity.
#![deny(unsafe_code)]

mod accept;
mod admission;
pub mod app;
pub mod cli;
pub mod config;
pub mod door;
pub mod inventory;
pub mod kube;
pub mod metrics;
pub mod pki;
pub mod redirect;
pub mod report;
pub mod route;
pub mod session;
pub mod settings;
pub mod status;

//! The cloud side of the tunnel: redirect, listeners, routes, sessions and identity.
#![deny(unsafe_code)]

mod admission;
pub mod agent_port;
mod answer_cache;
pub mod app;
pub mod bench;
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
mod page;
pub mod peers;
pub mod pki;
pub mod policy;
pub mod redirect;
mod reloaded;
pub mod role;
pub mod route;
pub mod runtime;
pub mod session;
pub mod settings;
pub mod status;
mod takeover;
mod yaml;

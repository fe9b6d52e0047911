//! The base of both programs: configuration, log, lifecycle, limits, files and the admin port. It knows neither the link
//! nor certificates nor Kubernetes.
#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod answer_cache;
pub mod backoff;
pub mod blocking;
pub mod cgroup;
pub mod clock;
pub mod completion;
pub mod config;
pub mod error;
pub mod fair;
pub mod files;
pub mod gauges;
pub mod kernel;
pub mod lifecycle;
pub mod limits;
pub mod live;
pub mod log_once;
mod log_queue;
pub mod logging;
pub mod memory;
pub mod net;
mod node_name;
pub mod output;
pub mod places;
pub mod progress;
pub mod reloaded;
pub mod service;
pub mod settled;
pub mod state_file;
pub mod takeover;
pub mod text;
pub mod yaml;

pub use node_name::{NodeName, NodeNameError};

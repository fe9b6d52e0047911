//! The testbed (network namespaces, cgroups, real programs) and the scenarios that run on it.
//!
//! A scenario is its own process: the [`runner`] (binary `scenarios`) starts itself again for every scenario, and the
//! new process builds a [`testbed::Testbed`], moves itself into the cloud's cgroup and network namespace, and only
//! then starts its runtime. So a plain `TcpStream::connect` in a scenario is exactly the cloud client that the
//! redirect sees. Whatever happens to that process, the parent removes everything by the unique name of the run.
#![forbid(unsafe_code)]

pub mod access_log;
pub mod agent;
pub mod authority;
pub mod bench;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod evil;
pub mod inventory;
pub mod metrics;
pub mod prometheus;
pub mod runner;
pub mod scenarios;
pub mod server;
pub mod target;
pub mod testbed;
pub mod wait;

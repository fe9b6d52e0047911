//! Sessions with the servers: connect, let the server attach, serve its streams, and connect again.

mod additional;
mod bench;
mod bench_policy;
mod choice;
mod connect;
mod control;
mod epoch;
mod idle_cuts;
mod link_loop;
mod link_metrics;
mod link_set;
mod relay;
mod resumed;
mod serve;
mod session_end;
mod shared;
mod state;
mod successor;

pub use link_loop::{LinkLoop, LinkPhase, LinkStatus};
pub use link_metrics::register_links;
pub use link_set::{LinkSet, Running};
#[cfg(test)]
pub(crate) use session_end::{Refusal, SessionEnd};
pub use shared::Shared;

//! The sessions with the servers: connect, let the server attach, serve its streams, and connect again.

mod additional;
mod bundles;
mod carry;
mod connect;
mod control;
mod epoch;
mod link_loop;
mod link_metrics;
mod link_set;
mod serve;
mod session_end;
mod shared;
mod state;
mod successor;

pub use bundles::install_bundles;
pub use epoch::EpochSource;
pub use link_loop::{LinkLoop, LinkPhase, LinkStatus};
pub use link_metrics::register_links;
pub use link_set::LinkSet;
pub use shared::{Announced, Attached, Shared};

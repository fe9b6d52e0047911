//! The sessions with the agents: one per node, with a stream on a link for each connection.

pub mod bench;
mod link;
mod link_metrics;
mod links;
mod pace;
mod registry;
mod workers;

pub use link::{Link, MOST_STREAMS, Taken};
pub(crate) use link::{On, PendingStream, Streams, dialled};
pub use link_metrics::register_links;
#[cfg(test)]
pub(crate) use links::tests::link as test_link;
pub use links::{Links, Placing};
pub(crate) use pace::{grace, longest, spread, told_over, told_within};
pub use registry::{Fenced, LastEnd, Session, Sessions};
pub(crate) use registry::{Forgotten, Move};
pub use workers::{Threads, Workers};

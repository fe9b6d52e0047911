//! A second agent with the same state directory on the same node takes over from the first, without a gap.
//!
//! The second connects to the first one's Unix socket (`tunnel_runtime::takeover`) and gets the admin port and the
//! listeners that lead to the cloud, on which the first one continues to accept. Then:
//!
//! 1. It attaches to the servers, with a Hello that says that it succeeds. The servers give it the node's place, and
//!    let the first one's sessions keep their connections. It tells the first one where it is attached, so that the
//!    first one no longer dials there.
//! 2. Once it is attached wherever the first one was, or no more servers come, it has taken over. The first one answers
//!    that once it renews its certificate no more; only then may the second one write the key.
//!    The second one then resets connections to addresses that only the first one listens on.
//! 3. The first one finishes its connections and accepts no more. Then it ends. A pod waits to be stopped, because the
//!    kubelet would start it again, and continues as before if the second one dies or is told to stop.

mod message;
mod predecessor;
mod successor;
#[cfg(test)]
mod tests;

pub use predecessor::{Predecessor, take_over};
pub use successor::Succession;
pub(crate) use successor::TAKE_OVER;

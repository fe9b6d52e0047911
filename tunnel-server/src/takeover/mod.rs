//! A second server with the same state directory on the same host takes over from the first without interruption.
//!
//! The second one connects to the Unix socket of the first (`tunnel_runtime::takeover`) and receives the listening
//! sockets: connections queued in them are accepted by whichever server accepts next, so none is lost. Then:
//!
//! 1. The second one learns the nodes, and those of the other servers. Then it asks for the agents: the first one stops
//!    accepting them, and tells its own to look for its successor. They keep their present link until the new one is in
//!    use.
//! 2. Once they have come, or no more arrive, it asks for the listeners: the first one stops accepting connections and
//!    releases the redirect, for which the second one's programs are already attached, with the same virtual addresses.
//!    The second one then resets connections to addresses that only the first one listens on.
//! 3. The first one finishes its connections. Standalone it then exits; in a cluster it waits to be stopped, because
//!    the kubelet would restart it, and resumes its work if the second one dies.
//! 4. If the second one is told to stop meanwhile, it gives everything back in the same order: the agents, then the
//!    listeners.

mod message;
mod predecessor;
mod successor;
#[cfg(test)]
mod tests;

use tunnel_runtime::accept::Gate;

pub use message::Hello;
pub use predecessor::{Before, Predecessor, TakeOver};
pub(crate) use predecessor::{NODES, PORTS};
pub use successor::{Phase, Succession};

/// The gates of the listeners that two servers of one host use in turns.
#[derive(Clone, Debug)]
pub struct Gates {
    pub agents: Gate,
    pub listeners: Gate,
}

impl Gates {
    /// Opens the gate for agents, and that for connections if `listeners`.
    pub fn new(listeners: bool) -> Self {
        Self { agents: Gate::new(true), listeners: Gate::new(listeners) }
    }
}

//! A second server with the same state directory on the same host takes over from the first, without a gap.
//!
//! The second connects to the first one's Unix socket (`tunnel_core::takeover`), and gets the listening sockets: whatever
//! waits in them is accepted by whoever accepts next, so nothing is lost. Then:
//!
//! 1. The second one learns the nodes, and which of them the other servers have. Then it asks for the agents: the first one
//!    accepts none any more, and tells its own to look for its successor. They keep the link that they have until the new
//!    one is in use.
//! 2. Once they have come, or no more do, it asks for the doors: the first one accepts no connection any more and lets go
//!    of the redirect, where the second one's programs are in place already, with the same tokens.
//! 3. The first one finishes what it carries. Standalone it ends then; in a cluster it waits to be stopped, because the
//!    kubelet would start it again, and goes on as before should the second one die.
//! 4. A second one that is told to stop meanwhile gives everything back in the same order: the agents, then the doors.

mod message;
mod pace;
mod predecessor;
mod successor;

use tokio::net::TcpListener;

pub(crate) use predecessor::{Before, NODES, PORTS, Predecessor, TakeOver};
pub(crate) use successor::Succession;

use crate::accept::{Gate, Gated};

/// What two servers of one host may have in turns.
#[derive(Clone, Debug)]
pub(crate) struct Gates {
    pub(crate) agents: Gate,
    pub(crate) doors: Gate,
}

impl Gates {
    /// Agents are accepted; connections too if `doors`.
    pub(crate) fn new(doors: bool) -> Self {
        Self { agents: Gate::new(true), doors: Gate::new(doors) }
    }

    pub(crate) fn agents(&self, listener: TcpListener) -> Gated {
        self.agents.guard(listener)
    }

    pub(crate) fn door(&self, listener: TcpListener) -> Gated {
        self.doors.guard(listener)
    }
}

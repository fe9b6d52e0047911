//! Where the connections of agents and of other servers come from.

use std::net::SocketAddr;

use tunnel_link::link::Wire;
use tunnel_runtime::accept::Gated;

/// A port, or in a simulation what stands for it.
pub trait Accept: Send + 'static {
    /// Returns the next connection of the port `name`, and its client's address.
    fn accept(&mut self, name: &'static str) -> impl Future<Output = (Wire, SocketAddr)> + Send;
}

impl Accept for Gated {
    async fn accept(&mut self, name: &'static str) -> (Wire, SocketAddr) {
        let (socket, peer) = Self::accept(self, name).await;
        (socket.into(), peer)
    }
}

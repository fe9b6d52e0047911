//! The redirect's door: the accepted socket's own address is the token, its port the destination port.

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use tokio::net::TcpStream;

use super::{Door, Opening, Refusal};
use crate::route::Router;

/// Takes what the BPF programs redirect.
pub struct Redirected {
    /// Tokens on which the redirect's verification connects to itself.
    pub self_test: Vec<IpAddr>,
}

impl Door for Redirected {
    const NAME: &'static str = "redirect";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opening, Refusal> {
        let local = socket.local_addr()?;
        let token = local.ip().to_canonical();
        if self.self_test.contains(&token) {
            return Err(Refusal::Own);
        }
        let destination = router
            .snapshot()
            .by_token(token)
            .ok_or_else(|| Refusal::Caller(format!("{token} is no node's token: the node has left, or never was")))?;
        Ok(Opening {
            node: destination.node,
            target: SocketAddr::new(destination.address, local.port()),
            prefix: Bytes::new(),
        })
    }
}

//! The redirect's door: the accepted socket's own address is the token, its port the destination port.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::{Door, Opening, Refusal};
use crate::redirect::Redirect;
use crate::route::Router;

/// Takes what the BPF programs redirect.
pub struct Redirected {
    /// Knows its own self-tests.
    pub redirect: Arc<Redirect>,
}

impl Door for Redirected {
    const NAME: &'static str = "redirect";

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opening, Refusal> {
        let local = socket.local_addr()?;
        let token = local.ip().to_canonical();
        if self.redirect.is_self_test(token) {
            return Err(Refusal::Own);
        }
        let destination = router.snapshot().by_token(token).ok_or_else(|| {
            Refusal::Caller(format!("{token} is no node's token: the node has left, or never was"))
        })?;
        // Only the hook at connect() rewrites, and only these ports: whoever brings another has dialled a token itself.
        if !destination.pod && !router.tunnels(local.port()) {
            return Err(Refusal::Caller(format!("port {} of {token} is not tunnelled", local.port())));
        }
        let target = if destination.pod {
            SocketAddr::new(destination.address, local.port())
        } else {
            router.target(destination.address, local.port())
        };
        Ok(Opening { node: destination.node, target, prefix: Bytes::new() })
    }
}

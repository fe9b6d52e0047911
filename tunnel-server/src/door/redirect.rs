//! The redirect's door: the accepted socket's own address is the token, and its port the port that the client dialled.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::context::{OpenError, OpenRequest};
use super::open::{Door, Opened};
use crate::admission::source_key;
use crate::redirect::Redirect;
use crate::route::Router;

pub(crate) struct Redirected {
    /// Recognises its self-tests.
    pub(crate) redirect: Arc<Redirect>,
}

impl Door for Redirected {
    const NAME: &'static str = "redirect";
    const READS: bool = false;

    /// A process of this host has its token as its source, and accept(2) shows that as getpeername(2) does: as the address that
    /// the token stands for.
    fn client(&self, socket: &TcpStream, accepted: SocketAddr, router: &Router) -> SocketAddr {
        let Ok(local) = socket.local_addr() else { return accepted };
        let token = local.ip().to_canonical();
        match router.snapshot().by_token(token) {
            Some(node) if node.address == accepted.ip().to_canonical() => {
                SocketAddr::new(token, accepted.port())
            }
            _ => accepted,
        }
    }

    /// This host's own processes are as many sources as there are nodes. Their IPv4 connections come from the token itself: a `local`
    /// route without a preferred source takes the destination. Those of IPv6 come from an address of this host.
    fn source(socket: &TcpStream, client: IpAddr, router: &Router) -> IpAddr {
        match socket.local_addr().ok().filter(|_| router.is_own(client)) {
            Some(token) => token.ip().to_canonical(),
            None => source_key(client),
        }
    }

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opened, OpenError> {
        let local = socket.local_addr()?;
        let token = local.ip().to_canonical();
        if self.redirect.is_self_test(token) {
            return Err(OpenError::SelfTest);
        }
        let node = router.snapshot().by_token(token).ok_or_else(|| {
            OpenError::Client(format!(
                "{token} is not the token of a node: the node has left, or never existed"
            ))
        })?;
        // The hook at connect() rewrites only to these ports: on any other, the client has dialled the token itself.
        if !node.pod && !router.tunnels(local.port()) {
            return Err(OpenError::Client(format!("port {} of {token} is not tunnelled", local.port())));
        }
        let target = router.dialled(&node, local.port());
        Ok(Opened::Carried(OpenRequest::new(node.node, target, Bytes::new())))
    }
}

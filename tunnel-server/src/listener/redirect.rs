//! The redirect's listener: the accepted socket's own address is the virtual address, or the edge node's own if a route
//! led the connection here. Its port is the port that the client dialled.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_redirect::Redirect;
use tunnel_routing::{ByAddress, Router};

use super::context::{OpenError, OpenRequest};
use super::open::{Listener, Opened};
use crate::admission::source_key;

/// The listener's name in logs and metrics.
pub(crate) const REDIRECT: &str = "redirect";

pub(crate) struct Redirected {
    /// Recognises its self-tests.
    pub(crate) redirect: Arc<Redirect>,
}

impl Listener for Redirected {
    const READS: bool = false;

    fn name(&self) -> &'static str {
        REDIRECT
    }

    /// Maps the source address of this host's own processes back to the virtual address. That is their source, but
    /// accept(2), like getpeername(2), returns the node's address that it stands for.
    fn client(&self, socket: &TcpStream, accepted: SocketAddr, router: &Router) -> SocketAddr {
        let Ok(local) = socket.local_addr() else { return accepted };
        let virtual_address = local.ip().to_canonical();
        match router.snapshot().by_virtual_address(virtual_address) {
            Some(node) if node.address == accepted.ip().to_canonical() => {
                SocketAddr::new(virtual_address, accepted.port())
            }
            _ => accepted,
        }
    }

    /// Counts this host's own processes as one source for each node. Their IPv4 connections come from the virtual
    /// address itself, because a `local` route without a preferred source uses the destination. Their IPv6 connections
    /// come from an address of this host.
    fn source(socket: &TcpStream, client: IpAddr, router: &Router) -> IpAddr {
        match socket.local_addr().ok().filter(|_| router.is_own(client)) {
            Some(virtual_address) => virtual_address.ip().to_canonical(),
            None => source_key(client),
        }
    }

    async fn open(&self, socket: &mut TcpStream, router: &Router) -> Result<Opened, OpenError> {
        let local = socket.local_addr()?;
        let address = local.ip().to_canonical();
        if self.redirect.is_self_test(address) {
            return Err(OpenError::SelfTest);
        }
        let snapshot = router.snapshot();
        let by_route = || match snapshot.by_address(address) {
            ByAddress::Unique(node) => Some(node),
            ByAddress::Ambiguous(_) => None,
            ByAddress::Unknown => snapshot.by_pod(address),
        };
        let node = snapshot.by_virtual_address(address);
        let node = node.or_else(|| self.redirect.by_route().then(by_route)?).ok_or_else(|| {
            OpenError::Client(format!(
                "{address} is neither the virtual address of a node nor the address of one alone: the node has left, or never existed"
            ))
        })?;
        // The hook at connect() rewrites only to these ports: on any other, the client has dialled the virtual address
        // itself.
        if !node.pod && !router.tunnels(local.port()) {
            return Err(OpenError::Client(format!("port {} of {address} is not tunnelled", local.port())));
        }
        let target = router.dialled(&node, local.port());
        Ok(Opened::Relayed(OpenRequest::to_found(node, target, Bytes::new())))
    }
}

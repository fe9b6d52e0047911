//! The redirect's listener: the accepted socket's own address is the virtual address, or the edge node's own if a route
//! led the connection here. Its port is the port that the client dialled.

use ipnet::IpNet;
use tokio::net::TcpStream;
use tunnel_routing::Router;

use super::context::{OpenError, OpenRequest};
use super::serve::{Client, Listener, Opened};
use crate::admission::source_key;

/// The listener's name in logs and metrics.
pub(crate) const REDIRECT: &str = "redirect";

pub(crate) struct Redirected {
    /// Virtual addresses of self-tests of the redirect, this server's or another's.
    pub(crate) self_tests: [IpNet; 2],
    /// Connections of other network namespaces come by route, to the edge nodes' own addresses.
    pub(crate) by_route: bool,
}

impl Listener for Redirected {
    const READS: bool = false;

    fn name(&self) -> &'static str {
        REDIRECT
    }

    async fn open(
        &self,
        socket: &mut TcpStream,
        client: &mut Client,
        router: &Router,
    ) -> Result<Opened, OpenError> {
        let local = socket.local_addr()?;
        let address = local.ip().to_canonical();
        if self.self_tests.iter().any(|reserved| reserved.contains(&address)) {
            return Err(OpenError::SelfTest);
        }
        let snapshot = router.snapshot();
        let virtual_address = snapshot.by_virtual_address(address);
        // The source of this host's own processes is the virtual address, but accept(2), like getpeername(2), returns the
        // node's address that it stands for.
        if virtual_address.as_ref().is_some_and(|node| node.address == client.address.ip().to_canonical()) {
            client.address.set_ip(address);
        }
        // This host's own processes count as one source for each node. Their IPv4 connections come from the virtual
        // address itself, because a `local` route without a preferred source uses the destination. Their IPv6 connections
        // come from an address of this host.
        client.source = match router.is_own(client.address.ip()) {
            true => address,
            false => source_key(client.address.ip()),
        };
        let by_route = || self.by_route.then(|| snapshot.holder(address))?;
        let node = virtual_address.or_else(by_route).ok_or_else(|| {
            OpenError::Client(format!(
                "{address} is no virtual address, and no node's or several nodes' address: the node has left, or never existed"
            ))
        })?;
        // The hook at connect() rewrites only to these ports: on any other, the client has dialled the virtual address
        // itself.
        if !node.pod && !router.tunnels(local.port()) {
            return Err(OpenError::Client(format!("port {} of {address} is not tunnelled", local.port())));
        }
        Ok(Opened::Relayed(OpenRequest::to_port(node, local.port(), router), None))
    }
}

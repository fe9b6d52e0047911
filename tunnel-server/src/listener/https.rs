//! The https listener. A ClientHello that names this server, or no server, as for a URL with an address, has its TLS ended
//! here if that is enabled; then each request names its node. One whose SNI names a node is passed through: the kubelet
//! gets every byte unchanged, and decides. This server's names come first, as a Node may be named like it. Any other name
//! gets an alert. Further ports lead to other ports of nodes than the kubelet's.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::net::TcpStream;
use tunnel_routing::{Resolved, Router};

use super::client_hello::parse_client_hello;
use super::context::{OpenError, OpenRequest};
use super::front::Front;
use super::preface::{PrefaceError, answer, read_preface, timed_out};
use super::serve::{Client, Listener, Opened};

/// A fatal TLS alert (RFC 8446 §6) without its description.
const ALERT: [u8; 6] = [21, 3, 3, 0, 2, 2];
const UNRECOGNIZED_NAME: u8 = 112;

/// The listener's name in logs and metrics.
pub(crate) const HTTPS: &str = "https";

pub(crate) struct Https {
    /// Ends the TLS of clients that address this server; `None` to end nobody's.
    pub(crate) front: Option<Arc<Front>>,
    /// Port of the nodes that a name leads to; `None` for the kubelet's.
    pub(crate) port: Option<u16>,
}

impl Https {
    /// Resolves the name in a ClientHello.
    ///
    /// # Errors
    /// The name is not an edge node's. A pod has no kubelet.
    pub(super) fn request(&self, name: Option<&str>, router: &Router) -> Result<OpenRequest, String> {
        let name = name.ok_or("the ClientHello names no server: send the node's name as SNI")?;
        match router.resolve(name) {
            Resolved::Edge(node) => {
                let target = match self.port {
                    Some(port) => router.dialled(&node, port),
                    None => SocketAddr::new(node.address, node.kubelet_port),
                };
                Ok(OpenRequest::to_found(node, target))
            }
            other => Err(other.to_string()),
        }
    }

    /// Returns the front end if a client addresses this server.
    fn is_meant(&self, name: Option<&str>) -> Option<&Arc<Front>> {
        let front = self.front.as_ref()?;
        let own = name.is_none_or(|name| front.tls.as_ref().is_some_and(|tls| tls.is_own_name(name)));
        own.then_some(front)
    }
}

impl Listener for Https {
    fn name(&self) -> &'static str {
        HTTPS
    }

    async fn open(
        &self,
        socket: &mut TcpStream,
        _: &mut Client,
        router: &Router,
    ) -> Result<Opened, OpenError> {
        const HELLO: &str = "ClientHello";
        let mut read = BytesMut::new();
        let name = match read_preface(socket, &mut read, HELLO, parse_client_hello).await {
            Ok(hello) => hello.name,
            Err(PrefaceError::Lost(error)) => return Err(error),
            Err(PrefaceError::TimedOut) => return Err(OpenError::Client(timed_out(HELLO))),
            Err(PrefaceError::Invalid(error)) => {
                alert(socket, error.alert()).await;
                return Err(OpenError::Client(error.to_string()));
            }
        };
        if let Some(front) = self.is_meant(name.as_deref()) {
            return Ok(Opened::Served { front: front.clone(), prefix: read.freeze() });
        }
        match self.request(name.as_deref(), router) {
            Ok(request) => Ok(Opened::Relayed(OpenRequest { prefix: read.freeze(), ..request }, None)),
            Err(reason) => {
                alert(socket, UNRECOGNIZED_NAME).await;
                Err(OpenError::Client(reason))
            }
        }
    }
}

async fn alert(socket: &mut TcpStream, description: u8) {
    answer(socket, &[&ALERT[..], &[description]].concat()).await;
}

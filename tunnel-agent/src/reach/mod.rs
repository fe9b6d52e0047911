//! TCP connections with servers: directly, or through an HTTP proxy.

mod direct;
mod proxy;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tunnel_core::link::Congestion;

pub use proxy::Proxy;

/// The way to the servers.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    proxy: Option<Arc<Proxy>>,
    congestion: Congestion,
}

/// A server to connect with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    /// `HOST:PORT` as configured or found: directly or through the proxy.
    Named(String),
    /// Directly, at this address.
    At(SocketAddr),
}

/// A TCP connection with a server.
pub(crate) struct Reached {
    pub(crate) stream: TcpStream,
    /// Leads to the same server once more, as far as that can be known: behind a proxy its name may lead to others.
    pub(crate) server: Server,
    /// The proxy's address.
    pub(crate) proxy: Option<String>,
}

impl Reach {
    pub fn new(proxy: Option<Arc<Proxy>>, congestion: Congestion) -> Self {
        Self { proxy, congestion }
    }

    /// Connects. Never gives up while nothing refuses: the caller bounds it.
    ///
    /// # Errors
    /// The name does not resolve, every address refuses, or the proxy does.
    pub(crate) async fn connect(&self, server: &Server) -> io::Result<Reached> {
        let reached = self.dial(server).await?;
        self.congestion.set(&reached.stream)?;
        Ok(reached)
    }

    async fn dial(&self, server: &Server) -> io::Result<Reached> {
        let name = match server {
            Server::Named(name) => name.clone(),
            Server::At(address) => {
                let stream = TcpStream::connect(address).await?;
                return Ok(Reached { stream, server: server.clone(), proxy: None });
            }
        };
        match self.proxy.as_ref().and_then(|proxy| proxy.way_to(&name)) {
            Some(way) => {
                let stream = way.connect(&name).await?;
                Ok(Reached { stream, server: Server::Named(name), proxy: Some(way.address) })
            }
            None => {
                let stream = direct::connect(&name).await?;
                let server = Server::At(stream.peer_addr()?);
                Ok(Reached { stream, server, proxy: None })
            }
        }
    }
}

/// Follows an error of TLS that came through a proxy; empty without one.
pub(crate) fn tls_hint(proxy: Option<&str>) -> String {
    proxy.map_or_else(String::new, |proxy| {
        format!(" (through the proxy {proxy}: one that opens TLS must pass this connection on unopened)")
    })
}

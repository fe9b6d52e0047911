//! TCP connections to servers, direct or through an HTTP proxy.

mod direct;
mod proxy;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tunnel_link::link::Congestion;

pub use proxy::{Proxy, ProxyFault, proxy_fault};

/// Settings for connections to servers: the proxy and the congestion control.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    proxy: Option<Arc<Proxy>>,
    congestion: Congestion,
}

/// A server to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// `HOST:PORT` as configured or found. Connected directly or through the proxy.
    Named(String),
    /// Connected directly at this address.
    At(SocketAddr),
}

/// A TCP connection to a server.
pub struct Reached {
    pub stream: TcpStream,
    /// Connects to the same server again, as far as possible: behind a proxy the name may lead to other servers.
    pub server: Server,
    /// Address of the proxy.
    pub proxy: Option<String>,
}

impl Reach {
    pub fn new(proxy: Option<Proxy>, congestion: Congestion) -> Self {
        Self { proxy: proxy.map(Arc::new), congestion }
    }

    pub fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_deref()
    }

    /// True if this `HOST:PORT` is reached through the proxy.
    pub fn goes_through_proxy(&self, server: &str) -> bool {
        self.proxy.as_ref().is_some_and(|proxy| proxy.way_to(server).is_some())
    }

    pub fn congestion(&self) -> &Congestion {
        &self.congestion
    }

    /// Connects. Never gives up while nothing refuses: the caller sets a limit.
    ///
    /// # Errors
    /// The name does not resolve, every address refuses, or the proxy does.
    pub async fn connect(&self, server: &Server) -> io::Result<Reached> {
        let reached = self.dial(server).await?;
        self.congestion.set(&reached.stream);
        Ok(reached)
    }

    async fn dial(&self, server: &Server) -> io::Result<Reached> {
        if let (Server::Named(name), Some(proxy)) = (server, &self.proxy)
            && let Some(way) = proxy.way_to(name)
        {
            let stream = way.connect(name).await?;
            return Ok(Reached { stream, server: server.clone(), proxy: Some(way.address) });
        }
        let stream = direct::connect(&server.to_string()).await?;
        let server = Server::At(stream.peer_addr()?);
        Ok(Reached { stream, server, proxy: None })
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::At(address) => address.fmt(f),
        }
    }
}

/// Hint to append to a TLS error of a connection through a proxy. Empty without one.
pub fn tls_hint(proxy: Option<&str>) -> String {
    proxy.map_or_else(String::new, |proxy| {
        format!(" (through the proxy {proxy}: one that opens TLS must pass this connection on unopened)")
    })
}

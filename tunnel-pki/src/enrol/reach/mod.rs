//! Connections to servers: by TCP, direct or through an HTTP proxy.

mod direct;
mod proxy;
mod server;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpStream;
use tunnel_link::link::{Congestion, Wire, multipath_socket};
use tunnel_runtime::net::refine;

pub use proxy::{Proxy, ProxyFault, proxy_fault};
pub use server::Server;

/// A network other than the kernel's.
pub trait Network: fmt::Debug + Send + Sync {
    /// Connects, as connect(2) does.
    fn connect(&self, to: SocketAddr) -> Connecting;
}

/// A connection of a [`Network`].
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Wire>> + Send>>;

/// Settings for connections to servers.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    pub proxy: Option<Arc<Proxy>>,
    pub congestion: Congestion,
    /// Offers MPTCP on direct connections.
    pub multipath: bool,
    /// Used for direct connections, and by agents for targets. None: the kernel's.
    pub network: Option<Arc<dyn Network>>,
}

/// A connection to a server.
pub struct Reached {
    pub stream: Wire,
    /// Connects to the same server again, as far as possible: behind a proxy the name may lead to other servers.
    pub server: Server,
    /// Address of the proxy.
    pub proxy: Option<String>,
}

impl Reach {
    /// True if this `HOST:PORT` is reached through the proxy.
    pub fn goes_through_proxy(&self, server: &str) -> bool {
        self.proxy.as_ref().is_some_and(|proxy| proxy.endpoint_for(server).is_some())
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
            && let Some(endpoint) = proxy.endpoint_for(name)
        {
            let stream = endpoint.connect(name).await?.into();
            return Ok(Reached { stream, server: server.clone(), proxy: Some(endpoint.address) });
        }
        let stream = match self.network.clone() {
            None if self.multipath => direct::connect_by(server, connect_multipath).await?.into(),
            None => direct::connect(server).await?.into(),
            Some(network) => {
                let connect = move |address| network.connect(address);
                direct::connect_by(server, connect).await?
            }
        };
        let server = Server::At(stream.peer_addr()?);
        Ok(Reached { stream, server, proxy: None })
    }
}

async fn connect_multipath(to: SocketAddr) -> io::Result<TcpStream> {
    match multipath_socket(to) {
        Ok(socket) => socket.connect(to).await,
        Err(error) => {
            refine("MPTCP", Err(error));
            TcpStream::connect(to).await
        }
    }
}

/// Hint to append to a TLS error of a connection through a proxy. Empty without one.
pub fn tls_hint(proxy: Option<&str>) -> String {
    proxy.map_or_else(String::new, |proxy| {
        format!(" (through the proxy {proxy}: one that opens TLS must pass this connection on unopened)")
    })
}

//! The address of a server.

use std::fmt;
use std::net::SocketAddr;

/// A server to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// `HOST:PORT` as configured or found. Connected directly or through the proxy.
    Named(String),
    /// Connected directly at this address.
    At(SocketAddr),
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::At(address) => address.fmt(f),
        }
    }
}

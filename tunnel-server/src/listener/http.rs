//! Listeners whose connections `front/` serves from the first byte.

use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_routing::Router;

use super::context::OpenError;
use super::front::Front;
use super::open::{Listener, Opened};

/// HTTP on loopback, without authentication. Each request's Host names its node; nothing is added to the request.
pub(crate) struct Http(pub(crate) Arc<Front>);

/// HTTP by a node's name for clients in the cloud, which come through the internal Service. Clients in the configured
/// ranges may use it, others with a token.
pub(crate) struct Plain(pub(crate) Arc<Front>);

/// `/metrics` with TLS.
pub(crate) struct MetricsListener(pub(crate) Arc<Front>);

fn served(front: &Arc<Front>) -> Result<Opened, OpenError> {
    Ok(Opened::Served { front: front.clone(), prefix: Bytes::new() })
}

impl Listener for Http {
    const NAME: &'static str = "http";

    async fn open(&self, _: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        served(&self.0)
    }
}

impl Listener for Plain {
    const NAME: &'static str = "plain";

    async fn open(&self, _: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        served(&self.0)
    }
}

impl Listener for MetricsListener {
    const NAME: &'static str = "metrics";

    async fn open(&self, _: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        served(&self.0)
    }
}

//! Listeners whose connections `front/` serves from the first byte.

use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_routing::Router;

use super::context::OpenError;
use super::front::Front;
use super::serve::{Client, Listener, Opened};

/// HTTP on loopback, without authentication. Each request's Host names its node; nothing is added to the request.
pub(crate) const HTTP: &str = "http";

/// HTTP by a node's name for clients in the cloud, which come through the internal Service. Clients in the configured
/// ranges may use it, others with a token.
pub(crate) const PLAIN: &str = "plain";

/// `/metrics` with TLS.
pub(crate) const METRICS: &str = "metrics";

impl Listener for Arc<Front> {
    fn name(&self) -> &'static str {
        self.listener
    }

    async fn open(&self, _: &mut TcpStream, _: &mut Client, _: &Router) -> Result<Opened, OpenError> {
        Ok(Opened::Served { front: self.clone(), prefix: Bytes::new() })
    }
}

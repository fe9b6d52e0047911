//! The plain door: HTTP by a node's name for clients in the cloud, to which the internal Service leads. Clients in the configured
//! ranges may use it, others with a token.

use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::context::OpenError;
use super::front::Front;
use super::open::{Door, Opened};
use crate::route::Router;

pub(crate) struct Plain(pub(crate) Arc<Front>);

impl Door for Plain {
    const NAME: &'static str = "plain";

    async fn open(&self, _socket: &mut TcpStream, _router: &Router) -> Result<Opened, OpenError> {
        Ok(Opened::Served { front: self.0.clone(), prefix: Bytes::new() })
    }
}

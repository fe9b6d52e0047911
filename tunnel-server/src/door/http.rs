//! The http door: on loopback, without authentication. Each request's Host names its node; nothing is added to it.

use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::context::OpenError;
use super::front::Front;
use super::open::{Door, Opened};
use crate::route::Router;

pub(crate) struct Http(pub(crate) Arc<Front>);

impl Door for Http {
    const NAME: &'static str = "http";

    async fn open(&self, _socket: &mut TcpStream, _router: &Router) -> Result<Opened, OpenError> {
        Ok(Opened::Served { front: self.0.clone(), prefix: Bytes::new() })
    }
}

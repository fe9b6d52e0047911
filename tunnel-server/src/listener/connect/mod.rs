//! The connect listener: an HTTP proxy whose callers authenticate, and may reach what the policy permits.
//!
//! `CONNECT node:port`, `address:port` or `service.namespace:port` opens a connection. A request with an absolute
//! `http://` URL, which is how clients ask a proxy for plain HTTP, is forwarded as at the http listener. The port takes
//! both TLS and plain HTTP, and tells them apart by a client's first byte. A client may show a token only over TLS, or
//! from this host.
//!
//! Workloads on edge nodes use the same protocol through their agent.

mod asked;
mod gatekeeper;
mod reception;
#[cfg(test)]
mod tests;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

pub(super) use asked::parse;
#[cfg(test)]
pub(super) use gatekeeper::Denied;
pub(super) use gatekeeper::Reached;
pub(crate) use gatekeeper::{Gatekeeper, Services};
pub(crate) use reception::Reception;
pub(crate) use workload::{EDGE, Workload, WorkloadMap};

use super::context::OpenError;
use super::open::{Listener, Opened};
use crate::caller::CallerTls;
use crate::route::Router;

/// Maximum time in which a client has to begin.
const BEGIN: Duration = Duration::from_secs(10);
/// First byte of a TLS connection: the record type "handshake".
const TLS: u8 = 22;

pub(crate) struct Connect {
    pub(crate) reception: Reception,
    pub(crate) tls: Arc<CallerTls>,
}

impl Listener for Connect {
    const NAME: &'static str = "connect";

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        let mut first = [0];
        let peeked = timeout(BEGIN, socket.peek(&mut first)).await;
        let peeked =
            peeked.map_err(|_| OpenError::Client(format!("sent nothing within {} s", BEGIN.as_secs())))?;
        if peeked? == 0 {
            return Err(OpenError::Client("closed before a request".to_owned()));
        }
        let tls = (first == [TLS]).then(|| self.tls.clone());
        Ok(self.reception.front(Self::NAME, tls, None))
    }
}

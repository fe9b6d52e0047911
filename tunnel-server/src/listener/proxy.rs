//! The listener of the proxy, for clients of both TLS and plain HTTP.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_routing::Router;
use tunnel_runtime::NodeName;

use super::connect::Reception;
use super::context::OpenError;
use super::front::{Admission, Front};
use super::serve::{Client, Listener, Opened};
use crate::caller::CallerTls;

/// Maximum time in which a client has to begin.
const BEGIN: Duration = Duration::from_secs(10);
/// First byte of a TLS connection: the record type "handshake".
const TLS: u8 = 22;

/// The listener's name in logs and metrics.
pub(crate) const CONNECT: &str = "connect";

pub(crate) struct Connect {
    pub(crate) reception: Reception,
    pub(crate) tls: Arc<CallerTls>,
}

impl Listener for Connect {
    fn name(&self) -> &'static str {
        CONNECT
    }

    async fn open(&self, socket: &mut TcpStream, _: &mut Client, _: &Router) -> Result<Opened, OpenError> {
        let mut first = [0];
        let peeked = timeout(BEGIN, socket.peek(&mut first)).await;
        let peeked =
            peeked.map_err(|_| OpenError::Client(format!("sent nothing within {} s", BEGIN.as_secs())))?;
        if peeked? == 0 {
            return Err(OpenError::Client("closed before a request".to_owned()));
        }
        let tls = (first == [TLS]).then(|| self.tls.clone());
        let front = front(&self.reception, CONNECT, tls, None);
        Ok(Opened::Served { front, prefix: Bytes::new() })
    }
}

/// The front that answers a connection as a proxy. `node`: the edge node that it comes from, if any.
pub(super) fn front(
    reception: &Reception,
    listener: &'static str,
    tls: Option<Arc<CallerTls>>,
    node: Option<NodeName>,
) -> Arc<Front> {
    let admission = Admission::Policy(Box::new(reception.clone()), node);
    Arc::new(Front { listener, admission, tls, targets: None, pods: None, metrics: None })
}

#[cfg(test)]
mod tests;

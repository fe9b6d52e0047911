//! The connect listener: an HTTP proxy whose callers authenticate, and may reach what the policy permits.
//!
//! `CONNECT node:port`, `address:port` or `service.namespace:port` opens a connection. A request with an absolute
//! `http://` URL, which is how clients ask a proxy for plain HTTP, is relayed as at the http listener. The port takes
//! both TLS and plain HTTP, and tells them apart by a client's first byte. A client may show a token only over TLS, or
//! from this host.
//!
//! Workloads on edge nodes use the same protocol through their agent.

mod gatekeeper;
mod head;
mod inner;
mod reception;
mod workload;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_core::carry::prepare_socket;
use tunnel_core::outcome::Outcome;

#[cfg(test)]
pub(super) use gatekeeper::{Denied, Reached};
pub(crate) use gatekeeper::{Gatekeeper, Services};
pub(crate) use inner::pair;
pub(crate) use reception::Reception;
pub(crate) use workload::{EDGE, Workload, WorkloadMap};

use super::answer::{refuse, status_of};
use super::context::OpenError;
use super::open::{Door, Opened};
use crate::caller::{CallerTls, caller_of_certificate};
use crate::policy::Identity;
use crate::route::Router;

/// Maximum time for a client's part of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// First byte of a TLS connection: the record type "handshake".
const TLS: u8 = 22;

pub(crate) struct Connect {
    pub(crate) reception: Reception,
    pub(crate) tls: Arc<CallerTls>,
}

impl Door for Connect {
    const NAME: &'static str = "connect";

    async fn open(&self, socket: &mut TcpStream, _: &Router) -> Result<Opened, OpenError> {
        let client = socket.peer_addr()?;
        let client = SocketAddr::new(client.ip().to_canonical(), client.port());
        let tls = self.opened(socket).await?;
        let secure = tls.is_some() || client.ip().is_loopback();
        self.reception.receive(Self::NAME, socket, client, tls.unwrap_or_default(), secure).await
    }

    async fn failed(socket: &mut TcpStream, outcome: Outcome, detail: &str) {
        refuse(socket, status_of(outcome), "", detail).await;
    }
}

impl Connect {
    /// Ends the client's TLS, if there is any, and replaces `socket` by one that carries the plaintext. Returns the
    /// identity in its certificate; `None` without TLS.
    async fn opened(&self, socket: &mut TcpStream) -> Result<Option<Identity>, OpenError> {
        let mut first = [0];
        let peeked = timeout(HANDSHAKE, socket.peek(&mut first)).await;
        let peeked = peeked.map_err(|_| OpenError::Client("sent nothing within 10 s".to_owned()))?;
        if peeked? == 0 {
            return Err(OpenError::Client("closed before a request".to_owned()));
        }
        if first != [TLS] {
            return Ok(None);
        }
        let (inner, other) = pair().await?;
        prepare_socket(&inner);
        prepare_socket(&other);
        let outer = std::mem::replace(socket, inner);
        let accepted = timeout(HANDSHAKE, self.tls.acceptor_of_http_1().accept(outer)).await;
        let tls = accepted
            .map_err(|_| OpenError::Client("no TLS handshake within 10 s".to_owned()))?
            .map_err(|error| OpenError::Client(format!("TLS: {error}")))?;
        let certificate = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let identity = match certificate {
            Some(certificate) => {
                Identity::Certificate(caller_of_certificate(certificate).map_err(OpenError::Client)?)
            }
            None => Identity::None,
        };
        self.reception.context.drain.spawn(inner::relay(tls, other));
        Ok(Some(identity))
    }
}

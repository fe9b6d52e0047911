//! Clients inside this process, without sockets: those of a simulation. They take the way of all others.

use std::net::SocketAddr;

use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{PipeStatus, TunnelStream};

use super::access_log::AccessLogGuard;
use super::context::{Failed, ListenerContext, OpenRequest, Reached};
use super::upstream::Upstream;
use crate::admission::Shares;

/// The listener's name in logs and metrics.
const PIPED: &str = "piped";

/// A listener for such clients.
#[derive(Clone)]
pub struct Piped {
    context: ListenerContext,
    shares: Shares,
}

/// The record of an open connection, with its place.
pub struct PipedRecord {
    record: AccessLogGuard,
    status: PipeStatus,
}

impl Piped {
    /// Allows `limit` connections at a time.
    pub fn new(context: ListenerContext, limit: u32) -> Self {
        Self { context, shares: Shares::new(limit) }
    }

    /// Opens a connection for a client that names both node and target.
    ///
    /// # Errors
    /// The reason why there is none.
    pub async fn open(
        &self,
        request: OpenRequest,
        client: SocketAddr,
    ) -> Result<(TunnelStream, PipedRecord), String> {
        let mut record = AccessLogGuard::new(PIPED, client, &request, &self.context);
        let (reached, place) = (Reached::Edge(request), self.shares.admit(client.ip()));
        let opened = Upstream::open(&self.context, &reached, client, place, &mut record).await;
        match opened {
            Ok(upstream) => {
                let stream = upstream.into_pipe(&record);
                let status = stream.status();
                Ok((stream, PipedRecord { record, status }))
            }
            Err(Failed { outcome, reason }) => {
                record.end(outcome, &reason);
                Err(reason)
            }
        }
    }
}

impl PipedRecord {
    /// The client has read to the end, or to an error.
    pub fn end(self) {
        let (outcome, reason) = self.status.failure().unwrap_or((Outcome::Ok, String::new()));
        self.record.end(outcome, &reason);
    }
}

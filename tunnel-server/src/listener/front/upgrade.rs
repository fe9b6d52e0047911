//! Connections that were upgraded from HTTP to another protocol, such as SPDY or WebSocket for `kubectl exec`.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tunnel_runtime::error::chain;

use super::body::Exchange;
use crate::listener::socket::Watched;

/// Bytes copied at a time in each direction.
const BUFFER: usize = 16 << 10;

/// A connection that has changed its protocol, for a client that is being told so.
pub(super) struct Upgraded {
    pub(super) client: OnUpgrade,
    pub(super) target: OnUpgrade,
    pub(super) exchange: Exchange,
}

impl Upgraded {
    /// Relays bytes both ways until both ends have ended. Bytes that one end sent before the other had switched come first:
    /// hyper keeps them.
    pub(super) async fn run(self, watched: Watched) {
        let Self { client, target, exchange } = self;
        let target = match target.await {
            Ok(target) => target,
            Err(error) => return exchange.broken(&chain(&error)),
        };
        let Ok(client) = client.await else { return exchange.abandoned() };
        let (mut client, mut target) = (TokioIo::new(client), TokioIo::new(target));
        let ended = tokio::select! {
            biased;
            ended = copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER, BUFFER) => ended,
            // Also while a client that does not read keeps the copying from noticing.
            failed = exchange.record.aborted() => return exchange.broken(&failed.reason),
            // Also while the target is silent: after the client's FIN the copying does not see a reset.
            _ = watched.lost() => return exchange.abandoned(),
        };
        match ended {
            Ok(_) => exchange.complete(),
            // The error does not tell which end it was. The pipe knows if it was the target's.
            Err(error) => exchange.severed(&error, &watched).await,
        }
    }
}

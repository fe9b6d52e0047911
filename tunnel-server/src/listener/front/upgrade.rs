//! Connections that were upgraded from HTTP to another protocol, such as SPDY or WebSocket for `kubectl exec`.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tunnel_runtime::error::chain;

use super::body::Exchange;

/// Bytes copied at a time in each direction.
const BUFFER: usize = 16 << 10;

/// Relays bytes both ways until both ends have ended. Bytes that one end sent before the other had switched come first:
/// hyper keeps them.
pub(super) async fn relay(client: OnUpgrade, target: OnUpgrade, exchange: Exchange) {
    let target = match target.await {
        Ok(target) => target,
        Err(error) => return exchange.broken(&chain(&error)),
    };
    let Ok(client) = client.await else { return exchange.abandoned() };
    let (mut client, mut target) = (TokioIo::new(client), TokioIo::new(target));
    let ended = tokio::select! {
        ended = copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER, BUFFER) => ended,
        // Also while a client that does not read keeps the copying from noticing.
        failed = exchange.record.aborted() => return exchange.broken(&failed.reason),
    };
    match ended {
        Ok(_) => exchange.complete(),
        // The error does not tell which end it was. The pipe knows if it was the target's.
        Err(error) => exchange.severed(&error),
    }
}

//! Connections that have become something else than HTTP: SPDY or WebSocket of `kubectl exec`, for example.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tunnel_core::error::chain;

use super::body::Exchange;

/// Bytes that are copied at a time, each way.
const BUFFER: usize = 16 << 10;

/// Carries bytes both ways until both ends have ended. What either end sent before the other had switched comes first: hyper
/// keeps it.
pub(super) async fn carry(client: OnUpgrade, target: OnUpgrade, exchange: Exchange) {
    let target = match target.await {
        Ok(target) => target,
        Err(error) => return exchange.broken(&chain(&error)),
    };
    let Ok(client) = client.await else { return exchange.abandoned() };
    let (mut client, mut target) = (TokioIo::new(client), TokioIo::new(target));
    match copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER, BUFFER).await {
        Ok(_) => exchange.complete(),
        // Whose end it was is not known from the error. The pipe knows if it was the target's.
        Err(error) => exchange.severed(&error),
    }
}

//! Whether a link is alive: HTTP/2 PINGs, which measure the round-trip time as well.

use std::time::Instant;

use h2::{Ping, PingPong};

use super::error::LinkDead;
use super::flow::Flow;
use super::settings::{PING_INTERVAL, PING_TIMEOUT};
use crate::backoff::jittered;

/// Pings until the link is dead, measures the round-trip time, and calls `tick` before each PING. On a slow link an answer
/// may be long under way: what else arrives meanwhile shows that the peer lives.
pub async fn keep_alive(mut pings: PingPong, flow: &Flow, mut tick: impl FnMut()) -> LinkDead {
    loop {
        tick();
        let sent = Instant::now();
        let mut pong = std::pin::pin!(pings.ping(Ping::opaque()));
        loop {
            let received = flow.received();
            match tokio::time::timeout(PING_TIMEOUT, &mut pong).await {
                Err(_) if flow.received() == received => return LinkDead::Timeout,
                Err(_) => tick(),
                Ok(Err(error)) => return LinkDead::Failed(error),
                Ok(Ok(_)) => break flow.rtt.add(sent.elapsed()),
            }
        }
        // Jitter, so that thousands of links do not ping in step.
        tokio::time::sleep(jittered(PING_INTERVAL, 0.1)).await;
    }
}

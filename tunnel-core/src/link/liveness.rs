//! Whether a link is alive, and its round-trip time: HTTP/2 PINGs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use h2::{Ping, PingPong};

use super::error::LinkDead;
use super::settings::{PING_INTERVAL, PING_TIMEOUT};
use crate::backoff::jittered;

/// The round-trip time of a link. Kept in microseconds; 0 until the first answer.
#[derive(Debug, Default)]
pub struct Rtt(AtomicU32);

impl Rtt {
    /// The last measurement; `None` before the first.
    pub fn last(&self) -> Option<Duration> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(u64::from(micros))),
        }
    }
}

/// Pings until the link is dead, measures the round-trip time, and calls `tick` before each PING.
pub async fn keep_alive(mut pings: PingPong, rtt: &Rtt, mut tick: impl FnMut()) -> LinkDead {
    loop {
        tick();
        let sent = Instant::now();
        match tokio::time::timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await {
            Err(_) => return LinkDead::Timeout,
            Ok(Err(error)) => return LinkDead::Failed(error),
            Ok(Ok(_)) => {
                let micros = u32::try_from(sent.elapsed().as_micros()).unwrap_or(u32::MAX).max(1);
                rtt.0.store(micros, Ordering::Relaxed);
            }
        }
        // Jitter, so that thousands of links do not ping in step.
        tokio::time::sleep(jittered(PING_INTERVAL, 0.1)).await;
    }
}

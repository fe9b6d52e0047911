//! Whether a link is alive, and its round-trip time: HTTP/2 PINGs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use h2::{Ping, PingPong};

use super::error::LinkDead;
use super::flow::Flow;
use super::settings::{PING_INTERVAL, PING_TIMEOUT};
use crate::backoff::jittered;

/// The round-trip time of a link. Kept in microseconds; 0 until the first answer.
#[derive(Debug, Default)]
pub struct Rtt {
    last: AtomicU32,
    shortest: AtomicU32,
}

impl Rtt {
    /// The last measurement; `None` before the first.
    pub fn last(&self) -> Option<Duration> {
        duration(&self.last)
    }

    /// The shortest lately: that of the path without what waits in front of it.
    pub fn shortest(&self) -> Option<Duration> {
        duration(&self.shortest)
    }

    pub(super) fn add(&self, sample: Duration) {
        let micros = u32::try_from(sample.as_micros()).unwrap_or(u32::MAX).max(1);
        self.last.store(micros, Ordering::Relaxed);
        // A path that has become longer is believed after some minutes.
        let shortest = match self.shortest.load(Ordering::Relaxed) {
            0 => micros,
            before => micros.min(before.saturating_add(micros.saturating_sub(before) / 16)),
        };
        self.shortest.store(shortest, Ordering::Relaxed);
    }
}

fn duration(micros: &AtomicU32) -> Option<Duration> {
    match micros.load(Ordering::Relaxed) {
        0 => None,
        micros => Some(Duration::from_micros(micros.into())),
    }
}

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
